"""Exact top-k of each row of scores, with a unique result.

`reference` defines the order and the result; `select.top_k` runs on any device. On a GPU, `device` launches `radix.cu`
(few or short rows: radix select in registers) or `buffered.cu` (many long rows: reads each score once); `grouped`
(`grouped.cu`) chooses from one or two long rows, given the best score of each group. These kernels share `entries.cuh`.
"""
