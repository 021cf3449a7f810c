"""What kernels on the CPU share: floats of three widths as vectors of float32, and threads that run lists of them."""
