"""The scheduler's engine over a GPU: requests in any company, contexts that come and go. Kernels run on the CPU where
there is no device."""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from csattn.artifact import Artifact, open_artifact
from csattn.attention import device as attention
from csattn.config import SearchConfig, preset
from csattn.errors import ConfigError, ContextError
from csattn.search.device import compiling
from index_build.pipeline import build_artifact
from offload import gather, slot_cache, step_mail
from offload.budget import AvailableMemory
from offload.errors import MemoryPlanError, PinningError
from offload.pinned import PinnedRows
from tests.cuda_on_cpu import emulated
from tests.cuda_on_cpu.emulated import DEVICE
from tests.tiny import loaded, token_ids
from tests.workers.engine.talks import next_ids_beside_nan
from workers.engine import PLACEMENTS, gpu_engine, placed_model
from workers.engine.cpu_engine import CpuEngine
from workers.engine.gpu_engine import GpuEngine
from workers.searchers.worker_searcher import WorkerSearcher
from workers.serving.step_engine import StepEngine, StepRow
from workers.session import csattn_session

CONTEXT_LENS = (300, 340)
CONFIG = SearchConfig(keep=0.1, window_len=16)
QUESTIONS = [token_ids(5, seed=1).tolist(), token_ids(3, seed=2).tolist()]
NUM_STEPS = 2 if DEVICE.type == "cpu" else 12


@pytest.fixture(autouse=True)
def kernels(emulator: emulated.Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.stand_in(monkeypatch, compiling, attention, gather, slot_cache, step_mail)
    if DEVICE.type == "cpu":
        no_lock = partial(placed_model.PinnedRows, register=ignore, unregister=ignore)
        monkeypatch.setattr(placed_model, "PinnedRows", no_lock)
        monkeypatch.setattr(gpu_engine, "require_device", ignore)
        plenty = AvailableMemory(device_bytes=1 << 40, host_bytes=1 << 40)
        monkeypatch.setattr(placed_model, "available_memory", lambda device: plenty)


def ignore(*_: object, **__: object) -> None:
    """Memory that the device reads needs no registration where the device is the CPU."""


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


def make_engine(placement: str, **changes: object) -> GpuEngine:
    options = {"batch_sizes": (1, 2, 4), "num_slots": 3, "tail_capacity": 32, "num_contexts": 2, "max_context_len": 400}
    return GpuEngine(loaded(), CONFIG, placement, device=DEVICE, num_threads=2, **{**options, **changes})


def answer(engine: StepEngine, slot: int, context_id: int, question: list[int]) -> list[int]:
    """The greedy continuation, one request alone."""
    engine.open(slot, context_id, CONFIG, "csattn")
    tokens = [int(engine.step([StepRow(slot, token) for token in question[:4]]).next_ids[-1])]
    if question[4:]:
        tokens = [int(engine.step([StepRow(slot, token) for token in question[4:]]).next_ids[-1])]
    for _ in range(NUM_STEPS - 1):
        tokens.append(int(engine.step([StepRow(slot, tokens[-1])]).next_ids[0]))
    engine.close_slot(slot)
    return tokens


@pytest.mark.parametrize(
    ("placement", "num_workers"),
    [pytest.param(name, 0, marks=[] if name == "hybrid" else pytest.mark.gpu) for name in PLACEMENTS]
    + [pytest.param("host", 2, marks=pytest.mark.gpu)],
)
def test_requests_over_contexts_that_come_and_go_answer_as_on_the_cpu(artifacts, placement, num_workers) -> None:
    with CpuEngine(loaded(), num_threads=2) as on_cpu:
        for context_id, artifact in enumerate(artifacts):
            on_cpu.add_context(context_id, artifact)
        want = [answer(on_cpu, 0, context_id, question) for context_id, question in enumerate(QUESTIONS)]
    ready = make_engine(placement, searcher=WorkerSearcher(num_workers) if num_workers else None)
    try:
        ready.add_context(7, artifacts[0])
        assert answer(ready, 2, 7, QUESTIONS[0]) == want[0]
        ready.add_context(9, artifacts[1])
        together = run_together(ready, [(0, 7), (1, 9)])
        assert together == want
        ready.remove_context(7)
        ready.add_context(8, artifacts[0])
        assert answer(ready, 0, 8, QUESTIONS[0]) == want[0]
        counts = ready.counts()
        assert counts.kv_bytes == sum(CONTEXT_LENS) * 3 * 2 * 2 * 16 * 4
        assert (counts.slot_hits > 0) == (placement != "device")
    finally:
        ready.close()


def run_together(engine: StepEngine, opened: list[tuple[int, int]]) -> list[list[int]]:
    """Both questions in one step as far as they fit, then the greedy tokens of both, two rows a step."""
    for slot, context_id in opened:
        engine.open(slot, context_id, CONFIG, "csattn")
    engine.step([StepRow(opened[0][0], token) for token in QUESTIONS[0][:4]])
    rows = [StepRow(opened[0][0], token) for token in QUESTIONS[0][4:]]
    rows += [StepRow(opened[1][0], token) for token in QUESTIONS[1]]
    last = engine.step(rows).next_ids
    tokens = [[int(last[0])], [int(last[-1])]]
    for _ in range(NUM_STEPS - 1):
        result = engine.step([StepRow(slot, said[-1]) for (slot, _), said in zip(opened, tokens, strict=True)])
        for said, token_id in zip(tokens, result.next_ids.tolist(), strict=True):
            said.append(token_id)
    for slot, _ in opened:
        engine.close_slot(slot)
    return tokens


def test_a_watched_step_says_the_same_and_how_near_it_is_to_exact_attention(artifacts) -> None:
    with CpuEngine(loaded(), num_threads=2) as on_cpu:
        on_cpu.add_context(0, artifacts[0])
        want = watched(on_cpu)
    ready = make_engine("hybrid")
    try:
        ready.add_context(0, artifacts[0])
        got = watched(ready)
    finally:
        ready.close()
    assert got.fidelity is not None
    assert got.next_ids.tolist() == want.next_ids.tolist()
    np.testing.assert_allclose(got.logits, want.logits, rtol=2e-3, atol=2e-3)
    assert got.fidelity.recall == pytest.approx(want.fidelity.recall, abs=0.02)
    assert got.fidelity.mass == pytest.approx(want.fidelity.mass, abs=1e-3)


def test_memory_that_cannot_be_pinned_is_a_sentence_and_leaves_the_engine_as_it_was(artifacts, monkeypatch) -> None:
    ready = make_engine("hybrid")
    try:
        ready.add_context(0, artifacts[0])
        monkeypatch.setattr(placed_model, "PinnedRows", partial(PinnedRows, register=refuse, unregister=ignore))
        with pytest.raises(PinningError, match=r"cannot read .* host memory \(no\).*`ulimit -l`"):
            ready.add_context(1, artifacts[1])
        ready.open(0, 0, CONFIG, "csattn")
        ready.step([StepRow(0, 1)])
        with pytest.raises(ConfigError, match="no context 1"):
            ready.open(1, 1, CONFIG, "csattn")
    finally:
        ready.close()


def refuse(*_: object, **__: object) -> None:
    raise PinningError("no")


def watched(engine: StepEngine):
    engine.open(0, 0, CONFIG, "csattn")
    result = engine.step([StepRow(0, token) for token in QUESTIONS[0][:4]], want_logits=True, watch=(2, 1))
    engine.close_slot(0)
    return result


def test_what_an_engine_cannot_do_is_a_sentence(artifacts) -> None:
    ready = make_engine("device", num_contexts=1, max_context_len=320, tail_capacity=4)
    try:
        with pytest.raises(ConfigError, match="no context 0"):
            ready.open(0, 0, CONFIG, "csattn")
        ready.add_context(0, artifacts[0])
        with pytest.raises(MemoryPlanError, match="room for 1 contexts"):
            ready.add_context(1, artifacts[1])
        with pytest.raises(ConfigError, match="leave it out"):
            ready.open(0, 0, CONFIG, "exact")
        with pytest.raises(ConfigError, match=r"keep is 0\.5 .* captured with 0\.1"):
            ready.open(0, 0, SearchConfig(keep=0.5, window_len=16), "csattn")
        ready.open(0, 0, CONFIG, "csattn")
        with pytest.raises(ConfigError, match="in use in slots"):
            ready.remove_context(0)
        ready.step([StepRow(0, 1)] * 3)
        with pytest.raises(ContextError, match="5 rows of its own and there is room for 4"):
            ready.step([StepRow(0, 1)] * 2)
        ready.close_slot(0)
        ready.remove_context(0)
        with pytest.raises(ConfigError, match=r"340 rows.*planned for 320"):
            ready.add_context(1, artifacts[1])
    finally:
        ready.close()


def test_a_row_of_nan_has_no_next_token(artifacts: list[Artifact]) -> None:
    """The row beside it has one."""
    engine = make_engine("device")
    try:
        engine.add_context(0, artifacts[0])
        next_ids = next_ids_beside_nan(engine, engine._ready().runner.weights.embedding, CONFIG)
    finally:
        engine.close()
    assert next_ids[0] >= 0 and next_ids[1] == -1


@pytest.mark.parametrize("placement", [pytest.param("device", marks=pytest.mark.gpu), "hybrid"])
def test_a_session_generates_on_it_what_it_does_on_the_cpu(artifacts, placement) -> None:
    on_it = {"placement": placement, "device": DEVICE, "batch_sizes": (1, 4), "num_slots": 1, "tail_capacity": 32}
    said = []
    for options in ({}, on_it):
        with csattn_session(loaded(), artifacts[0], CONFIG, **options) as session:
            arguments = session.continue_with(np.array(QUESTIONS[0], np.int32))
            said.append(loaded().model.generate(**arguments, max_new_tokens=NUM_STEPS, do_sample=False).tolist())
            del arguments  # and with it the request's slot
            if options:
                with pytest.raises(ConfigError, match="leave out the observer"):
                    session.request(print)
    assert said[0] == said[1]
