"""One model and its contexts on two devices, a process each: the same tokens as on one. Kernels run on the CPU, and
sums go over gloo, where there are not so many devices."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from csattn.artifact import Artifact, open_artifact
from csattn.config import SearchConfig, preset
from csattn.errors import ConfigError, ContextError, CsattnError
from csattn.sketch.own import Growth
from index_build.pipeline import build_artifact
from offload.errors import PinningError
from tests.cuda_on_cpu import emulated
from tests.tiny import loaded, token_ids
from tests.workers.engine.emulated_engine import emulate
from tests.workers.engine.emulated_follower import KERNELS
from workers.engine import placed_model
from workers.engine.gpu_engine import GpuEngine
from workers.engine.split_engine import SplitEngine
from workers.serving.messages import Selector
from workers.serving.step_engine import StepEngine, StepRow

ON_GPUS = torch.cuda.device_count() > 1
DEVICE = torch.device("cuda", 0) if ON_GPUS else torch.device("cpu")
MODULE = "workers.engine.follower" if ON_GPUS else "tests.workers.engine.emulated_follower"
CONFIG = SearchConfig(keep=0.1, window_len=16)
CONTEXT_LENS = (300, 340)
QUESTIONS = [token_ids(5, seed=1).tolist(), token_ids(3, seed=2).tolist()]
OPTIONS: dict[str, Any] = {
    "batch_sizes": (1, 4),
    "num_slots": 2,
    "tail_capacity": 32,
    "num_contexts": 2,
    "max_context_len": 400,
    "num_threads": 2,
    "device": DEVICE,
}

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() == 1, reason="kernels are compiled for this machine's one device"
)


@pytest.fixture(autouse=True)
def kernels(emulator: emulated.Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(emulator, monkeypatch)
    monkeypatch.setenv(KERNELS, str(emulator.directory))


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Artifact]]:
    store: Path = tmp_path_factory.mktemp("store")
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                open_artifact(build_artifact(loaded(), token_ids(n, seed=n), preset("default"), store).path)
            )
            for n in CONTEXT_LENS
        ]


def one(placement: str, **changes: Any) -> GpuEngine:
    return GpuEngine(loaded(), CONFIG, placement, **{**OPTIONS, **changes})


def two(placement: str, **changes: Any) -> SplitEngine:
    return SplitEngine(loaded(), CONFIG, placement, 2, module=MODULE, **{**OPTIONS, **changes})


def logits_of(engine: StepEngine, slot: int, tokens: list[int]) -> np.ndarray:
    result = engine.step([StepRow(slot, token) for token in tokens], want_logits=True)
    assert result.logits is not None
    return result.logits.copy()


def talk(engine: StepEngine, artifacts: list[Artifact], selector: Selector) -> tuple[list[list[int]], np.ndarray]:
    """Two requests over two contexts, in one step where they fit; then the first is kept and goes on elsewhere."""
    for context_id, artifact in enumerate(artifacts):
        engine.add_context(context_id, artifact)
    for slot in range(2):
        engine.open(slot, slot, CONFIG, selector)
    engine.step([StepRow(0, token) for token in QUESTIONS[0][:4]])
    last = engine.step([StepRow(0, QUESTIONS[0][4]), *(StepRow(1, token) for token in QUESTIONS[1])]).next_ids
    said = [[int(last[0])], [int(last[-1])]]
    for _ in range(3):
        result = engine.step([StepRow(slot, said[slot][-1]) for slot in range(2)])
        for slot, token in enumerate(result.next_ids.tolist()):
            said[slot].append(token)
    rows = engine.read_rows(0, 0, 8)()
    engine.close_slot(1)
    engine.remove_context(1)
    engine.open(1, 0, CONFIG, selector)
    engine.write_rows(1, rows)
    return said, np.concatenate([logits_of(engine, 0, said[0][3:]), logits_of(engine, 1, said[0][3:])])


@pytest.mark.parametrize(
    ("placement", "selector"),
    [
        ("hybrid", "csattn"),
        *(pytest.param(name, "csattn", marks=pytest.mark.gpu) for name in ("device", "host")),
        *(pytest.param(name, "full", marks=pytest.mark.gpu) for name in ("device", "hybrid")),
    ],
)
def test_two_devices_say_what_one_says(artifacts, placement, selector) -> None:
    with one(placement, selector=selector) as engine:
        want_said, want = talk(engine, artifacts, selector)
        want_counts = engine.counts()
    with two(placement, selector=selector) as engine:
        said, got = talk(engine, artifacts, selector)
        counts = engine.counts()
        assert "1 contexts, 2 requests" in repr(engine)
    assert said == want_said
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)
    assert (counts.kv_bytes, counts.slot_lookups) == (want_counts.kv_bytes, want_counts.slot_lookups)
