"""Models that generate from a stream's rows, compared with transformers' own attention over the same rows."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import processors
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from csattn.errors import ConfigError, ContextError, ModelError
from csattn.models.attending_cache import CACHE
from csattn.models.loader import wrap_model
from csattn.models.unrotated import unrotated
from tests.tiny import FAMILIES, MAX_POSITIONS, byte_tokenizer, loaded, make_model, token_ids
from tests.workers.streaming.soundness import check
from workers.streaming.config import StreamConfig
from workers.streaming.session import StreamSession
from workers.streaming.text import stream_text

ROPES = {
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 128},
}  # fmt: skip
KINDS = [*((family, None) for family in FAMILIES), *(("llama", rope) for rope in ROPES)]


def model_of(family, rope=None):
    if rope is None:
        return loaded(family)
    return wrap_model(make_model(family, rope_parameters=ROPES[rope]), byte_tokenizer(), f"tiny-{rope}")


def logits_of(session, ids, sizes):
    """Return the model's logits after every token; one stream gets the tokens in parts of these sizes."""
    cache = session.cache()
    with torch.inference_mode():
        parts = torch.from_numpy(ids).long()[None].split(sizes, 1)
        return torch.cat([session.loaded.model(part, **{CACHE: cache}).logits[0] for part in parts])


@torch.inference_mode()
def plain_logits(model, ids, kept_of):
    """Return the logits of transformers' own attention, token by token, over a new cache of the rows that a token sees.

    kept_of: token -> the earlier tokens it sees. Keys are kept before RoPE and rotated to their places in that cache
    by the model's own module; the key that a step adds is rotated back by the same angles.
    """
    rotary, width = model.model.rotary_emb, model.config.hidden_size
    keys = [[] for _ in model.model.layers]
    values = [[] for _ in model.model.layers]
    logits = []
    for token, token_id in enumerate(ids):
        kept = kept_of(token)
        cos, sin = rotary(torch.zeros(1, 1, width), position_ids=torch.arange(len(kept) + 1)[None])
        cos, sin = cos / rotary.attention_scaling, sin / rotary.attention_scaling
        cache = DynamicCache()
        for layer_idx in range(len(keys)):
            if kept:
                k = torch.stack([keys[layer_idx][row] for row in kept], dim=2)
                k = apply_rotary_pos_emb(k, k, cos[:, :-1], sin[:, :-1])[0]
                cache.update(k, torch.stack([values[layer_idx][row] for row in kept], dim=2), layer_idx)
        step = torch.tensor([[int(token_id)]])
        logits.append(model(step, position_ids=torch.tensor([[len(kept)]]), **{CACHE: cache}).logits[0, 0])
        for layer_idx, layer in enumerate(cache.layers):
            k = layer.keys[:, :, -1:]
            keys[layer_idx].append(apply_rotary_pos_emb(k, k, cos[:, -1:], -sin[:, -1:])[0][:, :, 0])
            values[layer_idx].append(layer.values[:, :, -1])
    return torch.stack(logits)


@pytest.mark.parametrize(("family", "rope"), KINDS)
@pytest.mark.parametrize("policy", ["window", "h2o"])
def test_a_stream_without_evictions_equals_full_attention(family, rope, policy) -> None:
    model, ids = model_of(family, rope), token_ids(100)
    with torch.inference_mode():
        want = model.model(torch.from_numpy(ids).long()[None]).logits[0]
    with StreamSession(model, StreamConfig(policy=policy, window_len=60, sink_len=4, heavy_len=50)) as session:
        got = logits_of(session, ids[:64], [30, 1, 33])
    torch.testing.assert_close(got, want[:64], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("family", "rope"), KINDS)
def test_sinks_and_window_equal_transformers_attention_over_the_kept_rows(family, rope) -> None:
    """The text is much longer than the window, so that a row's place and its token's position differ."""
    model, ids = model_of(family, rope), token_ids(80)
    want = plain_logits(
        model.model, ids, lambda token: [r for r in range(token) if r < 4 or r > token - 12]
    )  # fmt: skip
    with StreamSession(model, StreamConfig(sink_len=4, window_len=12)) as session:
        torch.testing.assert_close(logits_of(session, ids, [80]), want, rtol=1e-3, atol=2e-3)
        torch.testing.assert_close(logits_of(session, ids, [1] * 80), want, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("family", "prompt_len"), [*((family, 60) for family in FAMILIES), ("llama", MAX_POSITIONS + 50)]
)
@pytest.mark.parametrize("policy", ["window", "h2o"])
def test_generate_equals_the_stream_even_beyond_the_models_positions(family, prompt_len, policy) -> None:
    model, prompt = loaded(family), token_ids(prompt_len)
    with StreamSession(model, StreamConfig(policy=policy, sink_len=4, heavy_len=8, window_len=24)) as session:
        arguments = session.start(prompt)
        got = model.model.generate(**arguments, max_new_tokens=30, do_sample=False)[0, len(prompt) :].tolist()
        stream = session.tokens(prompt)
        assert [next(stream) for _ in range(30)] == got
    assert arguments[CACHE].num_tokens == len(prompt) + 29


def memory_of(cache) -> list[tuple[int, int]]:
    tensors = [value for rows in cache.rows for value in vars(rows).values() if torch.is_tensor(value)]
    return [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]


@pytest.mark.parametrize("policy", ["window", "h2o"])
def test_memory_is_constant_beyond_the_models_positions(policy) -> None:
    model = wrap_model(make_model(num_hidden_layers=1, max_position_embeddings=256), byte_tokenizer(), "one-layer")
    with StreamSession(model, StreamConfig(policy=policy, sink_len=4, heavy_len=8, window_len=24)) as session:
        cache = session.cache()
        stream = session.tokens(token_ids(5), cache)
        before, num_bytes = memory_of(cache), cache.num_bytes
        for _ in range(1200):
            next(stream)
        for rows in cache.rows:
            check(rows)
        assert cache.num_tokens == 1204
        assert (memory_of(cache), cache.num_bytes) == (before, num_bytes)


@pytest.mark.parametrize("policy", ["window", "h2o"])
def test_a_step_makes_no_attention_mask(policy) -> None:
    asked = []
    with StreamSession(loaded(), StreamConfig(policy=policy, heavy_len=8, window_len=24)) as session:
        cache = session.cache()
        layer = loaded().model.model.layers[0]
        hook = layer.register_forward_pre_hook(
            lambda _, args, kwargs: asked.append(kwargs["attention_mask"]), with_kwargs=True
        )
        try:
            with torch.inference_mode():
                for part in torch.from_numpy(token_ids(120)).long()[None].split([50, 1, 69], 1):
                    loaded().model(part, **{CACHE: cache})
        finally:
            hook.remove()
    assert asked == [None] * 3


def test_a_stream_may_keep_as_many_rows_as_the_model_has_positions() -> None:
    config = StreamConfig(sink_len=4, window_len=MAX_POSITIONS - 4)
    with StreamSession(loaded(), config) as session:
        assert len(session._places._cos) == MAX_POSITIONS
        logits_of(session, token_ids(8), [5, 3])
    with pytest.raises(ConfigError, match="1025 rows needs as many positions, and the model has 1024"):
        StreamSession(loaded(), StreamConfig(sink_len=5, window_len=MAX_POSITIONS - 4))


def test_streams_of_one_session_are_independent() -> None:
    first, second = token_ids(60, seed=1), token_ids(60, seed=2)
    with StreamSession(loaded(), StreamConfig(policy="h2o", heavy_len=6, window_len=10)) as session:
        alone = logits_of(session, first, [60])
        caches, mixed = (session.cache(), session.cache()), []
        with torch.inference_mode():
            for parts in zip(first.reshape(6, 10), second.reshape(6, 10), strict=True):
                for part, cache in zip(parts, caches, strict=True):
                    mixed.append(loaded().model(torch.from_numpy(part).long()[None], **{CACHE: cache}).logits[0])
    torch.testing.assert_close(torch.cat(mixed[::2]), alone, rtol=1e-3, atol=1e-3)


def test_the_model_itself_is_unchanged_during_and_after_a_session() -> None:
    model, ids = loaded().model, torch.from_numpy(token_ids(40)).long()[None]
    with torch.inference_mode():
        want = model(ids).logits
        with StreamSession(loaded(), StreamConfig(window_len=8)):
            torch.testing.assert_close(model(ids).logits, want)
        assert not model.model._forward_pre_hooks
        torch.testing.assert_close(model(ids).logits, want)


def test_sessions_over_one_model_may_end_in_any_order() -> None:
    model, ids = loaded(), token_ids(20)
    before = model.model.config._attn_implementation
    first, second = (StreamSession(model, StreamConfig(window_len=8)) for _ in range(2))
    with first:
        tokens = first.tokens(ids)
        want = [next(tokens) for _ in range(4)]
    first.__enter__()
    with second:
        tokens = second.tokens(ids)
        got = [next(tokens), next(tokens)]
        first.__exit__(None, None, None)
        assert [*got, next(tokens), next(tokens)] == want
    assert model.model.config._attn_implementation == before


def test_a_stream_without_an_open_session_is_refused_and_continues_in_one() -> None:
    session, ids = StreamSession(loaded(), StreamConfig(window_len=8)), token_ids(20)
    with pytest.raises(ConfigError, match="has ended, or has not begun; continue in an open one"):
        next(session.tokens(ids))
    with session:
        with pytest.raises(ConfigError, match="open already; make another"):
            session.__enter__()
        want = logits_of(session, ids, [15, 5])[15:]
        cache = session.cache()
        loaded().model(torch.from_numpy(ids[:15]).long()[None], **{CACHE: cache})
    rest = torch.from_numpy(ids[15:]).long()[None]
    with pytest.raises(ConfigError, match="has ended"):
        loaded().model(rest, **{CACHE: cache})
    with session, torch.inference_mode():
        assert torch.equal(loaded().model(rest, **{CACHE: cache}).logits[0], want)


@pytest.mark.parametrize("policy", ["window", "h2o"])
@pytest.mark.parametrize("place", ["an MLP", "the first rows", "the last rows"])
def test_a_stream_whose_step_was_interrupted_is_refused(policy, place, monkeypatch) -> None:
    def leave(*args: object) -> None:
        raise KeyboardInterrupt

    model, ids = make_model(), torch.from_numpy(token_ids(12)).long()[None]
    config = StreamConfig(policy=policy, window_len=8, heavy_len=4)
    with StreamSession(wrap_model(model, byte_tokenizer(), "tiny"), config) as session:
        cache = session.cache()
        model(ids, **{CACHE: cache})
        left, name = {
            "an MLP": (model.model.layers[1].mlp, "forward"),
            "the first rows": (cache.rows[0], "_store"),
            "the last rows": (cache.rows[-1], "_store"),
        }[place]
        with monkeypatch.context() as patch:
            patch.setattr(left, name, leave)
            with pytest.raises(KeyboardInterrupt):
                model(ids, **{CACHE: cache})
        with pytest.raises(ConfigError, match="left before its end; begin a new stream"):
            model(ids, **{CACHE: cache})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policy": "lru"}, "unknown policy 'lru'; choose one of window, h2o"),
        ({"window_len": 0}, "window_len must be at least 1, got 0"),
        ({"window_len": 2.5}, "window_len must be a whole number, got 2.5"),
        ({"sink_len": "4"}, "sink_len must be a whole number, got '4'"),
        ({"sink_len": -1}, "sink_len must be at least 0, got -1"),
        ({"policy": "h2o", "heavy_len": -1}, "heavy_len must be at least 0"),
    ],
)
def test_a_bad_configuration_is_refused_with_the_reason(changes, words) -> None:
    with pytest.raises(ConfigError, match=words):
        StreamConfig(**changes)


def test_a_model_that_weighs_heads_after_rope_is_refused() -> None:
    """A stream moves rows by another rotation, which is not what was weighed."""
    with pytest.raises(ConfigError, match="norms after RoPE"):
        StreamSession(loaded("hunyuan_v1_dense"), StreamConfig())


def test_bad_input_is_refused_with_the_reason() -> None:
    with StreamSession(loaded(), StreamConfig(window_len=8)) as session:
        with pytest.raises(ConfigError, match="at least one token"):
            next(session.tokens(np.zeros(0, np.int32)))
        with pytest.raises(ConfigError, match="max_new_tokens must be at least 1, got 0"):
            stream_text(session, "the tide", 0)
        for text, sentence in ((None, "a prompt must be text, got a value of type NoneType"), (" ", "holds no text")):
            with pytest.raises(ConfigError, match=sentence):
                stream_text(session, text, 1)
        for wrong in ([[1, 2]], [1.5], 5):
            with pytest.raises(ConfigError, match="whole numbers in one row"):
                next(session.tokens(np.array(wrong)))
        with pytest.raises(ContextError, match="token id -1 is not in the model's vocabulary"):
            next(session.tokens(np.array([-1])))
        with pytest.raises(ContextError, match="token id 9999 is not in the model's vocabulary"):
            session.start(np.array([3, 9999]))
        with pytest.raises(ConfigError, match="one sequence"):
            loaded().model(torch.zeros(2, 3, dtype=torch.long), **{CACHE: session.cache()})
        with pytest.raises(ConfigError, match="a stream is a cache, and use_cache is False"):
            loaded().model.generate(**session.start(token_ids(3)), max_new_tokens=2, use_cache=False)
        padded = torch.tensor([[0, 1, 1]])
        with pytest.raises(ConfigError, match="without padding"):
            loaded().model(torch.zeros(1, 3, dtype=torch.long), attention_mask=padded, **{CACHE: session.cache()})
        for wrong in ([[0, 2, 1]], [[1, 2, 3]], [[0, 1]]):
            positions = torch.tensor(wrong)
            with pytest.raises(ConfigError, match="not those of 3 tokens, one after another, that follow a stream of"):
                loaded().model(torch.zeros(1, 3, dtype=torch.long), position_ids=positions, **{CACHE: session.cache()})
        cache, ids = session.cache(), torch.zeros(1, 3, dtype=torch.long)
        loaded().model(ids, **{CACHE: cache})
        loaded().model(ids, position_ids=torch.tensor([[3, 4, 5]]), **{CACHE: cache})


@pytest.mark.parametrize(
    ("model", "config", "sentence"),
    [
        (None, StreamConfig(), "what `load_model` returned, got a NoneType"),
        ("smollm2", StreamConfig(), "what `load_model` returned, got a str"),
        (loaded(), None, "the config of a stream is a StreamConfig, got None"),
        (loaded(), {"window_len": 8}, "is a StreamConfig, got {'window_len': 8}; give one"),
    ],
)
def test_a_session_of_something_else_is_refused(model, config, sentence) -> None:
    with pytest.raises(ConfigError, match=sentence):
        StreamSession(model, config)


def test_a_session_that_ended_twice_leaves_others_open() -> None:
    model, ids = loaded().model, token_ids(20)
    first, second = (StreamSession(loaded(), StreamConfig(window_len=8)) for _ in range(2))
    first.__exit__(None, None, None)  # before it began
    with second:
        with first:
            pass
        first.__exit__(None, None, None)
        assert len([*zip(second.tokens(ids), range(3), strict=False)]) == 3
    assert not model.model._forward_pre_hooks


def test_a_cache_of_something_else_is_refused() -> None:
    with (
        StreamSession(loaded(), StreamConfig(window_len=8)) as session,
        StreamSession(loaded(), StreamConfig(window_len=9)) as other,
    ):
        for cache in (DynamicCache(), other.cache(), 5):
            with pytest.raises(ConfigError, match="a cache that this session has made, got"):
                next(session.tokens(token_ids(20), cache))


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize(
    ("method", "given", "sentence"),
    [
        ("reset", [], "cannot go back to fewer tokens: it has not kept all rows; begin a new one"),
        ("crop", [3], "cannot go back to fewer tokens"),
        ("reorder_cache", [torch.tensor([0])], "one sequence, without beams and batches; begin a stream for each"),
        ("batch_repeat_interleave", [2], "one sequence"),
        ("batch_select_indices", [torch.tensor([0])], "one sequence"),
    ],
)
def test_cache_methods_that_a_stream_has_not_are_refused(used, method, given, sentence) -> None:
    """`reset` did nothing, so that the next text continued the last one."""
    with StreamSession(loaded(), StreamConfig(window_len=8)) as session:
        cache = session.cache()
        if used:
            next(session.tokens(token_ids(20), cache))
        with pytest.raises(ConfigError, match=sentence):
            getattr(cache, method)(*given)


def test_an_end_token_that_the_tokenizer_adds_to_a_prompt_is_left_out() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", tokenizer.eos_token_id)]
    )
    assert len(tokenizer("the tide").input_ids) == 9
    model = wrap_model(make_model(vocab_size=len(tokenizer)), tokenizer, "tiny-ending")
    with StreamSession(model, StreamConfig(window_len=60)) as session:
        assert stream_text(session, "the tide", 1).prompt_len == 8


@pytest.mark.parametrize(("value", "of_ids"), [(torch.nan, [7]), (torch.inf, [7]), (-torch.inf, slice(None))])
def test_non_finite_logits_raise_an_error(value, of_ids) -> None:
    model = make_model("llama")

    def spoil(_module, _inputs, logits) -> None:
        logits[..., of_ids] = value

    model.lm_head.register_forward_hook(spoil)
    broken = wrap_model(model, byte_tokenizer(), "broken")
    session = StreamSession(broken, StreamConfig(window_len=8))
    with session, pytest.raises(ModelError, match="logits hold NaN or infinity"):
        next(session.tokens(token_ids(3)))


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_a_stream_is_recognised_by_either_cache_argument_name(name) -> None:
    """transformers names it `cache` from 5.24 on. In a cache that is not recognised, keys would be rotated twice."""
    decoder = torch.nn.Identity()
    decoder.forward = lambda **given: given
    with unrotated(SimpleNamespace(model=decoder), lambda cache: cache == {}):
        given = decoder(input_ids=torch.ones(1, 3, dtype=torch.long), **{name: {}})
    assert not given["position_ids"].any()
