"""The operations of a step in Triton."""
