"""Building blocks of CPU kernels: compilation, vectors, atomics, and the threads that run them."""
