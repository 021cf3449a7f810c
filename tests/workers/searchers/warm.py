"""Imported by the server that forks workers, so that they find all kernels compiled."""

import numpy as np

from csattn.search import LayerSearch, SearchWorkspace, TokenSelections
from tests.search.synthetic import IndexSpec, make_index
from workers.searchers.words import compile_words

compile_words()
_spec = IndexSpec(context_len=64)
_out = TokenSelections(np.zeros((1, _spec.num_heads, 1), np.int32), np.zeros((1, _spec.num_heads), np.int32))
_q = np.ones((1, _spec.num_heads, _spec.head_dim), np.float32)
LayerSearch(_q, make_index(_spec), None, 0, 0, 1.0, _out).run(SearchWorkspace())
