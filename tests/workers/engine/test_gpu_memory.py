"""The memory of a GPU's engine: what is planned for contexts and requests, and host memory that cannot be pinned."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

from csattn.artifact import Artifact
from csattn.config import preset
from csattn.errors import ConfigError
from offload.budget import AvailableMemory, MemoryPlan
from offload.codecs.formats import KvFormat
from offload.errors import MemoryPlanError, PinningError
from offload.pinned import PinnedRows
from offload.slot_cache import max_slots
from tests.cuda_on_cpu import emulated
from tests.cuda_on_cpu.emulated import DEVICE
from tests.tiny import loaded
from tests.workers.engine.emulated_engine import emulate, ignore
from tests.workers.engine.test_gpu_engine import CONFIG, CONTEXT_LENS, QUESTIONS, answer, built_artifacts, make_engine
from workers.engine.cpu.engine import CpuEngine
from workers.engine.gpu import placed_model, step_model
from workers.engine.gpu.memory import plan_context, plan_memory
from workers.engine.gpu.on_device import SearchOnDevice
from workers.serving.step_engine import StepRow


@pytest.fixture(autouse=True)
def kernels(emulator: emulated.Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(emulator, monkeypatch)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Artifact]]:
    yield from built_artifacts(tmp_path_factory.mktemp("store"))


def test_memory_that_cannot_be_pinned_is_refused_with_the_reason_and_changes_nothing(artifacts, monkeypatch) -> None:
    ready = make_engine("hybrid")
    try:
        ready.add_context(0, artifacts[0])
        monkeypatch.setattr(placed_model, "PinnedRows", partial(PinnedRows, register=refuse_to_pin, unregister=ignore))
        with pytest.raises(PinningError, match=r"cannot read .* host memory \(no\).*`ulimit -l`"):
            ready.add_context(1, artifacts[1])
        ready.open(0, 0, CONFIG, "csattn")
        ready.step([StepRow(0, 1)])
        with pytest.raises(ConfigError, match="no context 1"):
            ready.open(1, 1, CONFIG, "csattn")
    finally:
        ready.close()


def test_a_context_that_fails_to_load_leaves_no_pinned_pages_and_can_be_loaded_again(artifacts, monkeypatch) -> None:
    locked: list[int] = []
    pin = partial(PinnedRows, register=lambda address, *_, **__: locked.append(address), unregister=locked.remove)
    with make_engine("hybrid") as engine:
        engine.add_context(0, artifacts[0])
        if DEVICE.type == "cpu":
            monkeypatch.setattr(placed_model, "PinnedRows", pin)
        with monkeypatch.context() as patch:
            patch.setattr(SearchOnDevice, "load", run_out_of_memory)
            with pytest.raises(torch.OutOfMemoryError):
                engine.add_context(1, artifacts[1])
        assert not locked
        engine.add_context(1, artifacts[1])
        assert bool(locked) == (DEVICE.type == "cpu")
        engine.open(0, 1, CONFIG, "csattn")
        engine.step([StepRow(0, 1)])


def run_out_of_memory(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("no room")


def refuse_to_pin(*_: object, **__: object) -> None:
    raise PinningError("no")


@pytest.mark.parametrize(("codec", "row_bytes"), [(None, 128), ("fp8", 48), ("float16", 64)])
def test_memory_is_planned_for_rows_in_their_stored_format(artifacts, codec, row_bytes) -> None:
    form = None if codec is None else KvFormat.parse(codec)
    rows = 3 * 2 * CONTEXT_LENS[0]  # layers, KV heads
    plans = {}
    for placement, selector in (("device", "csattn"), ("hybrid", "csattn"), ("hybrid", "full"), ("device", "full")):
        with make_engine(placement, selector=selector, kv_format=form) as ready:
            shape = ready._placing._sizing.shape(preset("default"), 400)
            plan = plan_memory(0, preset("default"), shape, placement, 60, artifacts[0])
            more = plan_context(shape, artifacts[0], placement)
            plans[placement, selector] = {part.name: part.device_bytes + part.pinned_bytes for part in plan.parts}
            in_host = rows * row_bytes * (placement == "hybrid")
            assert plan.pinned_bytes == more.pinned_bytes == in_host
            index = artifacts[0].index_bytes * (selector == "csattn")
            assert more.device_bytes == rows * row_bytes - in_host + index
    assert all(plan["the context's KV"] == rows * row_bytes for plan in plans.values())
    # for two contexts of up to 400 rows
    assert plans["hybrid", "csattn"]["the resident rows"] == 3 * 2 * 2 * (4 + 16) * row_bytes
    assert plans["hybrid", "csattn"]["the slot cache"] > 3 * 2 * 2 * 60 * row_bytes
    assert plans["hybrid", "full"]["the layers that are streamed"] == 2 * 2 * 2 * 400 * row_bytes
    assert plans["device", "full"]["the resident rows"] == 0
    assert "the index" not in plans["hybrid", "full"]


@pytest.mark.parametrize("lookahead", [0, 1])
def test_memory_is_planned_for_the_query_predictors_of_lookahead(artifacts, lookahead) -> None:
    with make_engine("device") as ready:
        config = replace(CONFIG, lookahead=lookahead)
        sizing = replace(ready._placing._sizing, search=config)
        plan = plan_memory(0, preset("default"), sizing.shape(preset("default"), 400), "device", 0)
        planned = {part.name: part.device_bytes for part in plan.parts}["the predictors of the next layer's queries"]
    assert planned == lookahead * 2 * 3 * 4 * 17 * 16 * 4  # contexts, layers, query heads, maps in float32


@pytest.mark.large_gpu
@pytest.mark.parametrize("placement", ["device", "hybrid"])
def test_the_slot_cache_limits_the_planned_length_of_a_model_with_millions_of_positions(artifacts, placement) -> None:
    with make_engine(placement) as ready:
        sizing = ready._placing._sizing
        model = replace(sizing.model, spec=replace(sizing.model.spec, max_positions=10 << 20))
        longest = replace(sizing, model=model).longest(preset("default"), 300, 1 << 50)
    assert longest == (10 << 20 if placement == "device" else 10 << 17)
    assert replace(sizing, slot_share=0.5).num_cached(10 << 20) == max_slots()


@pytest.mark.large_gpu
def test_the_rows_that_a_step_looks_up_limit_what_is_planned_for_a_model_with_millions_of_positions(artifacts) -> None:
    memory = AvailableMemory(device_bytes=1 << 50, host_bytes=1 << 50)
    with make_engine("hybrid") as ready:
        sizing = ready._placing._sizing
        model = replace(sizing.model, spec=replace(sizing.model.spec, max_positions=10 << 20))
        large = replace(sizing, model=model, batch_sizes=(256,), slot_share=0.02, search=replace(CONFIG, keep=0.5))
    assert large.longest(preset("default"), 300, 1 << 50) == 10 << 19
    settled = replace(large, tail_capacity=None, own_on_host=True).settle(preset("default"), memory)
    assert settled.tail_capacity == 10 << 18


def test_memory_is_planned_again_for_a_longer_context_once_no_other_is_loaded(artifacts, monkeypatch) -> None:
    monkeypatch.setattr(step_model, "available_memory", lambda device: AvailableMemory(device_bytes=0, host_bytes=0))
    monkeypatch.setattr(MemoryPlan, "require", ignore)  # with no memory available, no plan would pass
    with make_engine("hybrid", max_context_len=None) as ready:
        ready.add_context(0, artifacts[0])
        ready.open(0, 0, CONFIG, "csattn")
        with pytest.raises(
            MemoryPlanError, match="340 rows, and while others are in use, memory is planned for contexts of up to 300"
        ):
            ready.add_context(1, artifacts[1])
        ready.close_request(0)
        with pytest.raises(MemoryPlanError, match="others are in use"):
            ready.add_context(1, artifacts[1])
        ready.remove_context(0)
        ready.add_context(1, artifacts[1])
        got = answer(ready, 0, 1, QUESTIONS[1])
        ready.add_context(0, artifacts[0])  # a shorter context fits
    with CpuEngine(loaded(), num_threads=2) as on_cpu:
        on_cpu.add_context(1, artifacts[1])
        assert got == answer(on_cpu, 0, 1, QUESTIONS[1])
