"""Shares of a model: what devices compute with theirs is together what the whole computes."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear as product

from csattn.errors import ConfigError
from csattn.models.families import describe
from csattn.models.share import require_shares, share_of_head, share_of_layer, share_of_spec
from csattn.models.spec import MlpSpec
from csattn.models.weights import Linear, weights_of
from csattn.share import Share
from tests.tiny import ALL_FAMILIES, loaded, tiny_config

REFUSED = {
    "layers of experts": {
        *("dots1", "ernie4_5_moe", "exaone_moe", "glm4_moe", "gpt_oss", "granitemoe", "hy_v3", "llama4_text"),
        *("mellum", "minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "solar_open", "gemma4_text, experts"),
    },
    "layers that attend to rows of others": {"gemma4_text, inputs"},
    "layers of latents": {"deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "youtu"},
    "layers of linear attention": {"qwen3_5_text"},
    "norms over all heads together": {"olmo2", "olmo3"},
    "layers of (experts|linear attention)": {"qwen3_5_moe_text", "qwen3_next"},
}
SPLIT = sorted(ALL_FAMILIES.keys() - {name for names in REFUSED.values() for name in names})


def outputs(linears: tuple[Linear, ...], x: Tensor) -> Tensor:
    return torch.cat([product(x, linear.weight, linear.bias) for linear in linears], dim=1)


def merged(parts: list[Tensor], widths: list[int]) -> Tensor:
    """Of each device pieces of those widths side by side: all devices' first pieces, then all their second ones."""
    pieces = [part.split(widths, dim=1) for part in parts]
    return torch.cat([of_device[number] for number in range(len(widths)) for of_device in pieces], dim=1)


@pytest.mark.parametrize("family", SPLIT)
def test_the_shares_of_a_layer_make_the_whole(family: str) -> None:
    weights, num = weights_of(loaded(family).model), 2
    spec, own = weights.spec, share_of_spec(weights.spec, num)
    require_shares(spec, num)
    shares = [Share(rank, num) for rank in range(num)]
    x = torch.randn(3, spec.hidden_size)
    for number, layer in enumerate(weights.layers):
        of, of_heads = spec.layers[number], spec.heads_of(number)
        parts = [share_of_layer(layer, of_heads, of, share) for share in shares]
        qkv, heads = [outputs(part.qkv, x) for part in parts], own.heads_of(number)
        torch.testing.assert_close(merged(qkv, [heads.q_width, heads.kv_width, heads.kv_width]), outputs(layer.qkv, x))
        attended, middle = torch.randn(3, of_heads.q_width), torch.randn(3, of.mlp.intermediate_size)
        for name, read in (("out", attended), ("down", middle)):
            whole, columns = getattr(layer, name), read.chunk(num, dim=1)
            added = [outputs((getattr(part, name),), own_x) for part, own_x in zip(parts, columns, strict=True)]
            torch.testing.assert_close(sum(added), outputs((whole,), read), rtol=1e-4, atol=1e-4)
        of_mlp = [own.layers[number].mlp.intermediate_size] * (1 + of.mlp.gated)
        gate_up = [outputs(part.gate_up, x) for part in parts]
        torch.testing.assert_close(merged(gate_up, of_mlp), outputs(layer.gate_up, x))
    head = torch.cat([outputs((share_of_head(weights.head, share),), x) for share in shares], dim=1)
    torch.testing.assert_close(head, outputs((weights.head,), x))


def test_gates_of_heads_go_with_their_heads() -> None:
    """Of a model whose other layers are refused."""
    weights = weights_of(loaded("qwen3_next").model)
    spec, number = weights.spec, weights.spec.indexed_layers[0]
    layer, x = weights.layers[number], torch.randn(3, weights.spec.hidden_size)
    parts = [share_of_layer(layer, spec.heads, spec.layers[number], Share(rank, 2)) for rank in range(2)]
    assert layer.gates
    assert torch.equal(torch.cat([outputs(part.gates, x) for part in parts], dim=1), outputs(layer.gates, x))


def test_sinks_of_heads_go_with_their_heads() -> None:
    """Of a model whose experts are refused."""
    weights = weights_of(loaded("gpt_oss").model)
    layer, of = weights.layers[0], weights.spec.layers[0]
    parts = [share_of_layer(layer, weights.spec.heads_of(0), of, Share(rank, 2)) for rank in range(2)]
    assert layer.sinks is not None and len(layer.sinks.unique()) == len(layer.sinks)
    assert torch.equal(torch.cat([part.sinks for part in parts]), layer.sinks)


def test_a_vocabulary_that_cannot_be_shared_out_is_on_all_devices() -> None:
    head = Linear(torch.randn(7, 4))
    assert share_of_head(head, Share(1, 2)) is head


@pytest.mark.parametrize(
    ("fault", "family"), [(fault, name) for fault, names in REFUSED.items() for name in sorted(names)]
)
def test_what_is_not_shared_out_is_named(fault: str, family: str) -> None:
    with pytest.raises(ConfigError, match=rf"{fault}, which are not shared out among devices; choose one device"):
        require_shares(describe(tiny_config(family)), 2)


def test_a_number_of_devices_that_does_not_fit_is_told_those_that_do() -> None:
    spec = describe(tiny_config("llama", hidden_size=192, num_attention_heads=24, num_key_value_heads=12))
    with pytest.raises(ConfigError, match=r"5 devices cannot share 12 KV heads .*; 1 or 2 or 3 or 4 or 6 or 12 can"):
        require_shares(spec, 5)
    odd = replace(spec.layers[0], mlp=MlpSpec(intermediate_size=90))
    with pytest.raises(ConfigError, match=r"4 devices .*; 1 or 2 or 3 or 6 can"):
        require_shares(replace(spec, layers=(*spec.layers[1:], odd)), 4)
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        require_shares(spec, 0)
    require_shares(describe(tiny_config("mixtral")), 1)
