"""Index keys in a paged KV cache, and their scores.

`cache` has the layout, `score.score_pages` the scores of each query's pages: by `hopper` (`hopper.cu`: wgmma, long
sequences), else `triton_kernels`; on the CPU as `csattn.lightning.score.cpu` sums.
"""
