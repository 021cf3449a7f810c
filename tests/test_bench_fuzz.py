"""`bench.fuzz`: a run without a try finds no fault, but shows nothing."""

import sys

import pytest
import torch

from bench import fuzz
from bench.timing import GateError


def test_a_run_without_a_try_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _number: None)
    monkeypatch.setattr(sys, "argv", ["fuzz", "--seconds", "0"])
    with pytest.raises(GateError, match="nothing was tried in 0 s; give more --seconds"):
        fuzz.main()
