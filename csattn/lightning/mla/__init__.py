"""Attention of each query over the latent rows that were chosen for it (MLA).

`attend.sparse_mla` first; `reference` is the definition. `hopper` (`hopper.cu`: wgmma) has many heads of many queries,
`triton_kernels` the rest: split-K over the rows, merged by a second launch.
"""
