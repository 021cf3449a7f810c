"""`bench.search` times threads only if they choose what the definition chooses."""

import pytest

from bench import search, search_layer
from bench.timing import GateError
from csattn.search import SearchPool

CONTEXT_LEN = 1500


def test_threads_that_choose_otherwise_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_layer, "read_bandwidth_gbps", lambda _threads: 10.0)
    monkeypatch.setattr(search_layer, "NUM_LAYERS", 2)
    monkeypatch.setattr(search, "TABLE_BYTES", 1 << 20)
    for layout in search.LAYOUTS:
        assert set(search.measure_layout(layout, CONTEXT_LEN, {1: 10.0, 2: 10.0}, 0.01)["threads"]) == {1, 2}
    search_layer.main(None, CONTEXT_LEN, [1, 2], 0.01)
    for name in ("start", "finish", "search_layers"):
        monkeypatch.setattr(SearchPool, name, lambda *_: None)
    for layout in search.LAYOUTS:
        with pytest.raises(GateError, match="1500 keys: 1 threads choose otherwise than one"):
            search.measure_layout(layout, CONTEXT_LEN, {1: 10.0}, 0.01)
    with pytest.raises(GateError, match="1 threads choose otherwise than one"):
        search_layer.main(None, CONTEXT_LEN, [1], 0.01)
