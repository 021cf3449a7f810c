"""Steps on a CPU: `CpuEngine`, and what it is made of."""
