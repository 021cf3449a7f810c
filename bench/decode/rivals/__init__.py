"""The selectors that csattn is compared with, as fast as this machine lets them be, in whole steps.

| | where it decides | what travels each layer and step | which kernels |
|---|---|---|---|
| MagicPIG | codes of q on the GPU; tables probed and rows attended on the CPU | queries and codes down, outputs with their sums up | `magicpig`, near rows by `heavy_kernels` |
| PQCache | on the CPU | queries down, rows up: those without a slot in the cache of rows | `pqcache`, `best_rows`, the engine's slot cache, gather and attention |
| PQCache, its authors' way | on the GPU, by torch | codes of all keys up, then rows as above | torch, then as above |
| SparQ | on the CPU | queries, the newest row down; rows, shares and the mean value up | `sparq`, `best_rows`, then as above |
| H2O | on the GPU, nothing to decide: what was evicted is gone | nothing | `heavy_kernels` |

All decide by the layer's own query, as published: none of them predicts it. CPU kernels run on the team of threads that the
CPU engine has (`csattn.cpu.team`), on all cores. Definitions: `csattn.selectors`.
"""
