"""The operations of a decode step on a GPU: kernels in Triton, and in CUDA C for weights of 8 or 4 bits."""
