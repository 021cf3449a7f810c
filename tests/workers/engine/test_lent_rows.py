"""Layers that attend to the rows of earlier layers: a context's rows are stored once, on disk and in memory."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from csattn.artifact import Artifact, LayerGeometry, ModelGeometry, open_artifact, verify_artifact
from csattn.config import SearchConfig, preset
from csattn.errors import ConfigError
from csattn.models.loader import wrap_model
from index_build.board import BuildProgress
from index_build.pipeline import build_artifact
from offload.codecs.formats import KvFormat
from tests.cuda_on_cpu.emulated import DEVICE, Emulator
from tests.tiny import byte_tokenizer, loaded, make_model, token_ids
from tests.workers.engine.emulated_engine import emulate
from tests.workers.engine.talks import Talk, alone
from workers.capacity import context_bytes
from workers.engine.cpu.context import HostBudget
from workers.engine.cpu.engine import CpuEngine
from workers.engine.gpu.engine import GpuEngine
from workers.engine.gpu.far_rows import DeviceRows
from workers.streaming.config import StreamConfig
from workers.streaming.session import StreamSession

FAMILY = "gemma4_text, inputs"  # layers 0 to 3 store rows; 4 to 6 attend to those of 2 and 3
CONFIG = SearchConfig(keep=0.1, window_len=16)
CONTEXT_LEN = 300


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Artifact]:
    store = tmp_path_factory.mktemp("store")
    with open_artifact(build_artifact(loaded(FAMILY), token_ids(CONTEXT_LEN), preset("default"), store).path) as made:
        yield made


def decode(artifact: Artifact, selector: str = "csattn", **options: object) -> tuple[np.ndarray, int]:
    """Return the logits of an answer, and the bytes of KV that the engine holds."""
    with CpuEngine(loaded(FAMILY), num_threads=2, **options) as engine:  # type: ignore[arg-type]
        engine.add_context(0, artifact)
        talk = Talk(0, CONFIG, selector, token_ids(5, seed=1).tolist(), 4)
        return np.stack(alone(engine, talk).logits), engine.counts().kv_bytes


def test_shared_rows_are_stored_once_on_disk_and_in_memory(artifact: Artifact) -> None:
    model = artifact.spec.model
    assert [model.kv_source(layer_idx) for layer_idx in range(7)] == [0, 1, 2, 3, 2, 3, 3]
    stored = [model.num_stored(layer_idx, CONTEXT_LEN) for layer_idx in range(7)]
    assert stored == [37, CONTEXT_LEN, 37, CONTEXT_LEN, 0, 0, 0]
    assert artifact.layer_kv(5).data_ptr() == artifact.layer_kv(3).data_ptr()
    row_bytes = [2 * 4 * heads * width for heads, width in map(model.row_sizes, range(7))]
    wanted = sum(num * of_row for num, of_row in zip(stored, row_bytes, strict=True))
    logits, kv_bytes = decode(artifact)
    assert kv_bytes == wanted and np.isfinite(logits).all()
    assert wanted <= context_bytes(artifact.spec)[0] < wanted + 7 * 3 * 4096, "but for headers and pages"


@pytest.mark.parametrize(("placement", "codec"), [("device", None), ("device", "float16"), ("hybrid", None)])
def test_shared_rows_are_on_a_device_once_and_give_the_logits_of_the_cpu(
    artifact: Artifact, placement: str, codec: str | None, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(emulator, monkeypatch)
    kv_format = None if codec is None else KvFormat.parse(codec)
    options = {"kv_format": kv_format, "device": DEVICE, "batch_sizes": (1, 5), "max_context_len": CONTEXT_LEN}
    with GpuEngine(loaded(FAMILY), CONFIG, placement, **options) as engine:  # type: ignore[arg-type]
        engine.add_context(0, artifact)
        got = np.stack(alone(engine, Talk(0, CONFIG, "csattn", token_ids(5, seed=1).tolist(), 3)).logits)
        assert engine.counts().kv_bytes == 2 * CONTEXT_LEN * 4 * 2 * 48 * (4 if codec is None else 2)
        far = engine._placing.ready().far
        if isinstance(far, DeviceRows):
            assert len({layer.data_ptr() for layer in far.layers(0)}) == 2
    np.testing.assert_allclose(got, decode(artifact)[0][: len(got)], rtol=0, atol=1e-3 if codec is None else 0.05)


def test_shared_rows_are_coded_once(artifact: Artifact) -> None:
    plain, kv_bytes = decode(artifact)
    logits, coded_bytes = decode(artifact, kv_format=KvFormat.parse("float16"))
    np.testing.assert_allclose(logits, plain, rtol=0, atol=0.05)
    of_indexed = 2 * CONTEXT_LEN * 4 * 2 * 48 * 4  # two layers of four heads
    assert coded_bytes == kv_bytes - of_indexed // 2


@pytest.mark.parametrize("selector", ["csattn", "full"])
def test_shared_rows_within_a_host_budget_give_the_same_logits(artifact: Artifact, selector: str) -> None:
    budget = HostBudget(5_000_000, CONFIG, selector)
    np.testing.assert_allclose(
        decode(artifact, selector, host_budget=budget)[0], decode(artifact, selector)[0], rtol=1e-4, atol=1e-4
    )


def test_a_build_interrupted_after_the_shared_rows_resumes_to_the_same_bytes(
    artifact: Artifact, tmp_path: Path
) -> None:
    """The resumed build runs all layers again from the first one whose rows others attend to."""

    class Cut(Exception):
        """Interrupts a build."""

    passed: list[int] = []

    def cut(progress: BuildProgress) -> None:
        if progress.layer_idx == 5:
            raise Cut

    with pytest.raises(Cut):
        build_artifact(loaded(FAMILY), token_ids(CONTEXT_LEN), preset("default"), tmp_path, on_progress=cut)
    again = build_artifact(
        loaded(FAMILY),
        token_ids(CONTEXT_LEN),
        preset("default"),
        tmp_path,
        on_progress=lambda progress: passed.append(progress.layer_idx),
    )
    assert again.resumed_at == 5 and sorted(set(passed)) == [2, 3, 4, 5, 6]
    assert verify_artifact(again.path).files == artifact.manifest.files


def test_keep_1_equals_transformers_if_all_layers_have_full_attention(tmp_path: Path) -> None:
    types = {"layer_types": 7 * ["full_attention"], "num_hidden_layers": 7}
    model = wrap_model(make_model(FAMILY, **types), byte_tokenizer(), "all")
    tokens, question = token_ids(CONTEXT_LEN), token_ids(6, seed=1)
    with (
        open_artifact(build_artifact(model, tokens, preset("default"), tmp_path).path) as artifact,
        CpuEngine(model, num_threads=2) as engine,
    ):
        engine.add_context(0, artifact)
        got = alone(engine, Talk(0, SearchConfig(keep=1.0), "csattn", question.tolist(), 3))
    ids = torch.from_numpy(np.concatenate([tokens, question, got.tokens[:-1]]).astype(np.int64))[None]
    with torch.no_grad():
        want = model.model(ids).logits[0, -3:]
    np.testing.assert_allclose(np.stack(got.logits), want.numpy(), rtol=0, atol=1e-3)
    with pytest.raises(ConfigError, match="cannot be moved to other positions"):
        StreamSession(model, StreamConfig())


@pytest.mark.parametrize("selector", ["quest", "exact", "window"])
def test_other_selectors_give_finite_logits_over_shared_rows(artifact: Artifact, selector: str) -> None:
    assert np.isfinite(decode(artifact, selector)[0]).all()


def test_h2o_over_shared_rows_is_refused(artifact: Artifact) -> None:
    with pytest.raises(ConfigError, match="some of whose layers share the rows of others"):
        decode(artifact, "h2o")


@pytest.mark.parametrize("rows_of", [(None, 2, None), (None, 0, 1), (None, None, -1), (None, 0, None), (0, None, 1)])
def test_a_geometry_with_invalid_row_sources_is_refused(rows_of: tuple[int | None, ...]) -> None:
    sizes = dict.fromkeys(("num_layers", "num_q_heads", "num_kv_heads"), 3) | {"head_dim": 8}
    sizes |= dict.fromkeys(("hidden_size", "vocab_size", "max_positions"), 9)
    first, window = LayerGeometry(), LayerGeometry(keeps="window", window=4)
    layers = [replace(of, rows_of=at) for of, at in zip((first, window, window), rows_of, strict=True)]
    with pytest.raises(ConfigError, match="rows of earlier layers"):
        ModelGeometry(**sizes, layers=tuple(layers))
    ModelGeometry(**sizes, layers=(first, window, replace(window, rows_of=1)))
