"""A model's step on the CPU: as many rows as come, each with the results it would have alone."""
