"""Search on the CPU: from a step's queries to the context rows each head should attend to.

`reference.py` is the definition. A `LayerSearch` runs in the calling thread; a `SearchPool` shares it out among
threads, at once or from `start` to `finish`. Scratch memory is kept.
"""

from csattn.search.in_turn import SearchSeries, make_series
from csattn.search.pool import SearchPool
from csattn.search.run import LayerSearch
from csattn.search.workspace import SearchWorkspace, TokenSelections, empty_selection, empty_token_selections

__all__ = [
    "LayerSearch",
    "SearchPool",
    "SearchSeries",
    "SearchWorkspace",
    "TokenSelections",
    "empty_selection",
    "empty_token_selections",
    "make_series",
]
