"""Scores of contiguous keys.

`reference` is the definition, `cpu` sums in one fixed order. On a GPU, `hopper` (`hopper.cu`: wgmma fed by TMA, one
warpgroup runs the epilogue while the other multiplies) takes the shapes that it supports, the kernel of `paged` all
others. `tiles.cuh` defines the tiles to score, `products.cuh` has the wgmma instructions, `warpgroups.cuh` the work of
each warpgroup and the epilogue.
"""
