"""The layer-by-layer prefill yields what an ordinary forward pass of the model computes."""

import pytest
import torch
from transformers import DynamicCache

from csattn.attention import attend_chunk
from csattn.errors import CaptureError
from csattn.models.attending_cache import CACHE
from index_build.capture import attend_chunk_on_gpu, prefill
from tests.tiny import FAMILIES, make_model, token_ids


def all_layers(model, ids, **options):
    return [(c.q.clone(), c.kv.clone(), hidden_out) for c, hidden_out in prefill(model, ids, **options)]


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_equals_the_models_own_forward(family: str) -> None:
    model, ids = make_model(family), torch.from_numpy(token_ids(150)).long()
    layers = all_layers(model, ids, chunk_len=64)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        want = model.model(ids[None], **{CACHE: cache}, output_hidden_states=True)
    for layer_idx, (_, kv, hidden_out) in enumerate(layers):
        torch.testing.assert_close(kv[:, :, 0], cache.layers[layer_idx].keys[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(kv[:, :, 1], cache.layers[layer_idx].values[0], rtol=1e-4, atol=1e-4)
        if layer_idx + 1 < len(layers):
            torch.testing.assert_close(hidden_out, want.hidden_states[layer_idx + 1][0], rtol=1e-3, atol=1e-3)


def test_captured_queries_reproduce_the_captured_attention() -> None:
    """Queries are captured after RoPE: attention computed from them must give the layer's own output."""
    model, ids = make_model("llama"), torch.from_numpy(token_ids(60)).long()
    seen = {}
    attention = model.model.layers[0].self_attn
    hook = attention.o_proj.register_forward_pre_hook(lambda module, args: seen.setdefault("out", args[0].clone()))
    q, kv, _ = all_layers(model, ids)[0]
    hook.remove()
    k, v = (kv[:, :, i].repeat_interleave(2, dim=0) for i in (0, 1))
    scores = (q @ k.transpose(1, 2) * attention.scaling).masked_fill(~torch.ones(60, 60).tril().bool(), -torch.inf)
    torch.testing.assert_close(seen["out"][0], (scores.softmax(-1) @ v).transpose(0, 1).reshape(60, -1))


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_hidden_states_of_latent_layers_equal_the_models_own(family: str) -> None:
    model, ids = make_model(family), torch.from_numpy(token_ids(150)).long()
    with torch.no_grad():
        want = model.model(ids[None], output_hidden_states=True).hidden_states
    for layer_idx, (_, _, hidden_out) in enumerate(all_layers(model, ids, chunk_len=64)[:-1]):
        torch.testing.assert_close(hidden_out, want[layer_idx + 1][0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("family", "chunk_len"),
    [*(("llama", n) for n in (1, 63, 64, 200)), ("deepseek_v3", 64), ("gemma4_text, inputs", 50)],
)
def test_prefill_does_not_depend_on_the_chunk_size(family: str, chunk_len: int) -> None:
    model, ids = make_model(family), torch.from_numpy(token_ids(129)).long()
    for got, want in zip(all_layers(model, ids, chunk_len=chunk_len), all_layers(model, ids), strict=True):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("family", "chunk_len"),
    [*(("qwen3_next", n) for n in (1, 50, 128)), *(("nemotron_h", n) for n in (50, 64, 128)), ("lfm2", 1)],
)
def test_recurrent_state_carries_over_between_chunks(family: str, chunk_len: int) -> None:
    """Also if the last chunk would have one token, for which transformers' state spaces ignore their least step."""
    changes = {"time_step_min": 2.0} if family == "nemotron_h" else {}
    model, ids = make_model(family, **changes), torch.from_numpy(token_ids(129)).long()
    of_chunks, of_all = (prefill(model, ids, chunk_len=length) for length in (chunk_len, 129))
    for (got, got_leaving), (want, want_leaving) in zip(of_chunks, of_all, strict=True):
        torch.testing.assert_close(got.state, want.state, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(got_leaving, want_leaving, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("chunk_len", "kv_len", "head_dim"), [(1, 1, 16), (7, 7, 16), (1, 65, 16), (64, 131, 16), (64, 131, 512)]
)
def test_gpu_attention_equals_cpu_attention(chunk_len: int, kv_len: int, head_dim: int, dtype: torch.dtype) -> None:
    """torch has the same call on both devices; on the CPU, its general implementation runs."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, kv = torch.randn(4, chunk_len, head_dim).to(dtype), torch.randn(2, kv_len, 2, head_dim).to(dtype)
    got = attend_chunk_on_gpu(q.to(device), kv[:, :, 0].to(device), kv[:, :, 1].to(device), 0.3)
    want = attend_chunk(q, kv[:, :, 0], kv[:, :, 1], 0.3)
    torch.testing.assert_close(got.cpu(), want, **({"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}))


def test_a_resumed_prefill_equals_an_uninterrupted_one() -> None:
    model, ids = make_model("llama"), torch.from_numpy(token_ids(100)).long()
    whole = all_layers(model, ids)
    resumed = all_layers(model, ids, resume=(1, whole[0][2]))
    assert len(resumed) == len(whole) - 1
    for got, want in zip(resumed, whole[1:], strict=True):
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)


def test_nan_in_captured_keys_is_refused_naming_the_layer() -> None:
    model, ids = make_model("llama"), torch.from_numpy(token_ids(30)).long()
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = torch.nan
    with pytest.raises(CaptureError, match=r"layer 1 .* keys"):
        all_layers(model, ids)


@pytest.mark.parametrize(("scale", "is_taken"), [(1e10, True), (1e18, False)])
def test_keys_too_large_for_an_index_are_refused_naming_the_layer(scale: float, is_taken: bool) -> None:
    model, ids = make_model("llama"), torch.from_numpy(token_ids(30)).long()
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight *= scale
    if is_taken:
        all_layers(model, ids)
        return
    with pytest.raises(CaptureError, match=r"layer 1 produced numbers up to \d\.\de\+1\d, above .* keys and values;"):
        all_layers(model, ids)


def test_the_models_attention_is_restored_when_a_prefill_ends_early() -> None:
    model, ids = make_model("llama"), torch.from_numpy(token_ids(30)).long()
    before = model.config._attn_implementation
    layers = prefill(model, ids)
    next(layers)
    assert model.config._attn_implementation == "csattn"
    layers.close()
    assert model.config._attn_implementation == before


def test_a_prefill_continues_after_another_of_the_same_model_ends() -> None:
    """Two threads that build different contexts with one model interleave like this."""
    model, ids = make_model("llama"), torch.from_numpy(token_ids(30)).long()
    before, alone = model.config._attn_implementation, all_layers(model, ids)
    first, second = prefill(model, ids), prefill(model, ids)
    next(first)
    interleaved = [next(second)[1]]
    first.close()
    interleaved += [hidden_out for _, hidden_out in second]
    assert all(torch.equal(got, hidden_out) for got, (*_, hidden_out) in zip(interleaved, alone, strict=True))
    assert model.config._attn_implementation == before
