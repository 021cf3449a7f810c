"""DeepSeek-V4's experts and the MLP beside them compute what transformers does: in torch, on tapes and in Triton."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN

from csattn.batch import StepRows
from csattn.cpu.team import Team
from csattn.errors import ModelError
from csattn.models.description import describe
from csattn.models.families import FAMILIES
from csattn.models.module_weights import _linear, _routed
from csattn.models.quantized_model import drop_stale_quantized, round_weights
from csattn.models.quantized_weight import Rounding
from csattn.models.spec import Activation, ExpertsSpec
from csattn.models.weights import ExpertWeights, Linear, by_expert
from tests.tiny import make_model
from tests.workers.model.quantized import make_quantized
from tests.workers.model.step_ops import DEVICE, EPS, EXPERTS, make_choice, make_expert_buffers, randn, rows_of_tokens
from workers.model.cpu.tape_ops import TapeOps
from workers.model.layers import expert_buffers
from workers.model.ops import ExpertBuffers, Normed
from workers.model.rows import RowBuffer
from workers.model.torch_ops import TorchOps

NAN = float("nan")
VOCAB_SIZE, HIDDEN_SIZE = 256, 64
BY_TOKEN, BY_SCORE = 0, 1  # layer indices
Run = Callable[[Callable[[Any], None], int], None]  # runs a step with one kind of operations, for so many rows


def by_definition(step: Callable[[Any], None], num_rows: int) -> None:
    step(TorchOps(EPS))


def on_tapes(step: Callable[[Any], None], num_rows: int) -> None:
    if torch.cuda.is_available():
        pytest.skip("what these tests make is on the GPU if there is one")
    ops = TapeOps("float32", np.array([num_rows]), EPS)
    step(ops)
    tape = ops.cut()
    tape.set_rows(num_rows)
    with Team(2) as team:
        team.run(tape.tape)


def in_triton(step: Callable[[Any], None], num_rows: int) -> None:
    pytest.importorskip("triton", reason="Triton, whose interpreter runs these kernels on a CPU, is not installed")
    from workers.model.gpu.triton_ops import TritonOps

    step(TritonOps(DEVICE, EPS))


KINDS = pytest.mark.parametrize("run", [by_definition, on_tapes, in_triton])


def make_block(layer_idx: int) -> tuple[Any, ExpertsSpec, int]:
    """Return a layer's experts, whose gates, ups and logits far exceed limits, and the width of the MLP beside them."""
    model = make_model("deepseek_v4").to(DEVICE)
    layer = describe(model.config).layers[layer_idx]
    block = model.model.layers[layer_idx].mlp
    with torch.no_grad():
        for weight in (block.gate.weight, block.experts.gate_up_proj):
            weight *= 4
        for module in (block.shared_experts.gate_proj, block.shared_experts.up_proj):
            module.weight *= 4
    assert layer.mlp is not None and layer.mlp.activation == layer.experts[0].activation == "limited"
    return block, layer.experts[0], layer.mlp.intermediate_size


def weights_of_block(block: Any, spec: ExpertsSpec) -> ExpertWeights:
    return _routed(block, spec, FAMILIES["deepseek_v4"], VOCAB_SIZE)


def block_step(block: Any, spec: ExpertsSpec, width: int, x: Tensor, token_ids: list[int], run: Run) -> Tensor:
    """Return csattn's output for x."""
    weights, rows, mlp = weights_of_block(block, spec), rows_of_tokens(token_ids), block.shared_experts

    def zeros(*sizes: int, dtype: torch.dtype = x.dtype) -> Tensor:
        return torch.full((len(x), *sizes), NAN if dtype.is_floating_point else -1, dtype=dtype, device=DEVICE)

    buffers, gated, out = expert_buffers(spec, HIDDEN_SIZE, zeros), zeros(width), zeros(HIDDEN_SIZE)
    gates_ups = (_linear(mlp.gate_proj), _linear(mlp.up_proj))
    if run is in_triton:  # Triton reads both as one matrix
        gates_ups = (Linear(torch.cat([linear.weight for linear in gates_ups])),)

    def step(ops: Any) -> None:
        ops.linear(Normed(x), [weights.router], buffers.logits)
        ops.choose_experts(weights, spec, rows, buffers)
        ops.experts(Normed(x), weights, spec, buffers)
        ops.linear(Normed(x), gates_ups, gated, "limited", True)
        ops.linear(Normed(gated), [_linear(mlp.down_proj)], out)
        ops.experts_out(weights, spec, buffers, out, adds=True)

    run(step, len(x))
    return out


@KINDS
@pytest.mark.parametrize("layer_idx", [BY_TOKEN, BY_SCORE])
@pytest.mark.parametrize("num_rows", [1, 3, 17])
def test_a_moe_block_equals_that_of_transformers(num_rows: int, layer_idx: int, run: Run) -> None:
    block, spec, width = make_block(layer_idx)
    assert spec.by_token == block.is_hash == (layer_idx == BY_TOKEN)
    x, token_ids = randn(num_rows, HIDDEN_SIZE), torch.randint(VOCAB_SIZE, (num_rows,)).tolist()
    token_ids[0] = VOCAB_SIZE - 1
    got = block_step(block, spec, width, x, token_ids, run)
    with torch.no_grad():
        want = block(x[None], input_ids=torch.tensor(token_ids, device=DEVICE)[None])[0]
        gate, up = (x @ block.experts.gate_up_proj[0].T).chunk(2, dim=1)
    assert gate.max() > 15 and up.abs().max() > 15, "limits matter"
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


@KINDS
def test_expert_shares_keep_their_ratios_for_extreme_logits(run: Run) -> None:
    """Shares have the ratios of the scores, however small these are."""
    logits = torch.tensor([-60.0, -40.0, -30.0, -17.0, -8.0, -1.0, 0.0, 0.5, 19.9, 20.1, 21.0, 1e4, -1.5, -16.0])
    logits = torch.stack([logits.roll(i) for i in range(14)]).to(DEVICE)
    spec = ExpertsSpec(num_experts=14, num_chosen=2, intermediate_size=1, scores="root_softplus", by_token=True)
    weights, rows = make_choice(spec, 14), rows_of_tokens(list(range(14)))
    for scale, normed in ((1.0, False), (2.5, True)):
        of = replace(spec, normed=normed, scale=scale)
        buffers = make_expert_buffers(of, 14, 1, torch.float32, logits)
        run(lambda ops, of=of, buffers=buffers: ops.choose_experts(weights, of, rows, buffers), 14)  # type: ignore[misc]
        assert weights.by_token is not None and torch.equal(buffers.chosen, weights.by_token)
        scores = ACT2FN["sqrtsoftplus"](logits.double()).gather(1, buffers.chosen.long())
        want = scores / (scores.sum(1, keepdim=True) + 1e-20) * scale if normed else scores
        torch.testing.assert_close(buffers.shares.double(), want, rtol=1e-5, atol=0)


@KINDS
def test_of_experts_with_equal_scores_the_first_are_chosen(run: Run) -> None:
    """This holds if all scores are 0, too: then all shares are 0."""
    spec = EXPERTS["limited"]
    logits = torch.tensor([[-300.0] * 9, [3.0] * 9, [1.0, 25.0, 2.0, 25.0, 30.0, 25.0, 0.0, 30.0, 25.0]], device=DEVICE)
    weights, buffers = (
        replace(make_choice(spec), choice_bias=None),
        make_expert_buffers(spec, 3, 1, torch.float32, logits),
    )
    run(lambda ops: ops.choose_experts(weights, spec, rows_of_tokens([0, 0, 0]), buffers), 3)
    assert buffers.chosen.tolist() == [[0, 1, 2], [0, 1, 2], [4, 7, 1]]
    assert buffers.shares[0].tolist() == [0.0, 0.0, 0.0]
    torch.testing.assert_close(buffers.shares[1], torch.full((3,), 0.5, device=DEVICE))


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # by Triton's interpreter
@KINDS
def test_rows_choose_only_the_experts_of_their_token_in_the_table(run: Run) -> None:
    """Memory around the table holds invalid expert ids. An idle row gets the experts of token 0, for any logits."""
    spec = EXPERTS["by_token"]
    weights, buffer = make_choice(spec, 7), torch.full((9, spec.num_chosen), 10**6, dtype=torch.int32, device=DEVICE)
    assert weights.by_token is not None
    table = buffer[1:8]
    table.copy_(weights.by_token)
    step_rows = RowBuffer(4, DEVICE)
    step_rows.fill(token_ids=[6, 3], positions=[0, 1], context_ids=[-1, -1], tail_ids=[0, 0], tail_lens=[1, 2])
    logits = randn(4, spec.num_experts)
    logits[2:] = NAN
    buffers = make_expert_buffers(spec, 4, 1, torch.float32, logits)
    run(lambda ops: ops.choose_experts(replace(weights, by_token=table), spec, step_rows.rows, buffers), 4)
    assert torch.equal(buffers.chosen, table[[6, 3, 0, 0]])
    assert not buffers.shares[:2].isnan().any()


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # by Triton's interpreter
@KINDS
def test_nan_passes_through_limited_activations(run: Run) -> None:
    """Limits pass NaN on."""
    spec = replace(EXPERTS["limited"], num_experts=1, num_chosen=1, has_choice_bias=False)
    width, x = spec.intermediate_size, torch.tensor([[1.0, 0.0], [0.0, 1.0], [20.0, 0.0]], device=DEVICE)
    both = torch.ones(1, 2 * width, 2, device=DEVICE)
    gates, ups = both[:, :width], both[:, width:]
    ups[..., 1] = -50.0
    gates[0, 3, 1] = ups[0, 5, 1] = NAN
    weights = replace(make_choice(spec), gates=gates, ups=ups)
    buffers, gated = (
        make_expert_buffers(spec, 3, 1, torch.float32, torch.zeros(3, 1)),
        torch.full((3, width), NAN, device=DEVICE),
    )
    buffers.chosen.zero_()
    linears = [Linear(both[0])] if run is in_triton else [Linear(gates[0].contiguous()), Linear(ups[0].contiguous())]

    def step(ops: Any) -> None:
        ops.experts(Normed(x), weights, spec, buffers)
        ops.linear(Normed(x), linears, gated, "limited", True)

    run(step, 3)
    for made in (buffers.gated[:, 0], gated):
        assert made[1].isnan().nonzero()[:, 0].tolist() == [3, 5]
        torch.testing.assert_close(made[1, 0].item(), -10 / (1 + np.exp(-1.0)), rtol=1e-5, atol=0)
        torch.testing.assert_close(made[2, 0].item(), 100 / (1 + np.exp(-10.0)), rtol=1e-5, atol=0)


@pytest.mark.usefixtures("two_multiprocessors")
@pytest.mark.parametrize("activation", ["limited", "clamped", "relu2"])
@pytest.mark.parametrize("batch_size", [1, 3, 8, 18])
def test_a_quantized_mlp_limits_activations_and_passes_nan_on(batch_size: int, activation: Activation) -> None:
    """In CUDA C, and for more than eight rows in Triton. NaN stays NaN."""
    pytest.importorskip("triton", reason="Triton, whose interpreter runs these kernels on a CPU, is not installed")
    from workers.model.gpu.triton_ops import TritonOps

    of_rows = torch.bfloat16 if batch_size <= 8 or DEVICE.type == "cuda" else torch.float32  # Triton's interpreter
    weight, x = make_quantized(2 * 41, 128, "fp8", 128, False), randn(batch_size, 128, scale=12).to(of_rows)
    x[-1, 7] = NAN if batch_size > 1 else 0
    gate_up = Linear(weight.words, None, weight)
    products = x.float() @ weight.decoded(torch.float32).T
    assert products[0].max() > 15 and products[0].min() < -15, "limits matter"
    got, want = torch.full((2, batch_size, 41), -1.0, device=DEVICE)
    TritonOps(DEVICE, EPS).linear(Normed(x), [gate_up], got, activation, True)
    TorchOps(EPS).linear(Normed(x.float()), [gate_up], want, activation, True)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3, equal_nan=True)
    assert got[-1].isnan().all() == (batch_size > 1) and not got[:1].isnan().any()


@pytest.mark.parametrize("rounding", ["int4", "fp8"])
@pytest.mark.parametrize("layer_idx", [BY_TOKEN, BY_SCORE])
@pytest.mark.skipif(torch.cuda.is_available(), reason="tapes read what is in host memory")
def test_quantized_limited_experts_give_the_bits_of_decoded_ones(layer_idx: int, rounding: Rounding) -> None:
    model = make_model("deepseek_v4").bfloat16()
    layer, block = describe(model.config).layers[layer_idx], model.model.layers[layer_idx].mlp
    with torch.no_grad():
        block.experts.gate_up_proj *= 4
    round_weights(model, rounding)
    drop_stale_quantized(model)
    spec, x = layer.experts[0], torch.randn(3, HIDDEN_SIZE)
    weights, rows = weights_of_block(block, spec), rows_of_tokens([0, 7, VOCAB_SIZE - 1])
    assert weights.quantized is not None and (weights.by_token is None) == (layer_idx == BY_SCORE)
    matrices = weights.quantized.gate_up.decoded(torch.float32), weights.quantized.down.decoded(torch.float32)
    gates, ups, down = by_expert(*matrices, spec.num_experts, gated=True)
    router = Linear(weights.router.weight.float())
    wide = replace(weights, router=router, gates=gates, ups=ups, down=down, quantized=None)
    outs = []
    for of in (replace(weights, router=router), wide):
        buffers, out = (
            make_expert_buffers(spec, 3, HIDDEN_SIZE, torch.float32, torch.empty(3, spec.num_experts)),
            x.clone(),
        )
        on_tapes(lambda ops, of=of, buffers=buffers, out=out: _experts_step(ops, x, of, spec, rows, buffers, out), 3)  # type: ignore[misc]
        outs.append(out)
    assert torch.equal(*outs)
    buffers = make_expert_buffers(spec, 3, HIDDEN_SIZE, torch.float32, torch.empty(3, spec.num_experts))
    _experts_step(TorchOps(EPS), x, wide, spec, rows, buffers, defined := x.clone())
    torch.testing.assert_close(outs[0], defined, rtol=1e-4, atol=1e-3)


def _experts_step(
    ops: Any, x: Tensor, weights: ExpertWeights, spec: ExpertsSpec, rows: StepRows, buffers: ExpertBuffers, out: Tensor
) -> None:
    ops.linear(Normed(x), [weights.router], buffers.logits)
    ops.choose_experts(weights, spec, rows, buffers)
    ops.experts(Normed(x), weights, spec, buffers)
    ops.experts_out(weights, spec, buffers, out, adds=True)


@pytest.mark.parametrize("fault", ["an expert that there is none of", "fewer tokens"])
def test_a_token_table_of_wrong_experts_or_size_is_refused(fault: str) -> None:
    block, spec, _ = make_block(BY_TOKEN)
    if fault == "fewer tokens":
        block.gate.tid2eid = block.gate.tid2eid[:-1]
    else:
        block.gate.tid2eid[3, 1] = spec.num_experts
    with pytest.raises(ModelError, match="256 tokens have 3 of 12 experts each; load the model"):
        weights_of_block(block, spec)
