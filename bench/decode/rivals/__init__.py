"""The selectors that csattn is compared with, as fast as this machine lets them be, in whole steps.

* **MagicPIG** (`sampled`, `magicpig`): the GPU hashes queries and attends to near rows; the CPU probes the tables and
  attends to the sampled rows where they lie. Queries and codes travel down, outputs with their sums up.
* **PQCache** (`chosen`, `choosers`, `pqcache`): the CPU looks up the codes of all keys and chooses; rows travel that
  have no place in the slot cache. Or, as in its authors' code (`chosen_on_device`): codes travel to the GPU a layer
  ahead, which scores and chooses with torch's operators.
* **SparQ** (`chosen`, `choosers`, `sparq`): the CPU reads a quarter of the channels of a second copy of the keys; the
  token's own row travels down, rows, the mean value and its share up.
* **H2O** (`heavy`, `row_kernels`): nothing travels. The GPU attends to the rows that are left and keeps the book of
  what they receive; what was evicted is gone.

Rows travel and are attended to as ours: slot cache, gather and attention are the engine's. Kernels of the CPU run on
the team of threads that the CPU engine has, on all cores. All decide by the layer's own query, as published.
Definitions: `csattn.selectors`.
"""
