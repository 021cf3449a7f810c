"""Serve many requests at once: requests and replies (`messages`), continuous batching, contexts, and metrics."""
