"""Scores of keys that lie side by side.

`reference` is the definition, `cpu` sums in one fixed order. On a GPU `device` takes `hopper` (`hopper.cu`: wgmma fed
by TMA, one warpgroup weighs while the other multiplies) where it suits, else `triton_kernels`.
`tiles.cuh` has what there is to score, `products.cuh` the wgmma instructions, `warpgroups.cuh` who does what, and the
epilogue.
"""
