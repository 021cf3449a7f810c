"""Shares of a model: the devices' results together are those of the whole model."""

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear as product

from csattn.batch import make_step_rows
from csattn.errors import ConfigError
from csattn.models.description import describe
from csattn.models.module_weights import weights_of
from csattn.models.quantized_weight import CODES, RUN, QuantizedExperts, QuantizedWeight, WeightFormat
from csattn.models.share import (
    require_shares,
    require_shares_of_quantized,
    share_of_head,
    share_of_layer,
    share_of_spec,
)
from csattn.models.spec import ExpertsSpec, MlpSpec
from csattn.models.weights import ExpertWeights, Linear, ModelWeights, by_expert
from csattn.share import Share
from tests.tiny import ALL_FAMILIES, loaded, tiny_config
from tests.workers.model.quantized import KINDS, KINDS_OF_EXPERTS, make_quantized, make_quantized_experts
from tests.workers.model.step_ops import EPS, EXPERTS
from workers.model.layers import expert_buffers
from workers.model.ops import Normed
from workers.model.torch_ops import TorchOps

REFUSED = {
    "experts with separate norms": {"gemma4_text, experts"},
    "layers that share the rows of other layers": {"gemma4_text, inputs"},
    "layers of latents": {"deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "mistral4", "youtu"},
    "layers that keep a state instead of rows": {
        *("granitemoehybrid", "granitemoehybrid, dense", "lfm2", "lfm2_moe", "nemotron_h"),
        *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"),
    },
    "norms over all heads together": {"flex_olmo", "minimax_m2", "olmo2", "olmo3", "olmoe"},
}
SPLIT = sorted(ALL_FAMILIES.keys() - {name for names in REFUSED.values() for name in names})


def outputs(linears: tuple[Linear, ...], x: Tensor) -> Tensor:
    return torch.cat([product(x, linear.weight, linear.bias) for linear in linears], dim=1)


def merged(parts: list[Tensor], widths: list[int]) -> Tensor:
    """Join the devices' pieces of these widths: all devices' first pieces, then all their second ones, and so on."""
    pieces = [part.split(widths, dim=1) for part in parts]
    return torch.cat([of_device[number] for number in range(len(widths)) for of_device in pieces], dim=1)


def experts_out(weights: ExpertWeights, spec: ExpertsSpec, x: Tensor) -> Tensor:
    """Return the output of the experts chosen for x."""

    def zeros(*sizes: int, dtype: torch.dtype = x.dtype) -> Tensor:
        return torch.zeros(len(x), *sizes, dtype=dtype)

    buffers = expert_buffers(spec, x.shape[1], zeros)
    buffers.logits.copy_(product(x, weights.router.weight, weights.router.bias))
    ops, out = TorchOps(EPS), torch.full_like(x, torch.nan)
    ops.choose_experts(weights, spec, make_step_rows(len(x), x.device), buffers)
    ops.experts(Normed(x), weights, spec, buffers)
    ops.experts_out(weights, spec, buffers, out)
    return out


@pytest.mark.parametrize("family", SPLIT)
def test_outputs_of_a_layers_shares_add_up_to_the_whole_layers(family: str) -> None:
    weights, num = weights_of(loaded(family).model), 2
    spec, own = weights.spec, share_of_spec(weights.spec, num)
    require_shares(spec, num)
    shares = [Share(rank, num) for rank in range(num)]
    x = torch.randn(3, spec.hidden_size)
    for number, layer in enumerate(weights.layers):
        of, of_heads = spec.layers[number], spec.heads_of(number)
        parts = [share_of_layer(layer, of_heads, of, share) for share in shares]
        if of.compressed is None:
            qkv, heads = [outputs(part.qkv, x) for part in parts], own.heads_of(number)
            widths = [heads.q_width, heads.kv_width, heads.kv_width]
            torch.testing.assert_close(merged(qkv, widths), outputs(layer.qkv, x))
        out_width = of_heads.q_width if of.compressed is None else of.compressed.out_width
        for name, width in (("out", out_width), ("down", of.mlp and of.mlp.intermediate_size)):
            if width is None:
                continue
            read = torch.randn(3, width)
            whole, columns = getattr(layer, name), read.chunk(num, dim=1)
            added = [outputs((getattr(part, name),), own_x) for part, own_x in zip(parts, columns, strict=True)]
            torch.testing.assert_close(sum(added), outputs((whole,), read), rtol=1e-4, atol=1e-4)
        for experts, of_experts in enumerate(of.experts):
            own_spec = own.layers[number].experts[experts]
            given = [experts_out(part.experts[experts], own_spec, x) for part in parts]
            want = experts_out(layer.experts[experts], of_experts, x)
            torch.testing.assert_close(sum(given), want, rtol=1e-4, atol=1e-4)
        if of.mlp is None:
            continue
        of_mlp = [own.layers[number].mlp.intermediate_size] * (1 + of.mlp.gated)
        gate_up = [outputs(part.gate_up, x) for part in parts]
        torch.testing.assert_close(merged(gate_up, of_mlp), outputs(layer.gate_up, x))
    head = torch.cat([outputs((share_of_head(weights.head, share),), x) for share in shares], dim=1)
    torch.testing.assert_close(head, outputs((weights.head,), x))


def test_shares_of_compressed_attention_add_up_to_the_whole_layer() -> None:
    weights = weights_of(loaded("deepseek_v4").model)
    for layer, of in zip(weights.layers, weights.spec.layers, strict=True):
        parts = [share_of_layer(layer, weights.spec.heads, of, Share(rank, 2)).compressed for rank in range(2)]
        whole, spec = layer.compressed, of.compressed
        assert whole is not None and spec is not None and parts[0] is not None and parts[1] is not None
        latents, attended = torch.randn(3, spec.q_rank), torch.randn(3, spec.q_width // spec.num_groups)
        queries = [outputs(part.queries, latents) for part in parts]
        heads = torch.cat([q[:, : spec.q_width // 2] for q in queries], dim=1)
        torch.testing.assert_close(heads, outputs(whole.queries, latents)[:, : spec.q_width])
        for q in queries:
            torch.testing.assert_close(q[:, spec.q_width // 2 :], outputs(whole.queries, latents)[:, spec.q_width :])
        groups = torch.cat([outputs((part.groups,), attended) for part in parts], dim=1)
        torch.testing.assert_close(groups, outputs((whole.groups,), attended))
        assert torch.equal(torch.cat([part.sinks for part in parts]), whole.sinks)
        assert parts[0].inputs is whole.inputs and parts[1].rows is whole.rows


def test_attention_gates_are_split_with_their_heads() -> None:
    """This model has other layers, which cannot be split."""
    weights = weights_of(loaded("qwen3_next").model)
    spec, number = weights.spec, weights.spec.indexed_layers[0]
    layer, x = weights.layers[number], torch.randn(3, weights.spec.hidden_size)
    parts = [share_of_layer(layer, spec.heads, spec.layers[number], Share(rank, 2)) for rank in range(2)]
    assert layer.gates
    assert torch.equal(torch.cat([outputs(part.gates, x) for part in parts], dim=1), outputs(layer.gates, x))


def test_attention_sinks_are_split_with_their_heads() -> None:
    weights = weights_of(loaded("gpt_oss").model)
    layer, of = weights.layers[0], weights.spec.layers[0]
    parts = [share_of_layer(layer, weights.spec.heads_of(0), of, Share(rank, 2)) for rank in range(2)]
    assert layer.sinks is not None and len(layer.sinks.unique()) == len(layer.sinks)
    assert torch.equal(torch.cat([part.sinks for part in parts]), layer.sinks)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}-{kind[2]}")
@pytest.mark.parametrize("on_gpu", [False, True])
def test_shares_of_a_quantized_matrix_decode_to_slices_of_the_whole(
    kind: tuple[WeightFormat, int, bool], on_gpu: bool
) -> None:
    """on_gpu: only the quantized words are kept, without decoded weights."""
    spec = describe(tiny_config("llama", head_dim=128, intermediate_size=512))
    quantized = make_quantized(70, 512, *kind).to("cpu")
    plain = quantized.decoded(torch.float32)
    linear = Linear(quantized.words if on_gpu else plain, torch.randn(70), quantized)
    layer = replace(weights_of(loaded("llama").model).layers[0], out=linear, down=linear)
    parts = [share_of_layer(layer, spec.heads, spec.layers[0], Share(rank, 2)) for rank in range(2)]
    for name in ("out", "down"):
        shares = [getattr(part, name) for part in parts]
        assert torch.equal(torch.cat([share.quantized.decoded(torch.float32) for share in shares], dim=1), plain)
        assert torch.equal(torch.cat([share.plain(torch.float32) for share in shares], dim=1), plain)
        assert [share.quantized.num_in for share in shares] == [256, 256]
        assert shares[0].bias is linear.bias and shares[1].bias is None


@pytest.mark.parametrize("kind", [*KINDS, ("fp4", 32, False)], ids=lambda kind: f"{kind[0]}-{kind[1]}-{kind[2]}")
def test_any_range_of_input_groups_is_a_quantized_matrix(kind: tuple[WeightFormat, int, bool]) -> None:
    quantized = make_quantized(5, 608, *kind).to("cpu")
    plain, unit = quantized.decoded(torch.float32), max(RUN // CODES[quantized.format], quantized.group_size)
    for first, stop in combinations([*range(0, 608, unit), 608], 2):
        part = quantized.inputs(slice(first, stop))
        assert torch.equal(part.decoded(torch.float32), plain[:, first:stop])
        assert part.nbytes == QuantizedWeight.size(part.format, part.group_size, 5, stop - first)


@pytest.mark.parametrize("kind", KINDS_OF_EXPERTS, ids=lambda kind: f"{kind[0]}-{kind[1]}-{kind[2]}")
def test_shares_of_quantized_experts_decode_to_slices_of_the_whole(
    kind: tuple[str, WeightFormat, int, bool],
) -> None:
    experts = replace(EXPERTS[kind[0]], intermediate_size=512)
    layer_spec = replace(describe(tiny_config("llama")).layers[0], mlp=None, experts=(experts,))
    words = make_quantized_experts(experts, 72, kind[1:], torch.float32)
    words = replace(words, quantized=words.quantized.to("cpu"))
    plain = words.plain(torch.float32)
    llama = weights_of(loaded("llama").model)
    for whole in (words, plain):  # as on a GPU, and as on the host
        layer = replace(llama.layers[0], experts=(whole,))
        parts = [share_of_layer(layer, llama.spec.heads, layer_spec, Share(rank, 2)).experts[0] for rank in range(2)]
        for part in parts:
            assert part.quantized is not None
            own = by_expert(
                part.quantized.gate_up.decoded(torch.float32),
                part.quantized.down.decoded(torch.float32),
                experts.num_experts,
                experts.gated,
            )
            there = part.plain(torch.float32)
            assert all(map(_equal, own, (there.gates, there.ups, there.down)))
        for name, dim in (("gates", 1), *([("ups", 1)] if experts.gated else []), ("down", 2)):
            both = torch.cat([getattr(part.plain(torch.float32), name) for part in parts], dim=dim)
            assert torch.equal(both, getattr(plain, name))


def _equal(first: Tensor | None, second: Tensor | None) -> bool:
    return first is second if first is None or second is None else torch.equal(first, second)


def test_quantized_weights_that_cannot_be_split_are_refused_with_possible_counts() -> None:
    """Each device takes whole groups, and the inputs must be in the order of their groups."""
    weights = weights_of(loaded("llama").model)
    spec = replace(weights.spec, num_kv_heads=8, num_q_heads=8)

    def of(quantized: QuantizedWeight, **parts: Any) -> ModelWeights:
        down = Linear(torch.empty(0), None, quantized)
        return replace(weights, spec=spec, layers=(replace(weights.layers[0], down=down, **parts),))

    def matrix(num_in: int, group_size: int) -> QuantizedWeight:
        return make_quantized(3, num_in, "int4", group_size, True).to("cpu")

    require_shares_of_quantized(of(matrix(1024, 128)), 8)
    require_shares_of_quantized(of(matrix(1000, 0)), 1)
    require_shares_of_quantized(of(matrix(512, 32)), 8)
    for quantized in (matrix(512, 128), matrix(1024, 256), matrix(128, 32), matrix(128, 0)):
        with pytest.raises(
            ConfigError, match=r"8 devices cannot split this model's weights of 8 or 4 bits: .*; 1 or 2 or 4 can, "
        ):
            require_shares_of_quantized(of(quantized), 8)
    in_another_order = replace(matrix(1024, 128), order=torch.randperm(1024))
    with pytest.raises(ConfigError, match=r"2 devices .*; 1 can, and more may with weights of 16 bits"):
        require_shares_of_quantized(of(in_another_order), 2)
    experts = ExpertWeights(
        Linear(torch.empty(0)), *3 * [torch.empty(0)], quantized=QuantizedExperts(matrix(64, 32), matrix(96, 32))
    )
    with pytest.raises(ConfigError, match=r"2 devices .*; 1 can"):
        require_shares_of_quantized(of(matrix(1024, 128), experts=(experts,)), 2)


def test_a_head_whose_vocabulary_does_not_divide_is_replicated() -> None:
    head = Linear(torch.randn(7, 4))
    assert share_of_head(head, Share(1, 2)) is head


@pytest.mark.parametrize(
    ("fault", "family"), [(fault, name) for fault, names in REFUSED.items() for name in sorted(names)]
)
def test_models_that_cannot_be_split_over_devices_are_refused_with_the_reason(fault: str, family: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"{fault}, which csattn cannot split over several devices; choose one device"
    ):
        require_shares(describe(tiny_config(family)), 2)


def test_a_device_count_that_does_not_divide_the_model_is_refused_with_those_that_do() -> None:
    spec = describe(tiny_config("llama", hidden_size=192, num_attention_heads=24, num_key_value_heads=12))
    with pytest.raises(ConfigError, match=r"5 devices cannot split 12 KV heads .*; 1 or 2 or 3 or 4 or 6 or 12 can"):
        require_shares(spec, 5)
    odd = replace(spec.layers[0], mlp=MlpSpec(intermediate_size=90))
    with pytest.raises(ConfigError, match=r"4 devices .*; 1 or 2 or 3 or 6 can"):
        require_shares(replace(spec, layers=(*spec.layers[1:], odd)), 4)
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        require_shares(spec, 0)
    with pytest.raises(ConfigError, match=r"2 devices .*; 1 can"):
        require_shares(describe(tiny_config("mixtral", intermediate_size=35)), 2)
    require_shares(describe(tiny_config("qwen3_next")), 1)
