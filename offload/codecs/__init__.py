"""Rows of a context in fewer bytes: formats by name, their definition, and what encodes and decodes them."""
