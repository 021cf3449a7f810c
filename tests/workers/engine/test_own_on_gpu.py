"""Requests that grow on a GPU say what they do on the CPU. Kernels run on the CPU where there is no device."""

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import torch

from csattn.artifact import Artifact, open_artifact
from csattn.config import SearchConfig, preset
from csattn.errors import ConfigError
from csattn.models import LoadedModel
from csattn.models.loader import wrap_model
from csattn.sketch.own import Growth
from index_build.pipeline import build_artifact
from tests.cuda_on_cpu import emulated
from tests.cuda_on_cpu.emulated import DEVICE
from tests.tiny import byte_tokenizer, make_model, token_ids
from tests.workers.engine.emulated_engine import emulate
from workers.engine import PLACEMENTS
from workers.engine.cpu_engine import CpuEngine
from workers.engine.gpu_engine import GpuEngine
from workers.serving.step_engine import StepRow

CONTEXT_LEN, CAPACITY = 300, 2100
GROWTH = Growth(segment_len=1024, least_near=8)


@pytest.fixture(autouse=True)
def kernels(emulator: emulated.Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(emulator, monkeypatch)


@cache
def loaded() -> LoadedModel:
    return wrap_model(make_model(max_position_embeddings=4096), byte_tokenizer(), "long")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Artifact]:
    store = tmp_path_factory.mktemp("store")
    with open_artifact(build_artifact(loaded(), token_ids(CONTEXT_LEN), preset("default"), store).path) as opened:
        yield opened


def gpu_engine(artifact: Artifact, placement: str, config: SearchConfig, **options: object) -> GpuEngine:
    options = {"batch_sizes": (1, 4), "num_slots": 2, "tail_capacity": CAPACITY, "growth": GROWTH, **options}
    engine = GpuEngine(loaded(), config, placement, device=DEVICE, num_threads=2, **options)
    engine.add_context(0, artifact)
    return engine


def give_rows(engine: CpuEngine | GpuEngine, slot: int, rows: torch.Tensor) -> None:
    """As if the request had come so far. rows: [num_layers, num_kv_heads, num_rows, 2, head_dim]."""
    num_rows = rows.shape[2]
    if isinstance(engine, CpuEngine):
        engine._model.indexed_tails[:, slot, :, :num_rows] = rows
        request = engine.request(slot)
    else:
        engine._placing.ready().attention.tails[:, slot, :, :num_rows] = rows.to(DEVICE)
        request = engine._request(slot)
    request.tail_len = num_rows
    request.own.grow(num_rows)


def steps(engine: CpuEngine | GpuEngine, config: SearchConfig, rows: torch.Tensor) -> np.ndarray:
    """Logits of steps across the moment at which the second segment is put to use, beside a short request."""
    engine.open(0, 0, config, "csattn")
    engine.open(1, 0, config, "csattn")
    logits = [engine.step([StepRow(1, 7)], want_logits=True).logits.copy()]  # nobody has segments
    give_rows(engine, 0, rows)
    for step in ([(0, 5)], [(1, 9), (0, 6), (0, 7), (0, 8)], [(0, 9)]):
        result = engine.step([StepRow(*row) for row in step], want_logits=True)
        logits.append(result.logits.copy())
    engine.close_slot(0)
    engine.close_slot(1)
    return np.concatenate(logits)


@pytest.mark.parametrize(
    ("placement", "lookahead"),
    [
        pytest.param(placement, ahead, marks=[] if placement == "hybrid" else pytest.mark.gpu)
        for placement in PLACEMENTS
        for ahead in (0, 1)
    ],
)
def test_it_says_what_the_cpu_says(artifact: Artifact, placement: str, lookahead: int, rng) -> None:
    config = SearchConfig(keep=0.1, window_len=16, lookahead=lookahead)
    geometry = loaded().geometry
    sizes = geometry.num_layers, geometry.num_kv_heads, 2 * GROWTH.segment_len + 16 - 3, 2, geometry.head_dim
    rows = torch.from_numpy(rng.standard_normal(sizes).astype(np.float32))
    with CpuEngine(loaded(), num_slots=2, max_rows=8, num_threads=1, growth=GROWTH) as engine:
        engine.add_context(0, artifact)
        want = steps(engine, config, rows)
    with CpuEngine(loaded(), num_slots=2, max_rows=8, num_threads=1) as engine:
        engine.add_context(0, artifact)
        dense = steps(engine, config, rows)
    with gpu_engine(artifact, placement, config) as engine:
        got = steps(engine, config, rows)
        again = steps(engine, config, rows[:, :, :1100])  # another request in the same slot, with one segment
        assert np.isfinite(again).all()
    assert np.abs(got - want).max() < 0.1 * np.abs(dense - want).max()
    np.testing.assert_allclose(got, want, atol=1e-2)


def test_other_segments_are_refused(artifact: Artifact) -> None:
    with pytest.raises(ConfigError, match="multiples of 1024 rows, got 64"):
        gpu_engine(artifact, "device", SearchConfig(), growth=Growth(segment_len=64))
