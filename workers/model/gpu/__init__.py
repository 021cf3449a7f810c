"""`StepOps` in Triton."""
