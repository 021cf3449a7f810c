"""Streaming top-k (StreamIndex): the best keys of many queries in bounded memory.

`stream.choose_keys` merges what tiles of queries and keys give, or for many queries on a GPU has `contenders`
(`contenders.cu`) write no scores at all: a sample of the keys gives each query a bar, and what reaches it is listed.
"""
