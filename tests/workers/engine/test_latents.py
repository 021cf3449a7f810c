"""Models of latents: requests that continue from kept rows, many requests on a GPU, and what is refused."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from csattn.artifact import Artifact, open_artifact
from csattn.config import SearchConfig, preset
from csattn.errors import ConfigError
from csattn.models import LoadedModel
from csattn.models.description import describe
from csattn.models.loader import wrap_model
from index_build.pipeline import build_artifact
from offload.codecs.formats import KvFormat
from tests.cuda_on_cpu.emulated import DEVICE, Emulator
from tests.tiny import byte_tokenizer, loaded, make_model, tiny_config, token_ids
from tests.workers.engine.emulated_engine import emulate
from workers.engine import model_choice
from workers.engine.cpu.engine import CpuEngine
from workers.engine.gpu.engine import GpuEngine
from workers.engine.gpu.latent_memory import CachedLatents, LatentPlaces
from workers.engine.gpu.memory import require_weights
from workers.engine.model_choice import require_choice_placed
from workers.engine.opening import open_engine
from workers.serving.step_engine import NO_CONTEXT, StepEngine, StepRow

CONTEXT, QUESTION = token_ids(300), token_ids(7, seed=5).tolist()
CONFIG = SearchConfig()


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return loaded("glm_moe_dsa")


@pytest.fixture(scope="module")
def artifact(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Artifact]:
    built = build_artifact(model, CONTEXT, preset("default"), tmp_path_factory.mktemp("latents"))
    with open_artifact(built.path) as artifact:
        yield artifact


@pytest.fixture
def on_gpu(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(emulator, monkeypatch)


def make_engine(model: LoadedModel, placement: str = "device", **changes: object) -> GpuEngine:
    options = {
        "batch_sizes": (1, 2, 4),
        "max_requests": 3,
        "tail_capacity": 32,
        "num_contexts": 2,
        "max_context_len": 400,
    }
    return GpuEngine(model, CONFIG, placement, device=DEVICE, **{**options, **changes})  # type: ignore[arg-type]


def logits_of(engine: StepEngine, request_slot: int, tokens: list[int]) -> np.ndarray:
    return logits_after(engine, [StepRow(request_slot, token) for token in tokens])


def logits_after(engine: StepEngine, rows: list[StepRow]) -> np.ndarray:
    logits = engine.step(rows, want_logits=True).logits
    assert logits is not None
    return logits.copy()


def test_an_artifact_has_rows_and_no_index(artifact: Artifact) -> None:
    geometry = artifact.spec.model
    assert geometry.indexed_layers == () and artifact.indexes() == [] and artifact.index_bytes == 0
    assert [rows.shape for rows in artifact.local_kv()] == [(1, 300, 2, geometry.head_dim)] * geometry.num_layers


@pytest.mark.large_gpu
def test_a_request_continues_bitwise_from_kept_rows(model: LoadedModel, artifact: Artifact) -> None:
    """As the next turn of a conversation does. The bits are those of the request that computed the rows."""
    with CpuEngine(model, num_threads=2, max_requests=2) as engine:
        engine.add_context(0, artifact)
        engine.open(0, 0, CONFIG, "csattn")
        engine.step([StepRow(0, token) for token in QUESTION])
        engine.open(1, 0, CONFIG, "full")
        engine.write_rows(1, engine.read_rows(0, 0, len(QUESTION))())
        np.testing.assert_array_equal(logits_of(engine, 0, [3, 4]), logits_of(engine, 1, [3, 4]))


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_lora_rank": 36, "qk_rope_head_dim": 6},
        {"q_lora_rank": None, "rope_interleave": False, "attention_bias": True},
    ],
)
def test_without_an_indexer_all_latents_are_read(changes: dict[str, object]) -> None:
    tokens, plain = token_ids(16, seed=3).tolist(), make_model("deepseek_v3", **changes)
    with CpuEngine(wrap_model(plain, byte_tokenizer(), "tiny"), num_threads=2) as engine:
        engine.open(0, NO_CONTEXT, CONFIG, "csattn")
        got = logits_of(engine, 0, tokens)
        assert engine.reading(0).rows == 8.5
    with torch.no_grad():
        want = plain(torch.tensor([tokens])).logits[0]
    np.testing.assert_allclose(got, want.numpy(), rtol=0, atol=1e-3)


@pytest.mark.large_gpu
def test_logits_without_a_context_equal_transformers(model: LoadedModel) -> None:
    tokens = token_ids(60, seed=3).tolist()
    with CpuEngine(model, num_threads=2) as engine:
        engine.open(0, NO_CONTEXT, CONFIG, "csattn")
        got = np.concatenate([logits_of(engine, 0, tokens[first : first + 16]) for first in range(0, 60, 16)])
        assert engine.reading(0).rows == pytest.approx(np.minimum(np.arange(1, 61), 29).mean())
    with torch.no_grad():
        want = model.model(torch.tensor([tokens])).logits[0]
    np.testing.assert_allclose(got, want.numpy(), rtol=0, atol=1e-3)


@pytest.mark.large_gpu
@pytest.mark.parametrize(
    ("family", "placement"), [("deepseek_v3", "device"), ("glm_moe_dsa", "device"), ("glm_moe_dsa", "hybrid")]
)
def test_gpu_logits_equal_the_cpus_alone_and_in_shared_steps(
    family: str, placement: str, tmp_path: Path, on_gpu: None
) -> None:
    """Contexts are loaded and unloaded; requests have one or none, share steps, and one continues from kept rows."""
    model, contexts = loaded(family), [CONTEXT, token_ids(270, seed=7)]
    with ExitStack() as stack:
        built = [build_artifact(model, context, preset("default"), tmp_path) for context in contexts]
        artifacts = [stack.enter_context(open_artifact(each.path)) for each in built]
        on_cpu = stack.enter_context(CpuEngine(model, num_threads=2, max_requests=3))
        for context_id, artifact in enumerate(artifacts):
            on_cpu.add_context(context_id, artifact)
        want = {context_id: decode_together(on_cpu, [context_id])[0] for context_id in (0, 1, NO_CONTEXT)}
        engine = stack.enter_context(make_engine(model, placement))
        engine.add_context(0, artifacts[0])
        assert_close(decode_together(engine, [0]), [want[0]])
        engine.add_context(1, artifacts[1])
        assert_close(decode_together(engine, [1, NO_CONTEXT, 0]), [want[1], want[NO_CONTEXT], want[0]])
        engine.remove_context(0)
        assert_close(decode_together(engine, [1]), [want[1]])
        engine.add_context(0, artifacts[0])
        assert_close(decode_together(engine, [NO_CONTEXT, 0]), [want[NO_CONTEXT], want[0]])
        engine.open(0, 0, CONFIG, "csattn")
        engine.step([StepRow(0, token) for token in QUESTION[:4]])
        engine.open(1, 0, CONFIG, "full")
        engine.write_rows(1, engine.read_rows(0, 0, 4)())
        np.testing.assert_array_equal(logits_of(engine, 0, QUESTION[4:6]), logits_of(engine, 1, QUESTION[4:6]))
        assert engine.reading(1).selector == "model" and engine.counts().kv_bytes == sum(
            artifact.spec.context_len * rows_bytes(artifact) for artifact in artifacts
        )


def decode_together(engine: StepEngine, context_ids: list[int]) -> list[np.ndarray]:
    """Feed each request its own question, then the same tokens to all, together; return the logits of these tokens."""
    logits: list[list[np.ndarray]] = [[] for _ in context_ids]
    for request_slot, context_id in enumerate(context_ids):
        engine.open(request_slot, context_id, CONFIG, "csattn")
        engine.step([StepRow(request_slot, token) for token in QUESTION[context_id + 1 :][:2]])
    for token in token_ids(3, seed=9).tolist():
        result = engine.step(
            [StepRow(request_slot, token) for request_slot in range(len(context_ids))], want_logits=True
        )
        assert result.logits is not None
        for said, of_row in zip(logits, result.logits, strict=True):
            said.append(of_row.copy())
    for request_slot in range(len(context_ids)):
        engine.close_request(request_slot)
    return [np.stack(said) for said in logits]


def assert_close(got: list[np.ndarray], want: list[np.ndarray]) -> None:
    for said, wanted in zip(got, want, strict=True):
        np.testing.assert_allclose(said, wanted, rtol=0, atol=1e-3)
        assert (said.argmax(1) == wanted.argmax(1)).all()


def rows_bytes(artifact: Artifact) -> int:
    geometry = artifact.spec.model
    return geometry.num_layers * 2 * geometry.head_dim * 4


@pytest.mark.large_gpu
def test_planned_latent_memory_equals_the_allocated_and_longer_contexts_are_refused(
    model: LoadedModel, artifact: Artifact, on_gpu: None
) -> None:
    """The planned bytes are those allocated; a context that does not fit is refused."""
    with make_engine(model, max_context_len=310) as engine:
        engine.add_context(0, artifact)
        placed = engine._placing.placed
        assert placed is not None and isinstance(placed.far, LatentPlaces)
        planned = {part.name: part.device_bytes for part in placed.plan.parts}
        rows = placed.far.rows
        assert planned["the contexts' latents"] + planned["the requests' own KV"] == rows.nbytes
        assert planned["the contexts' latents"] == 2 * 310 * rows_bytes(artifact)
        with pytest.raises(ConfigError, match="has 300 rows, the engine was planned for 299"):
            make_engine(model, max_context_len=299).add_context(0, artifact)


@pytest.mark.large_gpu
def test_bfloat16_errors_are_comparable_to_those_of_transformers(tmp_path) -> None:
    """The KL to the same weights in float32 is less than 1.5 times that of transformers in bfloat16."""
    plain = make_model("deepseek_v32", initializer_range=0.1, moe_intermediate_size=32).bfloat16()
    for layer in plain.model.layers:
        layer.self_attn.indexer.weights_proj.float()
    model = wrap_model(plain, byte_tokenizer(), "tiny")
    built = build_artifact(model, CONTEXT, preset("default"), tmp_path)
    with open_artifact(built.path) as artifact, CpuEngine(model, num_threads=2) as engine:
        engine.add_context(0, artifact)
        engine.open(0, 0, CONFIG, "csattn")
        got = torch.from_numpy(logits_of(engine, 0, QUESTION)).log_softmax(-1)
    ids = torch.from_numpy(np.concatenate([CONTEXT, QUESTION]).astype(np.int64))[None]
    with torch.no_grad():
        own = plain(ids).logits[0, -len(QUESTION) :].float().log_softmax(-1)
        want = plain.float()(ids).logits[0, -len(QUESTION) :].log_softmax(-1)
    ours, theirs = (float((want.exp() * (want - said)).sum(-1).mean()) for said in (got, own))
    assert ours < 1.5 * theirs < 0.2


@pytest.mark.large_gpu
def test_latents_in_host_memory_need_a_slot_cache_and_index_keys_on_the_device(
    model: LoadedModel, artifact: Artifact, on_gpu: None
) -> None:
    """The planned bytes are those allocated, and the cache has a slot for every row that a step may choose."""
    with make_engine(model, "hybrid", max_context_len=310) as engine:
        engine.add_context(0, artifact)
        placed = engine._placing.placed
        assert placed is not None and isinstance(placed.far, CachedLatents)
        planned = {part.name: part for part in placed.plan.parts}
        keys, cache_slots = planned["the contexts' index keys"].device_bytes, placed.far.cache.rows.nbytes
        assert keys + cache_slots + planned["the requests' own KV"].device_bytes == placed.far.memory.nbytes
        assert planned["the slot cache"].device_bytes > cache_slots == 2 * 4 * 29 * rows_bytes(artifact)
        assert planned["the context's KV"].pinned_bytes == 300 * rows_bytes(artifact)
        engine.open(0, 0, CONFIG, "csattn")
        engine.step([StepRow(0, token) for token in QUESTION[:4]])
        assert engine.counts().slot_lookups > 0 and not any(x.num_spilled for x in placed.far.cache.statistics())


@pytest.mark.large_gpu
def test_a_step_is_split_if_its_rows_need_more_slots_than_the_cache_has(
    model: LoadedModel, artifact: Artifact, on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The context has slots for the choice of one row only; rows without a context need no slots."""
    monkeypatch.setattr(model_choice, "ROWS_AT_ONCE", 1)
    logits, num_steps = [], Counter[str]()
    for placement, slot_share in (("device", 1.0), ("hybrid", 0.05)):
        with make_engine(model, placement, slot_share=slot_share) as engine:
            engine.add_context(0, artifact)
            placed = engine._placing.ready()
            run = placed.runner.step

            def counted(batch_size: int, placement: str = placement, run: Any = run) -> Any:
                num_steps[placement] += 1
                return run(batch_size)

            monkeypatch.setattr(placed.runner, "step", counted)
            for request_slot, context_id in enumerate((0, 0, NO_CONTEXT)):
                engine.open(request_slot, context_id, CONFIG, "csattn")
            mixed = [StepRow(request_slot, token) for token, request_slot in zip(QUESTION, (2, 0, 2, 1), strict=False)]
            logits += [
                logits_after(engine, mixed),
                logits_after(engine, [StepRow(request_slot, 5) for request_slot in (0, 1, 0)]),
            ]
            if isinstance(placed.far, CachedLatents):
                assert placed.far.cache.shape.num_slots == 29
                assert not any(layer.num_spilled for layer in placed.far.cache.statistics())
    assert num_steps == {"device": 2, "hybrid": 2 + 3}
    for at in (0, 1):
        np.testing.assert_allclose(logits[2 + at], logits[at], rtol=0, atol=1e-3)


@pytest.mark.large_gpu
def test_latents_with_placement_host_are_refused_with_the_reason(model: LoadedModel, artifact: Artifact) -> None:
    with pytest.raises(ConfigError, match=r"its own indexer chooses 29 .* choose placement hybrid, device, or cpu"):
        open_engine(model, artifact, CONFIG, placement="host")


@pytest.mark.large_gpu
def test_latent_models_a_gpu_does_not_support_are_refused_before_weights_are_read(tmp_path) -> None:
    tiny_config("deepseek_v3").save_pretrained(tmp_path)
    for placement in ("hybrid", "host"):
        with pytest.raises(ConfigError, match=f"attends to all of them; placement {placement} would bring all"):
            require_weights(str(tmp_path), "float32", None, placement)
    tiny_config("deepseek_v3", qk_rope_head_dim=24).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="parts that RoPE rotates have 24 numbers; a GPU takes powers of two"):
        require_weights(str(tmp_path), "float32", None, "device")


@pytest.mark.large_gpu
@pytest.mark.parametrize("placement", ["cpu", "device"])
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"selector": "quest"}, "selector 'quest' has no effect"),
        ({"config": SearchConfig(rest="sketch")}, "rest sketch has no effect"),
        ({"kv_format": KvFormat.parse("q8_0")}, "a KV codec works on keys and values"),
        ({"host_budget_bytes": 1 << 20}, "a host budget works on keys and values"),
    ],
)
def test_options_without_effect_on_latent_models_are_refused(
    model: LoadedModel, artifact: Artifact, options: dict[str, object], sentence: str, placement: str, on_gpu: None
) -> None:
    if placement == "device":  # a GPU refuses these options for every model, with its own message
        sentence = {"selector": "a GPU decodes with", "host_budget_bytes": "decoding on the CPU"}.get(
            *options, sentence
        )
    with pytest.raises(ConfigError, match=sentence):
        open_engine(model, artifact, **{"config": CONFIG, "placement": placement, **options})  # type: ignore[arg-type]


@pytest.mark.large_gpu
def test_watching_or_observing_a_latent_model_is_refused(model: LoadedModel, on_gpu: None) -> None:
    with make_engine(model) as engine:
        engine.open(0, NO_CONTEXT, CONFIG, "csattn")
        with pytest.raises(ConfigError, match="a record of what is attended to"):
            engine.step([StepRow(0, 3)], watch=(0, 0))
    with CpuEngine(model, num_threads=1) as engine:
        engine.open(0, NO_CONTEXT, CONFIG, "csattn")
        with pytest.raises(ConfigError, match="a record of what is attended to"):
            engine.observe(0, lambda seen: None)


def test_gpus_before_hopper_refuse_models_of_latents(as_ampere: None) -> None:
    with pytest.raises(ConfigError, match=r"on GPUs like compute capability 9\.0 .* this GPU has compute .* 99 KiB"):
        require_choice_placed(describe(tiny_config("deepseek_v3")), "device")
