"""`bench.llama_cpp` measures llama.cpp in another process, and reads that process's figures."""

import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from bench.llama_cpp.__main__ import NUM_STEPS, WARM_UP, _llama_cpp, _measured_fields
from bench.timing import GateError

STAND_IN = """
from types import SimpleNamespace
__version__ = "0"
class Llama:
    metadata = {"general.file_type": "15"}
    def __init__(self, model, n_ctx, **options):
        self.room = n_ctx
    def eval(self, tokens):
        self.room -= len(tokens)
        assert self.room >= 0
    def save_state(self):
        return SimpleNamespace(llama_state_size=7)
"""


def test_llama_cpp_is_timed_over_steps_that_follow_a_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama_cpp.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    options = Namespace(python=sys.executable, model=tmp_path / "m.gguf", threads=1)
    measured = _llama_cpp("llama.cpp", np.arange(20 + NUM_STEPS, dtype=np.int32), 20, options)
    assert len(measured["steps_ms"]) == NUM_STEPS
    assert (measured["version"], measured["weights"], measured["stored_bytes"]) == ("0", "Q4_K_M", 7)
    with pytest.raises(GateError, match=r"llama\.cpp ended with 1"):
        _llama_cpp("llama.cpp", np.arange(3, dtype=np.int32), "many", options)


def test_warm_up_steps_are_excluded_from_the_figures() -> None:
    told = _measured_fields({"steps_ms": [1000.0] * WARM_UP + [2.0] * (NUM_STEPS - WARM_UP), "prefill_s": 1.0})
    assert told == {"prefill_s": 1.0, "step_p50_ms": 2.0, "step_most_ms": 2.0}
    with pytest.raises(GateError):
        _measured_fields({"steps_ms": [2.0] * NUM_STEPS + [2.0]})
