"""Requests with own segments give the same logits on a GPU as on the CPU. Without a device, kernels run on the CPU."""

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
from offload.budget import AvailableMemory
from tests.cuda_on_cpu import emulated
from tests.cuda_on_cpu.emulated import DEVICE
from tests.tiny import byte_tokenizer, make_model, token_ids
from tests.workers.engine.emulated_engine import emulate
from workers.engine.cpu.engine import CpuEngine
from workers.engine.gpu import step_model
from workers.engine.gpu.engine import GpuEngine
from workers.engine.gpu.memory import PLACEMENTS
from workers.serving.step_engine import NO_CONTEXT, StepRow

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
    options = {"batch_sizes": (1, 4), "max_requests": 2, "tail_capacity": CAPACITY, "growth": GROWTH, **options}
    options = {"own_on_host": placement != "device", **options}
    engine = GpuEngine(loaded(), config, placement, device=DEVICE, num_threads=2, **options)
    engine.add_context(0, artifact)
    return engine


def steps(
    engine: CpuEngine | GpuEngine, config: SearchConfig, rows: torch.Tensor, context_id: int = 0
) -> tuple[np.ndarray, torch.Tensor]:
    """Run steps before and after the last segment comes into use, together with a short request.

    Returns the logits, and own rows read from before and after that point.
    """
    engine.open(0, context_id, config, "csattn")
    engine.open(1, context_id, config, "csattn")
    logits = [engine.step([StepRow(1, 7)], want_logits=True).logits.copy()]  # no request has segments yet
    engine.write_rows(0, rows)
    for step in ([(0, 5)], [(1, 9), (0, 6), (0, 7), (0, 8)], [(0, 9)]):
        result = engine.step([StepRow(*row) for row in step], want_logits=True)
        logits.append(result.logits.copy())
    num_rows = rows.shape[2]
    read = [engine.read_rows(0, start, stop)() for start, stop in ((0, num_rows), (num_rows - 70, num_rows + 5))]
    assert torch.equal(read[0].cpu(), rows) and torch.equal(read[1][:, :, :70].cpu(), rows[:, :, -70:])
    engine.close_request(0)
    engine.close_request(1)
    return np.concatenate(logits), read[1][:, :, 70:].cpu()


def make_rows(num_rows: int, rng: np.random.Generator) -> torch.Tensor:
    geometry = loaded().geometry
    sizes = geometry.num_layers, geometry.num_kv_heads, num_rows, 2, geometry.head_dim
    return torch.from_numpy(rng.standard_normal(sizes).astype(np.float32))


def cpu_engine(artifact: Artifact, growth: Growth | None) -> CpuEngine:
    engine = CpuEngine(loaded(), max_requests=2, max_rows=8, num_threads=1, growth=growth)
    engine.add_context(0, artifact)
    return engine


@pytest.mark.parametrize(
    "placement", [pytest.param(name, marks=[] if name == "hybrid" else pytest.mark.gpu) for name in PLACEMENTS]
)
def test_written_rows_can_be_read_before_the_next_step(artifact: Artifact, placement: str, rng) -> None:
    config, rows = SearchConfig(window_len=16), make_rows(GROWTH.segment_len + 60, rng)
    with gpu_engine(artifact, placement, config) as engine:
        engine.open(0, 0, config, "csattn")
        engine.write_rows(0, rows)
        assert torch.equal(engine.read_rows(0, 0, rows.shape[2])(), rows)


def test_rows_for_a_request_that_reuses_choices_are_refused(artifact: Artifact, rng) -> None:
    config = SearchConfig(window_len=16, search_period=3)
    with gpu_engine(artifact, "hybrid", config) as engine:
        engine.open(0, 0, config, "csattn")
        with pytest.raises(ConfigError, match="search_period is 3"):
            engine.write_rows(0, make_rows(60, rng))


@pytest.mark.parametrize(
    ("placement", "lookahead"),
    [
        pytest.param(placement, ahead, marks=[] if placement == "hybrid" else pytest.mark.gpu)
        for placement in PLACEMENTS
        for ahead in (0, 1)
    ],
)
def test_logits_and_own_rows_equal_those_on_the_cpu(artifact: Artifact, placement: str, lookahead: int, rng) -> None:
    """The own rows agree as well, in the tail and on the host."""
    config = SearchConfig(keep=0.1, window_len=16, lookahead=lookahead)
    rows = make_rows(2 * GROWTH.segment_len + 16 - 3, rng)
    with cpu_engine(artifact, GROWTH) as engine:
        want, want_rows = steps(engine, config, rows)
        want_of_one, _ = steps(engine, config, rows[:, :, : GROWTH.segment_len + 16 - 3])
    with cpu_engine(artifact, None) as engine:
        dense, _ = steps(engine, config, rows)
    with gpu_engine(artifact, placement, config) as engine:
        got, got_rows = steps(engine, config, rows)
        # another request in the same slot, whose rows are all in its tail at first
        of_one, _ = steps(engine, config, rows[:, :, : GROWTH.segment_len + 16 - 3])
    assert np.abs(got - want).max() < 0.1 * np.abs(dense - want).max()
    np.testing.assert_allclose(got, want, atol=1e-2)
    np.testing.assert_allclose(of_one, want_of_one, atol=1e-2)
    np.testing.assert_allclose(got_rows, want_rows, atol=1e-2)


@pytest.mark.parametrize(
    ("placement", "lookahead", "num_segments"),
    [
        pytest.param(placement, ahead, number, marks=[] if (placement, ahead) == ("hybrid", 0) else pytest.mark.gpu)
        for placement in PLACEMENTS
        for ahead in (0, 1)
        for number in (1, 2)
    ],
)
def test_drafts_change_no_bit_where_a_segment_comes_into_use(
    artifact: Artifact, placement: str, lookahead: int, num_segments: int, rng: np.random.Generator
) -> None:
    """Also if they are dropped, and the rows before them read fewer segments, which have not moved to the host."""
    config = SearchConfig(keep=0.1, window_len=16, lookahead=lookahead)
    rows = make_rows(num_segments * GROWTH.segment_len + 16 - 3, rng)  # the third row that follows reads one more
    fed = [5, 6, 7, 8, 9]
    with gpu_engine(artifact, placement, config) as engine:
        engine.open(0, 0, config, "csattn")
        engine.write_rows(0, rows)
        want = [engine.step([StepRow(0, token)], want_logits=True).logits[0].copy() for token in fed]
        reading = engine.reading(0)
        engine.close_request(0)
        engine.open(0, 0, config, "csattn")
        engine.write_rows(0, rows)
        got = list[np.ndarray]()
        for draft, num_right in (([77, 78, 79], 0), ([7, 78], 1), ([9], 1)):
            row = StepRow(0, fed[len(got)])
            step = engine.step([row, *(StepRow(0, token, is_draft=True) for token in draft)], want_logits=True)
            got += [*step.logits[: num_right + 1].copy()]
            engine.drop_rows(0, len(draft) - num_right)
        assert engine.reading(0) == reading
    if DEVICE.type == "cpu":  # PyTorch's products depend on the number of rows
        np.testing.assert_allclose(got, want, atol=1e-4)
    else:
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "placement",
    [pytest.param(placement, marks=[] if placement == "hybrid" else pytest.mark.gpu) for placement in PLACEMENTS],
)
def test_logits_and_own_rows_without_a_context_equal_those_on_the_cpu(artifact: Artifact, placement: str, rng) -> None:
    config = SearchConfig(keep=0.1, window_len=16)
    rows = make_rows(GROWTH.segment_len + 16 - 3, rng)
    with cpu_engine(artifact, GROWTH) as engine:
        want, want_rows = steps(engine, config, rows, NO_CONTEXT)
    with cpu_engine(artifact, None) as engine:
        dense, _ = steps(engine, config, rows, NO_CONTEXT)
    with gpu_engine(artifact, placement, config) as engine:
        got, got_rows = steps(engine, config, rows, NO_CONTEXT)
    assert np.abs(dense - want).max() > 0
    np.testing.assert_allclose(got, want, atol=1e-2)
    np.testing.assert_allclose(got_rows, want_rows, atol=1e-2)


def test_tails_on_the_device_are_shorter_if_own_rows_move_to_the_host(artifact: Artifact) -> None:
    """A tail then has room for one segment, the near rows, and a step; with lookahead, all own rows stay."""
    with gpu_engine(artifact, "hybrid", SearchConfig(window_len=16)) as engine:
        assert engine._placing.ready().shape.tail_capacity == GROWTH.segment_len + 16 + 4
    with gpu_engine(artifact, "hybrid", SearchConfig(window_len=16, lookahead=1)) as engine:
        assert engine._placing.ready().shape.tail_capacity == CAPACITY


@pytest.mark.gpu  # one step per 16 rows: slow when emulated
@pytest.mark.parametrize("family", ["gemma3_text", "gemma4_text, inputs"])  # the second has layers that share rows
def test_window_layers_equal_the_cpu_after_own_rows_moved_to_the_host(tmp_path, family: str) -> None:
    model = wrap_model(make_model(family, max_position_embeddings=4096), byte_tokenizer(), "windows")
    config, growth = SearchConfig(keep=0.1, window_len=16), Growth(segment_len=1024, least_near=64)
    ids = token_ids(GROWTH.segment_len + 200, seed=3).tolist()
    with open_artifact(build_artifact(model, token_ids(CONTEXT_LEN), preset("default"), tmp_path).path) as artifact:
        logits = []
        options = {"max_requests": 1, "growth": growth, "tail_capacity": CAPACITY}
        for engine in (
            CpuEngine(model, max_rows=16, **options),
            GpuEngine(model, config, "hybrid", device=DEVICE, batch_sizes=(1, 16), own_on_host=True, **options),
        ):
            with engine:
                engine.add_context(0, artifact)
                engine.open(0, 0, config, "csattn")
                for at in range(0, len(ids), 16):
                    result = engine.step([StepRow(0, token_id) for token_id in ids[at : at + 16]], want_logits=True)
                logits.append(result.logits.copy())
                if isinstance(engine, GpuEngine):
                    assert engine._placing.ready().own_rows.start(0) == GROWTH.segment_len
    np.testing.assert_allclose(logits[1], logits[0], atol=2e-2)


@pytest.mark.parametrize(("placement", "device_gb", "host_gb", "most"), [
    ("device", 99, 0, 4096),  # the number of positions of the model
    ("hybrid", 99, 99, 4096),
    ("device", 0, 99, 2048),
    ("hybrid", 0, 0, 2048),
])  # fmt: skip
def test_the_tail_capacity_depends_on_the_available_memory(monkeypatch, placement, device_gb, host_gb, most) -> None:
    memory = AvailableMemory(device_bytes=device_gb << 30, host_bytes=host_gb << 30)
    monkeypatch.setattr(step_model, "available_memory", lambda device: memory)
    with GpuEngine(loaded(), SearchConfig(), placement, device=DEVICE) as engine:
        assert engine.tail_capacity == most and not engine.own_on_host  # the host would allow no more


def test_own_rows_move_to_the_host_if_the_device_lacks_memory(monkeypatch) -> None:
    """They take 100 MB: with 64 GB on the device they stay, with 0.7 GB they move to the host."""
    for device_gb, on_host in ((64, False), (0.7, True)):
        memory = AvailableMemory(device_bytes=int(device_gb * 2**30), host_bytes=64 << 30)
        monkeypatch.setattr(step_model, "available_memory", lambda device, memory=memory: memory)
        options = {"device": DEVICE, "max_requests": 32, "tail_capacity": 4096}
        with GpuEngine(loaded(), SearchConfig(), "hybrid", **options) as engine:
            assert engine.own_on_host == on_host
        with GpuEngine(loaded(), SearchConfig(), "device", **options) as engine:
            assert not engine.own_on_host


def test_an_invalid_segment_length_is_refused(artifact: Artifact) -> None:
    with pytest.raises(ConfigError, match="multiples of 1024 rows, got 64"):
        gpu_engine(artifact, "device", SearchConfig(), growth=Growth(segment_len=64))
