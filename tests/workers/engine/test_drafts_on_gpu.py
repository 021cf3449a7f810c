"""Drafts on a GPU: which rows can be dropped, and that answers stay the same. Without a device, it is emulated."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from csattn.artifact import Artifact, open_artifact
from csattn.config import SearchConfig, preset
from csattn.models.loader import wrap_model
from csattn.models.quantized_model import round_weights
from csattn.models.quantized_weight import rounding_named
from index_build.pipeline import build_artifact
from tests.cuda_on_cpu import emulated
from tests.cuda_on_cpu.emulated import DEVICE
from tests.tiny import byte_tokenizer, loaded, make_model, token_ids
from tests.workers.engine.emulated_engine import emulate
from tests.workers.engine.talks import Talk, alone, assert_same, reading_of, with_drafts
from workers.engine.gpu.engine import GPU_SELECTORS, GpuEngine
from workers.engine.gpu.memory import PLACEMENTS

CONFIG = SearchConfig(keep=0.1, window_len=16)
QUESTION = token_ids(5, seed=1).tolist()


@pytest.fixture(autouse=True)
def kernels(emulator: emulated.Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(emulator, monkeypatch)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Artifact]:
    store = tmp_path_factory.mktemp("store")
    with open_artifact(build_artifact(loaded(), token_ids(300), preset("default"), store).path) as opened:
        yield opened


def make_engine(placement: str, **changes: object) -> GpuEngine:
    options = {"batch_sizes": (1, 2, 4), "tail_capacity": 32, "max_context_len": 400, **changes}
    return GpuEngine(loaded(), CONFIG, placement, device=DEVICE, num_threads=2, **options)


@pytest.mark.parametrize(
    ("placement", "selector"),
    [
        ("hybrid", "csattn"),
        *(
            pytest.param(placement, selector, marks=pytest.mark.gpu)
            for placement in PLACEMENTS
            for selector in (*GPU_SELECTORS[:2], *(["exact"] if placement == "device" else []))
        ),
    ],
)
def test_drafts_change_no_token(artifact, placement, selector, rng) -> None:
    options = {"batch_sizes": (1, 8, 16), "tail_capacity": 256} if DEVICE.type != "cpu" else {}
    with make_engine(placement, selector=selector, **options) as engine:
        engine.add_context(0, artifact)
        assert engine.takes_drafts(artifact, CONFIG, selector)
        want = alone(engine, Talk(0, CONFIG, selector, QUESTION, 9 if DEVICE.type == "cpu" else 200))
        got, reading = with_drafts(engine, want, rng)
        assert reading == reading_of(engine, want)
    assert got.tokens == want.tokens
    if DEVICE.type != "cpu":  # there, PyTorch's products depend on the number of rows
        assert_same(got, want)


def test_rows_of_some_models_and_schedules_cannot_be_drafts(artifact) -> None:
    """What a step leaves behind depends on them, or the last bits of a row on the number of rows."""
    with make_engine("hybrid") as engine:
        assert not engine.takes_drafts(artifact, replace(CONFIG, search_period=2), "csattn")
    for family in ("qwen3_next", "deepseek_v3", "deepseek_v4"):
        with GpuEngine(
            wrap_model(make_model(family), byte_tokenizer(), family), CONFIG, "device", device=DEVICE
        ) as engine:
            assert not engine.takes_drafts(None, CONFIG, "csattn")


@pytest.mark.parametrize(("rounding", "num_rows"), [(None, 16), ("fp8", 8), ("int4", 8)])
def test_steps_of_quantized_weights_have_the_same_bits_up_to_eight_rows(rounding, num_rows) -> None:
    model = wrap_model(make_model(head_dim=64).bfloat16(), byte_tokenizer(), "model")
    if rounding is not None:
        round_weights(model.model, rounding_named(rounding))
    with GpuEngine(model, CONFIG, "device", batch_sizes=(1, 64), tail_capacity=64, device=DEVICE) as engine:
        assert engine.alike_rows == num_rows
    with GpuEngine(model, CONFIG, "device", batch_sizes=(1, 4), tail_capacity=64, device=DEVICE) as engine:
        assert engine.alike_rows == 4
