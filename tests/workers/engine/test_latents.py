"""Models that choose their rows themselves, on the CPU engine: what goes on from kept rows, and what is refused."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from csattn.artifact import Artifact, open_artifact
from csattn.config import SearchConfig, preset
from csattn.errors import ConfigError
from csattn.models import LoadedModel
from csattn.models.loader import wrap_model
from index_build.pipeline import build_artifact
from offload.codecs.formats import KvFormat
from tests.tiny import byte_tokenizer, loaded, make_model, tiny_config, token_ids
from workers.engine.cpu_engine import CpuEngine
from workers.engine.memory import require_weights
from workers.engine.opening import open_engine
from workers.serving.step_engine import NO_CONTEXT, StepRow

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


def logits_of(engine: CpuEngine, slot: int, tokens: list[int]) -> np.ndarray:
    logits = engine.step([StepRow(slot, token) for token in tokens], want_logits=True).logits
    assert logits is not None
    return logits.copy()


def test_an_artifact_has_rows_and_no_index(artifact: Artifact) -> None:
    geometry = artifact.spec.model
    assert geometry.indexed_layers == () and artifact.indexes() == [] and artifact.index_bytes == 0
    assert [rows.shape for rows in artifact.local_kv()] == [(1, 300, 2, geometry.head_dim)] * geometry.num_layers


def test_a_request_goes_on_from_rows_that_were_kept(model: LoadedModel, artifact: Artifact) -> None:
    """As turns of a conversation do: the same bits as if it had said them itself."""
    with CpuEngine(model, num_threads=2, num_slots=2) as engine:
        engine.add_context(0, artifact)
        engine.open(0, 0, CONFIG, "csattn")
        engine.step([StepRow(0, token) for token in QUESTION])
        engine.open(1, 0, CONFIG, "full")
        engine.write_rows(1, engine.read_rows(0, 0, len(QUESTION))())
        np.testing.assert_array_equal(logits_of(engine, 0, [3, 4]), logits_of(engine, 1, [3, 4]))


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None, "rope_interleave": False, "attention_bias": True}])
def test_without_an_indexer_all_latents_are_read(changes: dict[str, object]) -> None:
    tokens, plain = token_ids(16, seed=3).tolist(), make_model("deepseek_v3", **changes)
    with CpuEngine(wrap_model(plain, byte_tokenizer(), "tiny"), num_threads=2) as engine:
        engine.open(0, NO_CONTEXT, CONFIG, "csattn")
        got = logits_of(engine, 0, tokens)
        assert engine.reading(0).rows == 8.5
    with torch.no_grad():
        want = plain(torch.tensor([tokens])).logits[0]
    np.testing.assert_allclose(got, want.numpy(), rtol=0, atol=1e-3)


def test_without_a_context_it_is_the_model_too(model: LoadedModel) -> None:
    tokens = token_ids(60, seed=3).tolist()
    with CpuEngine(model, num_threads=2) as engine:
        engine.open(0, NO_CONTEXT, CONFIG, "csattn")
        got = np.concatenate([logits_of(engine, 0, tokens[first : first + 16]) for first in range(0, 60, 16)])
        assert engine.reading(0).rows == pytest.approx(np.minimum(np.arange(1, 61), 29).mean())
    with torch.no_grad():
        want = model.model(torch.tensor([tokens])).logits[0]
    np.testing.assert_allclose(got, want.numpy(), rtol=0, atol=1e-3)


def test_in_bfloat16_it_is_the_model_but_for_rounding(tmp_path) -> None:
    """No further from the same weights in float32 than transformers is, in bfloat16."""
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


@pytest.mark.parametrize("placement", ["device", "hybrid", "host"])
def test_gpus_are_refused_by_a_sentence(model: LoadedModel, artifact: Artifact, placement: str) -> None:
    with pytest.raises(ConfigError, match=r"its own indexer chooses 29 .* choose placement cpu"):
        open_engine(model, artifact, CONFIG, placement=placement)


def test_gpus_are_refused_before_a_weight_is_read(tmp_path) -> None:
    tiny_config("deepseek_v3").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="attends to all of them; csattn decodes that on the CPU only"):
        require_weights(str(tmp_path), "float32", None)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"selector": "quest"}, "selector 'quest' has nothing to do"),
        ({"config": SearchConfig(rest="sketch")}, "rest sketch has nothing to do"),
        ({"kv_format": KvFormat.parse("q8_0")}, "a KV codec is for keys and values"),
        ({"host_budget_bytes": 1 << 20}, "a host budget is for keys and values"),
    ],
)
def test_what_is_not_for_a_request_to_say_is_refused(
    model: LoadedModel, artifact: Artifact, options: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        open_engine(model, artifact, **{"config": CONFIG, **options})  # type: ignore[arg-type]


def test_nobody_looks_on(model: LoadedModel) -> None:
    with CpuEngine(model, num_threads=1) as engine:
        engine.open(0, NO_CONTEXT, CONFIG, "csattn")
        with pytest.raises(ConfigError, match="a look at what is attended to"):
            engine.observe(0, lambda seen: None)
