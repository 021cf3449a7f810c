"""`bench.search` times threads only if they choose what the definition chooses."""

import pytest

from bench import search
from bench.timing import GateError
from csattn.search import SearchPool

CONTEXT_LEN = 1500


def test_threads_that_choose_otherwise_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "TABLE_BYTES", 1 << 20)
    for layout in search.LAYOUTS:
        assert set(search.measure_layout(layout, CONTEXT_LEN, {1: 10.0, 2: 10.0}, 0.01)["threads"]) == {1, 2}
    monkeypatch.setattr(SearchPool, "search_layers", lambda *_: None)
    for layout in search.LAYOUTS:
        with pytest.raises(GateError, match="1500 keys: 1 threads choose otherwise than one"):
            search.measure_layout(layout, CONTEXT_LEN, {1: 10.0}, 0.01)
