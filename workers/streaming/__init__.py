"""Unbounded generation in constant memory: which rows a stream keeps, and a model that generates from them."""
