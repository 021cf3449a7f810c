"""`bench.spread` in small: two nodes of this machine, and one that goes while answers are under way."""

from pathlib import Path

import pytest

from bench import spread

pytestmark = pytest.mark.ray


def test_nothing_is_wrong_when_a_node_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="the package ray is not installed; pip install 'csattn[serve]'")
    monkeypatch.setattr(spread, "NODE_AWAY_S", 0.5)
    sizes = "--nodes 2 --workers 2 --contexts 3 --context-chars 300 --answer-tokens 40 --every-s 4 --least-kills 1"
    trace = "--sessions 20 --per-minute 150 --turns 2 --think-s 0.1"
    result = spread.measure(spread.parser().parse_args(f"{sizes} {trace}".split()), tmp_path)
    assert result["killed"] >= 1 and result["turns"] >= 20 and result["samples"] > 3
    assert 0 < result["requests_where_their_context_was"] <= 1
