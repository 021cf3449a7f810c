"""The table: each centroid's scores against all keys, as quantised rows or as Top-L lists."""
