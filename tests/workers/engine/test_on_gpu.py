"""Decoding on a GPU from an artifact: every placement agrees with `transformers`, and all give the same bits."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from csattn.artifact import Artifact, open_artifact
from csattn.config import SearchConfig, preset
from csattn.errors import ConfigError
from index_build.pipeline import build_artifact
from offload import gather
from offload.budget import AvailableMemory
from offload.codecs.formats import KvFormat
from offload.errors import MemoryPlanError, NoDeviceError
from tests.tiny import FAMILIES, loaded, tiny_config, token_ids
from tests.workers.engine.definition import defined_logits
from workers.engine.answer import answer, question_tokens
from workers.engine.gpu import step_model
from workers.engine.gpu.engine import GpuEngine
from workers.engine.gpu.memory import PLACEMENTS, require_weights
from workers.serving.step_engine import StepRow

CONTEXT_LEN = 700
QUESTION = token_ids(11, seed=1)
LONGEST = CONTEXT_LEN + 37
NUM_STEPS = 24


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("store")


def artifact_path(store: Path, family: str = "llama", preset_name: str = "default", seed: int = 0) -> Path:
    ids = token_ids(CONTEXT_LEN + seed, seed=seed)
    return build_artifact(loaded(family), ids, preset(preset_name), store).path


@contextmanager
def ready_engine(
    artifact: Artifact, config: SearchConfig, placement: str, family: str = "llama", **options
) -> Iterator[GpuEngine]:
    with GpuEngine(loaded(family), config, placement, **options) as ready:
        ready.add_context(0, artifact)
        yield ready


def decode(engine: GpuEngine, num_steps: int, context_id: int = 0) -> tuple[list[int], torch.Tensor]:
    """Return the greedy continuation of the question, and each step's logits."""
    engine.open(0, context_id, engine.config, "csattn")
    tokens, logits = feed(engine, {0: QUESTION.tolist()})
    token_ids, all_logits = [tokens[0]], [logits[0]]
    for _ in range(num_steps - 1):
        tokens, logits = feed(engine, {0: token_ids[-1:]})
        token_ids.append(tokens[0])
        all_logits.append(logits[0])
    engine.close_request(0)
    return token_ids, torch.from_numpy(np.stack(all_logits))


def feed(engine: GpuEngine, token_ids: dict[int, list[int]]) -> tuple[list[int], np.ndarray]:
    """Feed tokens by slot; return next tokens and last logits. A lone request may have more tokens than max_rows."""
    rows = [StepRow(request_slot, token_id) for request_slot, tokens in token_ids.items() for token_id in tokens]
    while len(rows) > engine.max_rows:
        engine.step(rows[: engine.max_rows])
        rows = rows[engine.max_rows :]
    result = engine.step(rows, want_logits=True)
    last = [i for i, row in enumerate(rows) if i + 1 == len(rows) or rows[i + 1].request_slot != row.request_slot]
    return result.next_ids[last].tolist(), result.logits[last].copy()


@pytest.mark.gpu
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_with_keep_1_generates_what_transformers_does(store, family, placement) -> None:
    model = loaded(family)
    with open_artifact(artifact_path(store, family)) as artifact:
        whole = np.concatenate([artifact.token_ids, QUESTION])
        ids = torch.from_numpy(whole).long()[None]
        want = model.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_STEPS, do_sample=False
        )[0, len(whole) :].tolist()
        with ready_engine(artifact, SearchConfig(keep=1.0), placement, family) as ready:
            got, _ = decode(ready, NUM_STEPS)
    assert got == want


@pytest.mark.gpu
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("preset_name", ["default", "lists", "paper"])
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("rest", [None, "moments"])
def test_logits_of_a_sparse_step_equal_the_definition(store, preset_name, lookahead, rest, placement) -> None:
    config = SearchConfig(keep=0.1, window_len=64, lookahead=lookahead, rest=rest)
    path = artifact_path(store, preset_name=preset_name)
    with open_artifact(path) as artifact, ready_engine(artifact, config, placement) as ready:
        want = defined_logits(loaded(), artifact, config, "csattn", QUESTION.tolist())[-1]
        _, logits = decode(ready, 1)
    torch.testing.assert_close(logits[0], torch.from_numpy(want), rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("codec", [None, "k=fp8,v=float16"])
@pytest.mark.parametrize(("keep", "rest"), [(0.05, "none"), (0.05, "moments"), (0.05, "sketch"), (1.0, "none")])
def test_all_placements_give_the_same_bits(store, keep, rest, codec, lookahead) -> None:
    """Given the same selection. The CPU may choose the other of two keys whose group scores differ by rounding only."""
    config = SearchConfig(keep=keep, window_len=64, lookahead=lookahead, rest=rest)
    form, results = None if codec is None else KvFormat.parse(codec), {}
    for placement in PLACEMENTS:
        with (
            open_artifact(artifact_path(store)) as artifact,
            ready_engine(artifact, config, placement, slot_share=0.12, kv_format=form) as ready,
        ):
            results[placement] = decode(ready, NUM_STEPS)
    tokens, logits = results["device"]
    for placement, (other_tokens, other_logits) in results.items():
        assert other_tokens == tokens
        if placement == "host" and keep < 1:
            torch.testing.assert_close(other_logits, logits, rtol=2e-3, atol=2e-3)
        else:
            assert torch.equal(other_logits, logits)


@pytest.mark.gpu
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("rest", ["none", "sketch"])
def test_attention_waits_for_rows_that_are_still_being_copied(store, rest, lookahead, tmp_path, monkeypatch) -> None:
    source = Path(gather.__file__).with_name("gather.cu")
    let_next_start = "wait_then_let_next_start();"
    text = source.read_text().replace('#include "..', f'#include "{source.parent.parent}')
    assert text.count(let_next_start) == 1
    slow = tmp_path / "gather.cu"
    slow.write_text(text.replace(let_next_start, let_next_start + " for (int i = 0; i < 200; ++i) __nanosleep(1000);"))
    config = SearchConfig(keep=0.05, window_len=64, rest=rest, lookahead=lookahead)
    with open_artifact(artifact_path(store)) as artifact:
        with ready_engine(artifact, config, "device") as ready:
            _, want = decode(ready, NUM_STEPS)
        monkeypatch.setattr(gather, "_SOURCE", slow)
        with ready_engine(artifact, config, "hybrid") as ready:
            _, got = decode(ready, NUM_STEPS)
    assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("rest", ["none", "moments", "sketch"])
def test_requests_of_two_contexts_in_one_batch_get_the_tokens_they_get_alone(store, placement, rest) -> None:
    """Each request gets the tokens that it gets alone."""
    config = SearchConfig(keep=0.1, window_len=64, rest=rest)
    paths = [artifact_path(store), artifact_path(store, seed=37)]
    alone = []
    for path in paths:
        with open_artifact(path) as artifact, ready_engine(artifact, config, placement) as ready:
            alone.append(decode(ready, NUM_STEPS)[0])
    with (
        open_artifact(paths[0]) as first,
        open_artifact(paths[1]) as second,
        ready_engine(
            first, config, placement, batch_sizes=(1, 2, 8), max_requests=3, num_contexts=2, max_context_len=LONGEST
        ) as ready,
    ):
        ready.add_context(1, second)
        together = []
        for request_slot in range(2):
            ready.open(request_slot, request_slot, config, "csattn")
            together.append(feed(ready, {request_slot: QUESTION.tolist()})[0])
        for _ in range(NUM_STEPS - 1):
            tokens, _ = feed(ready, {request_slot: said[-1:] for request_slot, said in enumerate(together)})
            for said, token_id in zip(together, tokens, strict=True):
                said.append(token_id)
    assert together == alone


@pytest.mark.gpu
def test_an_answer_reports_its_tokens_and_the_rows_read_per_step(store) -> None:
    config = SearchConfig(keep=0.1, window_len=64, lookahead=1)
    pieces: list[str] = []
    with open_artifact(artifact_path(store)) as artifact, ready_engine(artifact, config, "hybrid") as ready:
        ids = question_tokens(loaded(), artifact, "why?")
        said = answer(ready, loaded(), artifact, config, ids, 10, pieces.append)
    assert "".join(pieces).strip() == said.text
    assert len(said.token_ids) == 10
    assert said.rows_read_per_step == 70 + 68 + (said.question_len + 10) / 2
    assert said.search_ms_per_step is None


@pytest.mark.gpu
def test_missing_device_memory_is_reported_before_anything_is_allocated(store, monkeypatch) -> None:
    little = AvailableMemory(device_bytes=1 << 20, host_bytes=0)
    monkeypatch.setattr(step_model, "available_memory", lambda device: little)
    with open_artifact(artifact_path(store)) as artifact:
        before = torch.cuda.memory_allocated()
        with pytest.raises(MemoryPlanError, match=r"needs .* bytes .* of device memory and 1,048,576 bytes"):
            GpuEngine(loaded(), SearchConfig(), "device").add_context(0, artifact)
        assert torch.cuda.memory_allocated() == before


def test_an_unknown_placement_is_refused() -> None:
    with pytest.raises(ConfigError, match="device, hybrid, host"):
        GpuEngine(loaded(), SearchConfig(), "cloud")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_gpu_engine_without_a_device_is_refused() -> None:
    with pytest.raises(NoDeviceError, match="no CUDA device"):
        GpuEngine(loaded(), SearchConfig(), "device")


def test_quantized_weights_require_bfloat16(tmp_path: Path) -> None:
    config = tiny_config("llama")
    config.save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match="bits with bfloat16, not with float32; build the context with --dtype bfloat16"
    ):
        require_weights(str(tmp_path), "float32", "int4", "hybrid")
    config.quantization_config = {"quant_method": "awq", "bits": 4, "group_size": 64}
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="not with float32"):
        require_weights(str(tmp_path), "float32", None, "device")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_weights_for_a_missing_device_are_refused_before_loading(tmp_path: Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    with pytest.raises(NoDeviceError, match="no CUDA device"):
        require_weights(str(tmp_path), "float32", None, "device")
