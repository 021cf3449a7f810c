"""Search on the CPU: for a step's queries, choose the context rows that each head attends to.

`reference.py` is the definition. A `LayerSearch` runs in the calling thread; a `SearchPool` divides it among threads
and waits for it, or runs it in the background from `start` to `finish`. Scratch memory is reused.
"""

from csattn.search.pool import SearchPool
from csattn.search.run import LayerSearch
from csattn.search.series import SearchSeries
from csattn.search.workspace import SearchWorkspace, TokenSelections, empty_token_selections

__all__ = ["LayerSearch", "SearchPool", "SearchSeries", "SearchWorkspace", "TokenSelections", "empty_token_selections"]
