"""A decode step on the CPU, as tapes of stages: for any number of rows, each with the bits it would have alone."""
