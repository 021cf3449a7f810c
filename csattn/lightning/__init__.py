"""Learned indexers (DeepSeek-V3.2, V4): score every key with a few small heads, attend to the best.

Import from the modules. `order` is what "best" means in all of them, `score` what a score is, `topk` what a choice is.
Prefill: `stream.choose_keys`, by `score_cpu`, or on a GPU by `contenders` over `score_device`: `hopper_score` where it
suits, else `score_kernels`. Operands: `quantise`, `rotations`, `compressor` (V4's keys), `key_cache` (V3.2's keys in
pages). Decoding: `dsa`, over `page_score` and `sparse_mla`; `hisa` looks for candidates first.
"""
