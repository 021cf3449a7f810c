"""Attention over sets of KV rows, each with its log-sum-exp, and their merge."""

from csattn.attention.attend import attend, attend_chunk
from csattn.attention.merge import join_sinks, merge_state

__all__ = ["attend", "attend_chunk", "join_sinks", "merge_state"]
