"""Decode steps: on a GPU by where a context's index and KV lie: device, host, or both; on the CPU all is in place."""
