"""What kernels on the CPU are made of: how they are compiled, vectors, atomics, and threads that run them."""
