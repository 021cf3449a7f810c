"""What an indexer scores, as models make it, and its number formats. Elementwise, so that a row's bits are its own.

`indexer`: queries, keys and weights. `compressor`: V4's keys. `quantise`: FP8 and FP4. `rotations`: Hadamard, RoPE.
"""
