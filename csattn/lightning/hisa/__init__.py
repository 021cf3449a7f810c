"""HISA (arXiv:2603.28458): scores blocks of keys first, then the keys of the best blocks.

Read `select.hisa_top_k` first. `pooling` makes block keys; `choice` (`choice.cu`) chooses the best blocks of each query
on a GPU; `score` (`score.cu`) scores their keys by wgmma, block by block; `reference` defines the choice of blocks.
"""
