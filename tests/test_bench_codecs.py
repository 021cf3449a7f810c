"""The benchmark of codecs: its checks accept correct results and refuse wrong ones."""

from collections.abc import Callable

import numpy as np
import pytest

from bench import codecs
from bench.timing import GateError
from offload.codecs import reference


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run everything once, over few rows."""

    def once(run: Callable[[], object], seconds: float) -> dict[str, float]:
        run()
        return {"cpu_p50_ms": 1.0}

    monkeypatch.setattr(codecs, "measure", once)
    monkeypatch.setattr(codecs, "NUM_ROWS", 1000)


@pytest.mark.parametrize("name", ["plain bfloat16", "q8_0", "k=q8_0,v=q4_0"])
def test_speed_is_reported_after_the_gates_pass(name: str) -> None:
    result = codecs.speed(name)
    row_bytes = {"plain bfloat16": 512, "q8_0": 272, "k=q8_0,v=q4_0": 208}[name]
    assert result["row_bytes"] == row_bytes
    assert result["gather_ns_per_row"] == pytest.approx(1e6 / (codecs.HEADS * 50), rel=1e-3)
    assert ("encode_gbps" in result) == (name != "plain bfloat16")
    assert f"| {name} | {row_bytes} |" in codecs.table([result])


def test_bytes_that_differ_from_the_definition_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = reference.encode
    monkeypatch.setattr(reference, "encode", lambda form, values: encode(form, -values))
    with pytest.raises(GateError, match="q8_0 encodes otherwise than defined"):
        codecs.speed("q8_0")


def test_the_table_shows_the_kl_that_a_format_adds() -> None:
    common = {"model": "tiny", "text": "speech", "selector": "full", "row_bytes": 512, "top1_agreement": 1.0}
    cases = [{**common, "format": "as built", "kl": 0.001}, {**common, "format": "q4_0", "kl": np.float64(0.011)}]
    assert "| tiny | speech | full | q4_0 | 512 | 0.01100 | +0.01000 | 1.000 |" in codecs.table(cases)
