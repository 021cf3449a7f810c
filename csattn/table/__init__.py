"""Top-L lists, and what extends them while a request decodes."""
