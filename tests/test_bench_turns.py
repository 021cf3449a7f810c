"""What `bench.turns` does in minutes, with a model that takes milliseconds."""

from pathlib import Path

import pytest

from bench.turns import kills
from tests.tiny import save


def test_nothing_wrong_is_found_after_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])
    result = kills.run(2, seed=1, model=str(save(tmp_path / "model")), longest_s=2.0, finds_context=True)
    assert result["kills"] == 2 and result["pieces"] > 12 and result["files"] > 0
