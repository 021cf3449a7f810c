"""Builds with the model on a GPU: the same artifact up to rounding, written while later layers compute."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from csattn.artifact import open_artifact, scan_store, verify_artifact
from csattn.config import IndexConfig, ListConfig, SearchConfig, SketchConfig
from csattn.models import layer_offload
from csattn.models.attending_cache import CACHE
from csattn.models.layer_offload import place
from csattn.models.loader import LoadedModel, wrap_model
from index_build.capture import prefill
from index_build.layer import index_arrays
from index_build.outbox import DeviceOutbox
from index_build.pipeline import build_artifact
from tests.tiny import byte_tokenizer, loaded, make_model, token_ids
from workers.session import csattn_session

pytestmark = pytest.mark.gpu

NUM_TOKENS = 700


def on_gpu(dtype: torch.dtype = torch.float32) -> LoadedModel:
    return wrap_model(make_model().to("cuda", dtype), byte_tokenizer(), "tiny-llama")


def build(store: Path, model: LoadedModel, config: IndexConfig = SketchConfig(), **options):  # noqa: B008
    return build_artifact(model, token_ids(NUM_TOKENS), config, store, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_prefill_equals_cpu_prefill(dtype: torch.dtype) -> None:
    ids = torch.from_numpy(token_ids(300)).long()
    captures = [
        [
            (capture.kv.cpu().float().clone(), hidden_out.cpu().float())
            for capture, hidden_out in prefill(model, ids, chunk_len=128)
        ]
        for model in (make_model().to(dtype), make_model().to("cuda", dtype))
    ]
    for want, got in zip(*captures, strict=True):
        for a, b in zip(want, got, strict=True):
            error = (a - b).norm() / a.norm()
            assert error < (1e-3 if dtype == torch.float32 else 0.2), error
        if dtype == torch.bfloat16:
            break  # random weights amplify rounding from layer to layer


def test_a_model_too_large_for_the_gpu_builds_the_same_artifact(tmp_path, monkeypatch) -> None:
    want = build(tmp_path / "whole", on_gpu())
    monkeypatch.setattr(layer_offload, "_has_room", lambda model, device: False)
    model = place(make_model(), "cuda")
    assert next(model.model.layers.parameters()).device.type == "cpu" and model.device.type == "cuda"
    got = build(tmp_path / "lent", wrap_model(model, byte_tokenizer(), "tiny-llama"))
    assert next(model.model.layers.parameters()).device.type == "cpu"
    with open_artifact(want.path) as whole, open_artifact(got.path) as lent:
        for a, b in zip(whole.indexed_kv(), lent.indexed_kv(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    "config",
    [SketchConfig(), ListConfig(kmeans="torch"), ListConfig(), replace(ListConfig(kmeans="torch"), share_group=False)],
    ids=["sketch", "lists", "lists of FAISS", "lists of each query head"],
)
def test_an_artifact_built_on_the_gpu_verifies_and_decodes_on_the_cpu(tmp_path, config: IndexConfig) -> None:
    report = build(tmp_path, on_gpu(), config)
    verify_artifact(report.path)
    model = loaded()
    with csattn_session(model, report.path, SearchConfig(keep=1.0)) as session:
        arguments = session.continue_with(token_ids(20, seed=1))
        got = model.model.generate(**arguments, max_new_tokens=8, do_sample=False)
    del arguments[CACHE]
    want = model.model.generate(**arguments, max_new_tokens=8, do_sample=False)
    assert torch.equal(got, want)
    with csattn_session(model, report.path, SearchConfig(keep=0.1, window_len=8, lookahead=1)) as session:
        arguments = session.continue_with(token_ids(20, seed=1))
        model.model.generate(**arguments, max_new_tokens=8, do_sample=False)


def test_two_gpu_builds_give_the_same_bytes(tmp_path: Path) -> None:
    reports = [build(tmp_path / name, on_gpu()) for name in "ab"]
    for file in reports[0].path.glob("*.safetensors"):
        assert file.read_bytes() == (reports[1].path / file.name).read_bytes(), file.name


def test_gpu_and_cpu_build_nearly_the_same_index(tmp_path: Path) -> None:
    """They have the same id, and the first layer, where nothing has been amplified yet, agrees up to rounding."""
    paths = [build(tmp_path / name, model).path for name, model in (("a", on_gpu()), ("b", loaded()))]
    assert paths[0].name == paths[1].name
    with open_artifact(paths[0]) as a, open_artifact(paths[1]) as b:
        assert a.manifest.library_versions["device"] != b.manifest.library_versions["device"] == "cpu"
        np.testing.assert_allclose(a.layer_kv(0).float(), b.layer_kv(0).float(), atol=1e-4)
        np.testing.assert_allclose(a.layer_index(0).key_mean, b.layer_index(0).key_mean, atol=1e-4)


def test_an_interrupted_build_resumes_and_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("index_build.build_layers._CHECKPOINT_EVERY_S_ON_GPU", 0.0)

    def stop(progress) -> None:
        if (progress.layer_idx, progress.phase) == (2, "index"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(tmp_path, on_gpu(), on_progress=stop)
    assert scan_store(tmp_path)[0] == []
    resumed, straight = build(tmp_path, on_gpu()), build(tmp_path / "other", on_gpu())
    assert resumed.resumed_at == 2
    for file in straight.path.glob("*.safetensors"):
        assert file.read_bytes() == (resumed.path / file.name).read_bytes(), file.name


def test_the_outbox_writes_layers_before_their_memory_is_reused() -> None:
    """The memory of a captured layer is overwritten by the layer after the next as soon as `send` returns."""
    captured = torch.empty(2, 1000, 1000, device="cuda")
    may_write, seen = threading.Event(), set()

    def write(arrays) -> None:
        may_write.wait(timeout=30)
        seen.add((float(arrays["kv"].min()), float(arrays["kv"].max()), float(arrays["codes"][0])))

    with DeviceOutbox(captured.device) as outbox:
        for layer in range(12):
            if layer == 2:
                may_write.set()
            kv = captured[layer % 2].fill_(layer)
            torch.cuda._sleep(10_000_000 * (layer % 3))  # the device lags behind the host
            outbox.send(kv, lambda kv=kv: {"codes": kv.amax(1)[:10].clone()}, write)
    assert seen == {(layer, layer, layer) for layer in range(12)}


def test_a_write_error_ends_the_build() -> None:
    def fail(arrays) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"), DeviceOutbox(torch.device("cuda")) as outbox:
        outbox.send(torch.zeros(10, device="cuda"), dict, fail)


@pytest.mark.parametrize("config", [SketchConfig(segment_len=2048), ListConfig(kmeans="torch")])
def test_index_arrays_are_the_same_on_every_run(config: IndexConfig) -> None:
    q, kv = torch.randn(8, 5000, 64, device="cuda"), torch.randn(2, 5000, 2, 64, device="cuda")
    with ThreadPoolExecutor(2) as threads:
        runs = [index_arrays(q, kv, config, threads) for _ in range(3)]
    for again in runs[1:]:
        for name, array in runs[0].items():
            assert torch.equal(array.view(torch.uint8), again[name].view(torch.uint8)), name
