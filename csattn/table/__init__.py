"""Top-L lists of keys by centroid, and their extension by a request's own rows while it decodes."""
