"""Streaming top-k (StreamIndex): the best keys of many queries in bounded memory.

`stream.choose_keys` merges the best of tiles of queries and keys. For many queries on a GPU, `contenders`
(`contenders.cu`) does not write all scores: a sample of the keys gives each query a threshold, and only keys
that reach it are listed and chosen from.
"""
