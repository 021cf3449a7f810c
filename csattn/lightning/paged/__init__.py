"""Index keys in a paged KV cache, and their scores.

`cache` defines the layout. `score.score_pages` scores each query's own pages: on a GPU by `hopper` (`hopper.cu`: wgmma,
long sequences) or else `triton_kernels`, on the CPU with the sums of `csattn.lightning.score.cpu`.
"""
