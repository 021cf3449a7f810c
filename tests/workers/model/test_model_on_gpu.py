"""The decode loop in CUDA graphs computes what its calls compute one by one, and what transformers does on a GPU."""

from dataclasses import replace

import pytest
import torch
from transformers import Qwen3Config, Qwen3MoeConfig

from bench.random_weights import random_weights
from csattn.models.description import describe
from csattn.models.weights import Linear
from tests.attention.device_steps import change_rows
from tests.tiny import FAMILIES, make_model, token_ids
from tests.workers.model.decoding import decode, prefill
from tests.workers.model.full_attention import FullAttention
from tests.workers.model.full_context import CONTEXT_LENS, assert_greedy, full_attention, logits_after, make_runner
from workers.model import ModelRunner, take_weights

pytestmark = pytest.mark.gpu

QUESTION = token_ids(5, seed=5).tolist()
SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 3000,
    "max_position_embeddings": 4096,
    "attention_bias": True,
}
CONFIG = Qwen3Config(**SIZES)
SHAPE = describe(CONFIG)


class CalledBetweenGraphs(FullAttention):
    """Full attention that is called between graphs and counts its calls."""

    in_graph = False
    num_calls = 0

    def attend(self, layer_idx, q, rows, out) -> None:
        self.num_calls += 1
        super().attend(layer_idx, q, rows, out)


class LooksAhead(FullAttention):
    """Adds the predicted query to the layer's own, so that a wrong or late prediction shows."""

    lookahead = True
    early: torch.Tensor | None = None

    def look_ahead(self, layer_idx, q, rows) -> None:
        self.coming = q

    def attend(self, layer_idx, q, rows, out) -> None:
        predicted, self.early = self.early, getattr(self, "coming", None) if layer_idx < SHAPE.num_layers - 1 else None
        super().attend(layer_idx, q if predicted is None else q + predicted, rows, out)


def random_context(kind: type[FullAttention] = FullAttention, dtype: torch.dtype = torch.bfloat16) -> FullAttention:
    torch.manual_seed(3)
    size = (2, SHAPE.num_kv_heads, 300, 2, SHAPE.head_dim)
    layers = [torch.randn(size).to("cuda", dtype) for _ in range(SHAPE.num_layers)]
    return kind(layers, (300, 201), num_tails=8, tail_capacity=40, softmax_scale=SHAPE.softmax_scale)


def fill(runner: ModelRunner, batch_size: int, num_rows: int) -> None:
    rows = range(num_rows)
    runner.fill(
        batch_size,
        [17 * row + 3 for row in rows],
        [300 + row for row in rows],
        [row % 2 for row in rows],
        rows,
        [1] * num_rows,
    )


def decoded(kind: type[FullAttention] = FullAttention, num_steps: int = 12, **options):
    """Return the tokens and last logits of three requests, decoded beside an idle row."""
    weights = random_weights(CONFIG, "cuda")
    runner = ModelRunner(weights, random_context(kind), (4,), **options)
    fill(runner, 4, 3)
    tokens = decode(runner, 4, num_steps)[:, :3].clone()
    return tokens, runner.step(4).logits[:3].clone()


def test_graph_replay_gives_the_bits_of_uncaptured_calls() -> None:
    tokens, logits = decoded()
    want_tokens, want_logits = decoded(use_graphs=False)
    assert torch.equal(tokens, want_tokens)
    assert torch.equal(logits, want_logits)


def test_an_attention_outside_graphs_is_called_between_them_once_per_layer() -> None:
    tokens, logits = decoded(CalledBetweenGraphs)
    want_tokens, want_logits = decoded()
    assert torch.equal(tokens, want_tokens)
    assert torch.equal(logits, want_logits)
    runner = ModelRunner(random_weights(CONFIG, "cuda"), random_context(CalledBetweenGraphs), (1,))
    fill(runner, 1, 1)
    runner.attention.num_calls = 0
    decode(runner, 1, 3)
    assert runner.attention.num_calls == 3 * SHAPE.num_layers


def test_query_predictions_are_captured_in_the_graph() -> None:
    maps = torch.randn(2, SHAPE.num_layers, SHAPE.num_q_heads, SHAPE.head_dim + 1, SHAPE.head_dim) * 0.1
    tokens, logits = decoded(LooksAhead, next_query=maps)
    want_tokens, want_logits = decoded(LooksAhead, next_query=maps, use_graphs=False)
    assert torch.equal(tokens, want_tokens)
    assert torch.equal(logits, want_logits)
    assert not torch.equal(logits, decoded()[1])


@pytest.mark.parametrize("rounding", ["fp8", "int4"])
def test_a_step_with_quantized_weights_is_close_to_one_with_decoded_weights(rounding) -> None:
    weights = random_weights(CONFIG, "cuda", few=rounding)

    def decoded_of(linear: Linear) -> Linear:
        return Linear(linear.plain(torch.bfloat16), linear.bias)

    layers = [
        replace(
            layer,
            qkv=(decoded_of(layer.qkv[0]),),
            out=decoded_of(layer.out),
            gate_up=(decoded_of(layer.gate_up[0]),),
            down=decoded_of(layer.down),
        )
        for layer in weights.layers
    ]
    logits = []
    for each, options in (
        (weights, {}),
        (weights, {"use_graphs": False}),
        (replace(weights, layers=tuple(layers)), {}),
    ):
        runner = ModelRunner(each, random_context(), (4,), **options)
        fill(runner, 4, 3)
        logits.append(runner.step(4).logits[:3].clone())
    got, by_calls, want = logits
    assert torch.equal(got, by_calls)
    assert (got - want).norm() <= 0.02 * want.norm()


@pytest.mark.parametrize("few", ["fp8", "int4", "mxfp4"])
def test_a_step_with_quantized_experts_is_close_to_one_with_decoded_ones(few) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 320, "norm_topk_prob": True}
    weights = random_weights(Qwen3MoeConfig(**SIZES, **experts), "cuda", few=few)
    decoded = []
    for layer in weights.layers:
        plain = layer.experts[0].plain(torch.bfloat16)
        decoded.append(replace(layer, experts=(replace(plain, quantized=None),)))
    logits = []
    for each in (weights, replace(weights, layers=tuple(decoded))):
        runner = ModelRunner(each, random_context(), (8,))
        fill(runner, 8, 7)
        logits.append(runner.step(8).logits[:7].clone())
    got, want = logits
    assert (got - want).norm() <= 0.02 * want.norm()


@pytest.mark.parametrize("batch_size", [2, 3, 16])
def test_a_requests_logits_have_the_same_bits_in_any_batch_size(batch_size) -> None:
    """Bit for bit. Attention is excluded: here it computes only the first row."""
    weights = random_weights(CONFIG, "cuda")
    runner = ModelRunner(weights, RowByRow(random_context()), (1, batch_size))
    fill(runner, batch_size, 1)
    together = runner.step(batch_size).logits[:1].clone()
    fill(runner, 1, 1)
    assert torch.equal(runner.step(1).logits, together)


class RowByRow(FullAttention):
    """Attends as if the first row were alone, so that torch's choice of kernel is the same in every batch."""

    def __init__(self, inner: FullAttention) -> None:
        self.__dict__.update(inner.__dict__)

    def attend(self, layer_idx, q, rows, out) -> None:
        super().attend(layer_idx, q[:1], change_rows(rows, lambda x: x[:1]), out[:1])


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_generates_the_tokens_of_transformers(family) -> None:
    model = make_model(family).cuda()
    runner = make_runner(model, (1, 3))
    first = int(prefill(runner, QUESTION, 1, CONTEXT_LENS[1], tail_id=0).next_ids)
    runner.fill(1, [first], [CONTEXT_LENS[1] + len(QUESTION)], [1], [0], [len(QUESTION) + 1])
    assert_greedy([first, *decode(runner, 1, 31)[:, 0].tolist()], model, 1, QUESTION)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_bfloat16_logits_are_as_close_to_float32_as_those_of_transformers(family, batch_size) -> None:
    """At the last token of each chunk of a long question, in chunks of the batch size."""
    exact, model = make_model(family).cuda(), make_model(family).cuda().bfloat16()
    with torch.no_grad():
        for a, b in zip(exact.parameters(), model.parameters(), strict=True):
            a.copy_(b)  # the same weights: only the arithmetic differs
    question = token_ids(40, seed=6).tolist()
    runner = ModelRunner(take_weights(model, "cuda"), full_attention(model), (batch_size,))
    got = torch.stack(
        [
            prefill(runner, question[at : at + batch_size], 0, CONTEXT_LENS[0] + at, 0, at).logits[0].clone()
            for at in range(0, len(question), batch_size)
        ]
    )
    ends = [min(start + batch_size, len(question)) - 1 for start in range(0, len(question), batch_size)]
    want, peer = logits_after(exact, 0, question)[ends], logits_after(model, 0, question)[ends]
    assert (got - want).norm() <= 1.5 * (peer - want).norm()
