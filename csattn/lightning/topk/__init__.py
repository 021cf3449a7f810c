"""Exact selection: the k best of each row of scores, with one result only.

`reference` is the order and the definition; `select.top_k` runs on any device. On a GPU `device` takes `radix.cu` (few
rows or short ones, in registers, digit by digit) or `buffered.cu` (many long ones, each score read once); `grouped`
(`grouped.cu`) chooses from one or two long rows of which the best of groups are known. `entries.cuh` has what the
kernels that select share.
"""
