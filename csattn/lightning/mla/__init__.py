"""MLA attention of each query over the latent rows that were chosen for it.

Read `attend.sparse_mla` first; `reference` is the definition, `rows` has the arguments. On a GPU, `hopper`
(`hopper.cu`: wgmma) takes many heads of many queries, `triton_kernels` the rest: split-K over the rows, merged by a
second launch.
"""
