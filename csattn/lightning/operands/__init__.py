"""An indexer's operands, as models make them, and their number formats. Elementwise: a row's bits are its own.

`indexer`: queries, keys and weights. `compressor`: V4's keys. `quantise`: FP8 and FP4. `rotations`: Hadamard, RoPE.
"""
