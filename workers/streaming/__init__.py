"""Unbounded generation in constant memory: which KV rows a stream keeps, and a model that generates from them."""
