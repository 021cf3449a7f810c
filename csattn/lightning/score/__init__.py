"""Scores of keys that lie side by side.

`reference` is the definition, `cpu` sums in one fixed order. On a GPU `hopper` (`hopper.cu`: wgmma fed by TMA, one
warpgroup weighs while the other multiplies) has the shapes that suit it, the kernel of `paged` the others.
`tiles.cuh` has what there is to score, `products.cuh` the wgmma instructions, `warpgroups.cuh` the work of each
warpgroup, and the epilogue.
"""
