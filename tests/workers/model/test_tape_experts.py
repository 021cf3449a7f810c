"""Quantized experts on tapes give the same bits as experts decoded to float32; no others are read."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from csattn.cpu.team import Team
from csattn.models.quantized_weight import QuantizedExperts, QuantizedWeight, WeightFormat
from csattn.models.spec import ExpertsSpec
from csattn.models.weights import ExpertWeights, by_expert
from tests.workers.model.quantized import KINDS, choose, make_quantized_experts
from tests.workers.model.step_ops import EPS, EXPERTS, make_expert_buffers
from tests.workers.model.test_linear import poisoned
from workers.model.cpu.tape_ops import TapeOps
from workers.model.ops import ExpertBuffers, Normed
from workers.model.torch_ops import TorchOps

NAN = float("nan")
FORMATS = [*KINDS, ("fp4", 32, False)]
SIZES = [(1, 128), (2, 256), (3, 260), (5, 33), (1, 336), (17, 70)]  # rows, hidden_size

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="what these make is on the GPU if there is one")


def decoded(weights: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
    """Return the same weights decoded, without their quantized form."""
    assert weights.quantized is not None
    matrices = weights.quantized.gate_up.decoded(dtype), weights.quantized.down.decoded(dtype)
    gates, ups, down = by_expert(*matrices, len(weights.gates), weights.ups is not None)
    return replace(weights, gates=gates, ups=ups, down=down, quantized=None)


def run(
    weights: ExpertWeights,
    spec: ExpertsSpec,
    x: torch.Tensor,
    buffers: ExpertBuffers,
    kind: str,
    num_threads: int = 1,
    before: torch.Tensor | None = None,  # the output is added to it
) -> torch.Tensor:
    """Return the experts' output; buffers receive the intermediate results."""
    out, ops = torch.full_like(x, NAN) if before is None else before.clone(), TapeOps(kind, np.array([len(x)]), EPS)
    ops.experts(Normed(x), weights, spec, buffers)
    ops.experts_out(weights, spec, buffers, out, adds=before is not None)
    tape = ops.cut()
    tape.set_rows(len(x))
    with Team(num_threads) as team:
        team.run(tape.tape)
    return out


def all_buffers(spec: ExpertsSpec, chosen: torch.Tensor, hidden_size: int, number: int) -> list[ExpertBuffers]:
    shares, made = torch.rand(len(chosen), spec.num_chosen), []
    for _ in range(number):
        logits = torch.zeros(len(chosen), spec.num_experts)
        made.append(make_expert_buffers(spec, len(chosen), hidden_size, torch.float32, logits))
        made[-1].chosen.copy_(chosen)
        made[-1].shares.copy_(shares)
    return made


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: f"{kind[0]}-{kind[1]}-{kind[2]}")
@pytest.mark.parametrize("name", EXPERTS)
def test_quantized_experts_give_the_bits_of_decoded_ones(name: str, kind: tuple[WeightFormat, int, bool]) -> None:
    spec = EXPERTS[name]
    for number, (num_rows, hidden_size) in enumerate(SIZES):
        of = replace(spec, intermediate_size=(spec.intermediate_size, 128, 208)[number % 3])
        weights = make_quantized_experts(of, hidden_size, kind, torch.float32)
        x, chosen = poisoned(num_rows, hidden_size), choose(of, num_rows)
        got, want, defined = all_buffers(of, chosen, hidden_size, 3)
        outs = (
            run(weights, of, x, got, "float32", 1 + num_rows % 3),
            run(decoded(weights, torch.float32), of, x, want, "float32"),
        )
        assert torch.equal(got.gated, want.gated) and torch.equal(*outs)
        out = torch.full_like(x, NAN)
        TorchOps(EPS).experts(Normed(x), decoded(weights, torch.float32), of, defined)
        TorchOps(EPS).experts_out(decoded(weights, torch.float32), of, defined, out)
        torch.testing.assert_close(outs[0], out, rtol=2e-5, atol=2e-5)


def test_experts_output_can_be_added_to_the_stream() -> None:
    spec = EXPERTS["clamped"]
    weights = decoded(make_quantized_experts(spec, 70, ("fp4", 32, False), torch.float32), torch.float32)
    x, before = poisoned(3, 70), torch.randn(3, 70)
    got, want, alone = all_buffers(spec, choose(spec, 3), 70, 3)
    out, defined = run(weights, spec, x, got, "float32", 2, before), before.clone()
    torch.testing.assert_close(out, before + run(weights, spec, x, alone, "float32"), rtol=2e-5, atol=2e-5)
    TorchOps(EPS).experts(Normed(x), weights, spec, want)
    TorchOps(EPS).experts_out(weights, spec, want, defined, adds=True)
    torch.testing.assert_close(out, defined, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_expert_biases_have_the_models_dtype_but_weights_decode_to_float32(dtype: torch.dtype) -> None:
    """Decoded weights are not rounded to that dtype."""
    spec, kind = EXPERTS["clamped"], str(dtype).removeprefix("torch.")
    weights = make_quantized_experts(spec, 96, ("fp4", 32, False), dtype)
    wide = {name: getattr(weights, name).float() for name in ("gate_bias", "up_bias", "down_bias")}
    got, want = all_buffers(spec, choose(spec, 3), 96, 2)
    x = torch.randn(3, 96)
    out = run(weights, spec, x, got, kind)
    assert torch.equal(out, run(replace(decoded(weights, torch.float32), **wide), spec, x, want, "float32"))


@pytest.mark.parametrize("kind", [("int4", 32, True), ("fp8", 0, False), ("fp4", 32, False)], ids=lambda kind: kind[0])
def test_a_rows_experts_output_has_the_same_bits_in_any_batch(kind: tuple[WeightFormat, int, bool]) -> None:
    spec = EXPERTS["plain"]
    weights, x = make_quantized_experts(spec, 176, kind, torch.float32), torch.randn(9, 176)
    chosen = choose(spec, 9)
    [together] = all_buffers(spec, chosen, 176, 1)
    out = run(weights, spec, x, together, "float32", 3)
    for row in range(9):
        [alone] = all_buffers(spec, chosen[row : row + 1], 176, 1)
        alone.shares.copy_(together.shares[row : row + 1])
        assert torch.equal(run(weights, spec, x[row : row + 1], alone, "float32")[0], out[row])


@pytest.mark.parametrize("kind", [("int4", 128, True), ("fp8", 64, False)], ids=lambda kind: kind[0])
def test_scales_of_experts_that_are_not_chosen_are_not_read(kind: tuple[WeightFormat, int, bool]) -> None:
    """The scales of all experts that are not chosen are NaN."""
    spec = EXPERTS["plain"]
    weights = make_quantized_experts(spec, 200, kind, torch.float32)
    assert weights.quantized is not None

    def poisoned(matrix: QuantizedWeight) -> QuantizedWeight:
        scales = torch.full_like(matrix.scales, NAN).view(len(matrix.scales), spec.num_experts, -1)
        scales[:, [1, 3]] = matrix.scales.view(scales.shape)[:, [1, 3]]
        return replace(matrix, scales=scales.view(matrix.scales.shape))

    kept = weights.quantized
    poison = replace(weights, quantized=QuantizedExperts(poisoned(kept.gate_up), poisoned(kept.down)))
    got, want = all_buffers(spec, torch.tensor([[1, 3], [3, 1]]), 200, 2)
    x = torch.randn(2, 200)
    out = run(poison, spec, x, got, "float32")
    assert torch.equal(out, run(weights, spec, x, want, "float32")) and not out.isnan().any()


def test_the_smallest_and_largest_mxfp4_scales_decode_exactly() -> None:
    spec = EXPERTS["one"]
    weights = make_quantized_experts(spec, 64, ("fp4", 32, False), torch.float32)
    assert weights.quantized is not None
    for exponents in ([0, 1, 2], [128, 127, 126]):
        scales = torch.tensor(exponents, dtype=torch.uint8)[torch.arange(160) % 3].view(2, 80)
        kept = replace(weights.quantized, gate_up=replace(weights.quantized.gate_up, scales=scales))
        of, x = replace(weights, quantized=kept), torch.randn(1, 64) * 2.0 ** (120 if exponents[0] == 0 else -3)
        got, want = all_buffers(spec, torch.zeros(1, 1), 64, 2)
        run(of, spec, x, got, "float32")
        run(decoded(of, torch.float32), spec, x, want, "float32")
        assert torch.equal(got.gated, want.gated) and got.gated.count_nonzero() == 40
