"""Contexts with quantized rows: session and engine attend to the decoded rows, bit for bit, and report the bytes of
their KV."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from csattn.artifact import Artifact, open_artifact
from csattn.config import SearchConfig, preset
from csattn.models import LoadedModel
from csattn.models.attending_cache import CACHE
from csattn.models.loader import wrap_model
from index_build.pipeline import build_artifact
from offload.codecs.codec import KvCodec
from offload.codecs.formats import KvFormat
from offload.errors import CodecError
from offload.host_store import HostStore
from tests.tiny import byte_tokenizer, loaded, make_model, token_ids
from workers.engine.cpu.engine import CpuEngine
from workers.service.making import make_engine
from workers.serving.step_engine import StepRow
from workers.session import Session, csattn_session
from workers.settings import EngineSettings, Settings

CONTEXT_LEN, HEAD_DIM = 400, 32
CONFIG = SearchConfig(keep=0.05, window_len=64, lookahead=1)
FORMATS = ("q8_0", "q4_0", "k=q8_0,v=q4_0", "fp8", "float16")


@pytest.fixture(scope="module")
def wide() -> LoadedModel:
    """A model with heads of 32, the block length of the formats."""
    return wrap_model(make_model(num_attention_heads=2, num_key_value_heads=1), byte_tokenizer(), "wide")


@pytest.fixture(scope="module")
def artifact(wide: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Artifact]:
    store = tmp_path_factory.mktemp("store")
    with open_artifact(build_artifact(wide, token_ids(CONTEXT_LEN), preset("default"), store).path) as made:
        yield made


def decoded_layers(artifact: Artifact, text: str) -> list[torch.Tensor]:
    codec = KvCodec(KvFormat.parse(text), HEAD_DIM)
    layers = [artifact.layer_kv(layer_idx) for layer_idx in range(artifact.spec.model.num_layers)]
    return [torch.from_numpy(codec.decode(codec.encode(layer.float().numpy()))) for layer in layers]


def logits_of(session: Session) -> np.ndarray:
    """Return the logits [3, vocab_size] after a question of 9 tokens and after each of the 2 tokens that follow it."""
    model, request = session.loaded.model, session.request()
    with torch.inference_mode():
        fed = [torch.from_numpy(token_ids(9 if i == 0 else 1, seed=i)).long()[None] for i in range(3)]
        return np.stack([model(ids, **{CACHE: request}).logits[0, -1].float().numpy() for ids in fed])


def steps_of(engine: CpuEngine, selector: str) -> np.ndarray:
    """Return an engine's logits [3, vocab_size] after the same tokens as in `logits_of`."""
    engine.open(0, 0, CONFIG, selector)
    ids = [token_ids(9 if i == 0 else 1, seed=i).tolist() for i in range(3)]
    logits = []
    for fed in ids:
        result = engine.step([StepRow(0, token_id) for token_id in fed], want_logits=True)
        assert result.logits is not None
        logits.append(result.logits[-1].copy())
    engine.close_request(0)
    return np.stack(logits)


@pytest.mark.parametrize("selector", ["csattn", "full", "window", "exact"])
@pytest.mark.parametrize("text", FORMATS)
def test_steps_attend_to_the_decoded_rows(wide, artifact, text: str, selector: str) -> None:
    with CpuEngine(wide, max_requests=1, num_threads=2, kv_format=KvFormat.parse(text)) as engine:
        engine.add_context(0, artifact)
        got = steps_of(engine, selector)
    with CpuEngine(wide, max_requests=1, num_threads=1) as engine:
        engine.add_context(0, artifact)
        as_built = steps_of(engine, selector)
        decoded = decoded_layers(artifact, text)
        engine._contexts[0] = replace(engine.context(0), kv=decoded, store=HostStore(decoded), prepared={})
        want = steps_of(engine, selector)
    np.testing.assert_array_equal(got, want)
    assert not np.array_equal(got, as_built)
    with csattn_session(wide, artifact, CONFIG, selector, text) as session:
        np.testing.assert_array_equal(got, logits_of(session))


@pytest.mark.parametrize(("text", "share"), [("q8_0", 34 / 64), ("q4_0", 18 / 64), ("k=q8_0,v=q4_0", 26 / 64)])
def test_kv_bytes_are_those_of_the_format(wide, artifact, text: str, share: float) -> None:
    as_float16 = CONTEXT_LEN * 3 * 2 * HEAD_DIM * 2  # 3 layers, K and V, 2 bytes each
    with CpuEngine(wide, max_requests=1, num_threads=1, kv_format=KvFormat.parse(text)) as engine:
        engine.add_context(0, artifact)
        assert engine.counts().kv_bytes == share * as_float16


def test_a_services_engine_uses_the_kv_codec_of_its_settings(wide, artifact) -> None:
    settings = Settings(engine=EngineSettings(kv_codec="k=q8_0,v=q4_0", num_threads=1))
    engine = make_engine(settings, wide, None)
    try:
        engine.add_context(0, artifact)
        assert engine.counts().kv_bytes == CONTEXT_LEN * 3 * (34 + 18)
    finally:
        engine.close()


def test_a_bfloat16_session_keeps_float32_context_rows(tmp_path: Path) -> None:
    """Context rows that decode to float32 stay in float32, and rows that a request adds stay in bfloat16."""
    model = make_model(num_attention_heads=2, num_key_value_heads=1).to(torch.bfloat16)
    half = wrap_model(model, byte_tokenizer(), "half")
    report = build_artifact(half, token_ids(CONTEXT_LEN), preset("default"), tmp_path)
    with open_artifact(report.path) as artifact:
        with csattn_session(half, artifact, CONFIG, "full", KvFormat.parse("float32")) as session:
            got, tails = logits_of(session), []
            request = session.request(lambda seen: tails.append(seen.tail.dtype))
            with torch.inference_mode():
                model(torch.from_numpy(token_ids(3)).long()[None], **{CACHE: request})
            assert set(tails) == {torch.bfloat16}
            assert session.engine.context(0).store.rows(0, slice(0, 9)).dtype == torch.float32
        with csattn_session(half, artifact, CONFIG, "full") as session:
            np.testing.assert_allclose(got, logits_of(session), atol=0.1 * np.abs(got).max())


def test_head_sizes_unsupported_by_the_format_are_refused(tmp_path: Path) -> None:
    report = build_artifact(loaded(), token_ids(300), preset("default"), tmp_path)
    form = KvFormat.parse("k=fp8,v=q4_0")
    with open_artifact(report.path) as artifact:
        with pytest.raises(CodecError, match="head_dim is 16, but q4_0 takes multiples of 32"):
            Session(loaded(), artifact, CONFIG, kv_format=form)
        with CpuEngine(loaded(), max_requests=1, num_threads=1, kv_format=form) as engine:
            with pytest.raises(CodecError, match="head_dim is 16"):
                engine.add_context(0, artifact)
            assert engine.counts().kv_bytes == 0


def test_a_format_too_coarse_for_the_keys_is_warned_of_once_with_a_better_one(tmp_path, caplog) -> None:
    """The bias of the model's key projection dwarfs the differences between tokens."""
    model = make_model("qwen2", num_attention_heads=2, num_key_value_heads=1)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.bias[31] += 100.0
    biased = wrap_model(model, byte_tokenizer(), "biased")
    path = build_artifact(biased, token_ids(CONTEXT_LEN), preset("default"), tmp_path).path
    with open_artifact(path) as made:
        for text in ("q8_0", "k=q8_0,v=q4_0", "bfloat16", "k=q4_0,v=q8_0", "k=q4_0,v=q8_0"):
            with csattn_session(biased, made, CONFIG, kv_format=text):
                pass
    (record,) = caplog.records
    message = record.getMessage()
    assert f"keys of context {made.spec.artifact_id} cannot be distinguished in q4_0, in 1 of 3 layers (1)" in message
    assert message.endswith("choose the KV codec q8_0")
