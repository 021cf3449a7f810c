"""A layer of compressed attention gives the results of transformers', however its tokens are chunked."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Attention, DeepseekV4RotaryEmbedding

from csattn.errors import ArrayError, ConfigError
from csattn.lightning import compressed
from csattn.lightning.compressed import CompressedAttention, CompressedWeights

KINDS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
WINDOW, SPARSE, HEAVY = range(3)


def config() -> DeepseekV4Config:
    return DeepseekV4Config(
        hidden_size=48,
        num_hidden_layers=3,
        layer_types=list(KINDS),
        mlp_layer_types=["moe"] * 3,
        num_attention_heads=6,
        head_dim=32,
        partial_rotary_factor=0.5,
        q_lora_rank=24,
        o_groups=3,
        o_lora_rank=10,
        index_n_heads=8,  # with fewer, the ReLU makes whole sums 0: ties, which transformers breaks at random
        index_head_dim=32,
        index_topk=5,
        sliding_window=7,
        compress_rates={KINDS[SPARSE]: 4, KINDS[HEAVY]: 16},
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        attn_implementation="eager",
    )


def layer(kind: int, dtype: torch.dtype = torch.float32) -> tuple[DeepseekV4Attention, DeepseekV4RotaryEmbedding]:
    """Return a random layer whose position biases, sinks and norms are not the defaults."""
    module = DeepseekV4Attention(config(), kind)
    for name, parameter in module.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.4 if parameter.dim() > 1 else 0.7)
    if dtype != torch.float32:
        for child in module.modules():
            if isinstance(child, torch.nn.Linear):
                child.to(dtype)
    return module.eval(), DeepseekV4RotaryEmbedding(config())


@torch.no_grad()
def by_transformers(module: DeepseekV4Attention, rotary: DeepseekV4RotaryEmbedding, hidden: Tensor) -> Tensor:
    positions = torch.arange(len(hidden))[None]
    back = positions.T - positions
    mask = torch.zeros(back.shape).masked_fill((back < 0) | (back >= module.sliding_window), -torch.inf)[None, None]
    turned = {name: rotary(hidden[None], position_ids=positions, layer_type=name) for name in ("main", "compress")}
    out, _ = module(hidden[None], turned, positions, mask, None)
    return out[0]


@pytest.mark.parametrize("kind", [WINDOW, SPARSE, HEAVY])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 7, 16, 61, 200])
def test_compressed_attention_equals_that_of_transformers(kind: int, num_tokens: int) -> None:
    module, rotary = layer(kind)
    hidden = torch.randn(num_tokens, 48)
    got = CompressedAttention(CompressedWeights.of(module, rotary)).append(hidden)
    torch.testing.assert_close(got, by_transformers(module, rotary, hidden), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [WINDOW, SPARSE, HEAVY])
def test_outputs_do_not_depend_on_how_tokens_are_chunked(kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, hidden = CompressedWeights.of(*layer(kind)), torch.randn(150, 48)
    want = CompressedAttention(weights).append(hidden)
    monkeypatch.setattr(compressed, "TOKENS", 32)
    for pieces in ([150], [1] * 150, [97, 0, 2, 51], [3, 1, 60, 86]):
        attention = CompressedAttention(weights)
        got = torch.cat([attention.append(some) for some in hidden.split(pieces)])
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_bfloat16_output_is_within_2_percent_of_float32() -> None:
    """csattn sums rows in float32, and transformers in bfloat16."""
    module, rotary = layer(HEAVY, torch.bfloat16)
    hidden = torch.randn(200, 48, dtype=torch.bfloat16)
    got = CompressedAttention(CompressedWeights.of(module, rotary)).append(hidden).float()
    exact = CompressedAttention(CompressedWeights.of(module.float(), rotary)).append(hidden.float())
    assert (got - exact).norm() < 0.02 * exact.norm()


def test_append_after_a_failed_append_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, hidden = CompressedAttention(CompressedWeights.of(*layer(SPARSE))), torch.randn(20, 48)
    attention.append(hidden)
    with monkeypatch.context() as within:
        within.setattr(compressed, "sparse_mla", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            attention.append(hidden)
    with pytest.raises(ConfigError, match="an earlier append failed"):
        attention.append(hidden)


def test_layers_and_inputs_of_wrong_shape_or_scaling_are_refused() -> None:
    module, rotary = layer(SPARSE)
    weights = CompressedWeights.of(module, rotary)
    with pytest.raises(ArrayError, match=r"hidden has shape \[3, 47\]; wanted \[num_tokens, 48\]"):
        CompressedAttention(weights).append(torch.zeros(3, 47))
    assert weights.indexer is not None
    keys = weights.indexer.keys
    own = slice(keys.compressor.head_dim)
    bias = keys.compressor.position_bias[:, own].contiguous()
    alone = replace(keys, compressor=replace(keys.compressor, position_bias=bias), kv=keys.kv[own], gate=keys.gate[own])
    with pytest.raises(ConfigError, match=r"only one of rows and indexer\.keys overlaps"):
        replace(weights, indexer=replace(weights.indexer, keys=alone)).check()
    rotary.compress_attention_scaling = 1.2
    with pytest.raises(ConfigError, match=r"multiplies this layer's rows by 1\.2"):
        CompressedWeights.of(module, rotary)
