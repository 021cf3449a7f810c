"""Steps on a GPU, or on several of one host: `GpuEngine`, `SplitEngine`, and what they are made of."""
