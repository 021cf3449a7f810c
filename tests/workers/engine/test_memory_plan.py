"""The memory planned for searches on a device is the memory that they allocate."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from csattn.attention import every_row
from csattn.config import IndexConfig, SearchConfig, preset
from csattn.search.device import compiling, index_shape
from csattn.selectors import resolve_rest
from tests.cuda_on_cpu import emulated
from tests.cuda_on_cpu.emulated import DEVICE
from workers.engine.gpu.attend_chosen import make_passes
from workers.engine.gpu.memory import PLACEMENTS, Placement, search_bytes
from workers.engine.gpu.on_device import make_searches
from workers.engine.gpu.shape import EngineShape


@pytest.fixture(autouse=True)
def kernels(emulator: emulated.Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.stand_in(monkeypatch, compiling, every_row, multiprocessors=132)


def make_shape(config: IndexConfig, search: SearchConfig, max_context_len: int = 9000) -> EngineShape:
    is_sketch = config == preset("default")
    return EngineShape(
        num_layers=2,
        num_q_heads=8,
        num_kv_heads=2,
        num_index_heads=8 if config == preset("paper") else 2,
        head_dim=64,
        dtype=torch.bfloat16,
        softmax_scale=0.125,
        search=search,
        max_context_len=max_context_len,
        batch_sizes=(1, 3),
        rest=resolve_rest(search, "csattn", config.layout),
        max_segments=len(config.segment_starts(max_context_len)) if is_sketch else 0,
    )


class AllocationCounter(TorchDispatchMode):
    """Counts the bytes of all tensors allocated while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self._made[made.untyped_storage().data_ptr()] = made  # kept alive, so that its address is not reused
        return made

    @property
    def num_bytes(self) -> int:
        return sum(made.untyped_storage().nbytes() for made in self._made.values())


def make_all(shape: EngineShape, config: IndexConfig, placement: Placement, device: torch.device) -> list[Any]:
    """Make the searches and passes that the engine's attention makes for a placement."""
    index = index_shape(config, shape.num_q_heads, shape.num_kv_heads, shape.head_dim)
    made: list[Any] = [] if placement == "host" else [make_searches(shape, index, device)]
    if shape.rest == "sketch" and (placement == "host" or shape.search.lookahead or shape.search.search_period > 1):
        made.append(make_passes(shape, index, device))
    return made


def bytes_of_choices(shape: EngineShape) -> int:
    return 2 * sum(shape.batch_sizes) * shape.num_index_heads * (shape.max_top_k + 1) * 4


@pytest.mark.parametrize("max_context_len", [1, 9000, 250_000])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", ["default", "lists", "paper"])
def test_planned_search_bytes_equal_the_allocated_bytes(name: str, placement: Placement, max_context_len: int) -> None:
    """Longer contexts use other kernels, with other workspace."""
    config = preset(name)
    for search in (SearchConfig(), SearchConfig(lookahead=1), SearchConfig(search_period=4), SearchConfig(rest="none")):
        shape = make_shape(config, search, max_context_len)
        with AllocationCounter() as asked:
            made = make_all(shape, config, placement, DEVICE)
        assert search_bytes(shape, config, placement) == asked.num_bytes + bytes_of_choices(shape)
        assert bool(made) == (asked.num_bytes > 0)
    assert search_bytes(replace(shape, attends_all=True), config, placement) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_planned_search_bytes_equal_those_requested_from_a_device(placement: Placement) -> None:
    config = preset("default")
    shape = make_shape(config, SearchConfig(lookahead=1), 100_000)
    before = requested_bytes()
    made = make_all(shape, config, placement, DEVICE)
    assert made and search_bytes(shape, config, placement) == requested_bytes() - before + bytes_of_choices(shape)


def requested_bytes() -> int:
    """Bytes requested for all tensors on the device; allocated bytes would include unused ends of unsplit blocks."""
    return int(torch.cuda.memory_stats().get("requested_bytes.all.current", 0))  # absent before the first allocation
