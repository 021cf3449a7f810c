"""A step on the CPU as tapes: as many rows as come, each with the results it would have alone."""
