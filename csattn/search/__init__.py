"""Search on the CPU: from a step's queries to the context rows each head should attend to.

`reference.py` is the definition. `search` serves one token in the calling thread, `search_tokens` several,
`SearchPool` shares the same work out among threads, at once or from `start` to `finish`. Scratch memory is kept.
"""

from csattn.search.in_turn import SearchSeries, make_series
from csattn.search.pool import SearchPool
from csattn.search.run import LayerSearch, search, search_tokens
from csattn.search.workspace import SearchWorkspace, TokenSelections, empty_selection

__all__ = [
    "LayerSearch",
    "SearchPool",
    "SearchSeries",
    "SearchWorkspace",
    "TokenSelections",
    "empty_selection",
    "make_series",
    "search",
    "search_tokens",
]
