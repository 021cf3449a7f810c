"""Experts with weights in 8 or 4 bits agree with decoding them first, on an emulated or a real GPU."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton, whose interpreter runs the other kernels on a CPU, is not installed")

from csattn.models.quantized_weight import QuantizedExperts, QuantizedWeight, WeightFormat
from csattn.models.weights import by_expert
from tests.cuda_on_cpu.emulated import crossed
from tests.workers.model.quantized import KINDS_OF_EXPERTS, choose, make_quantized, make_quantized_experts
from tests.workers.model.step_ops import (
    DEVICE,
    EPS,
    EXPERTS,
    copy_of,
    make_expert_buffers,
    make_stream,
    normed,
    prepared,
    randn,
    readers,
)
from tests.workers.model.test_quantized_products import CLOSE
from workers.model.gpu.triton_ops import TritonOps
from workers.model.ops import Normed
from workers.model.torch_ops import TorchOps

pytestmark = pytest.mark.usefixtures("two_multiprocessors")


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [*crossed([(kind,) for kind in KINDS_OF_EXPERTS], [(1, 128), (3, 260), (17, 70)]), (KINDS_OF_EXPERTS[0], (64, 33))],
)
def test_quantized_experts_equal_decoded_ones(
    kind: tuple[str, WeightFormat, int, bool], sizes: tuple[int, int]
) -> None:
    """Some rows share experts, more than one tile takes, and some experts are chosen by no row.

    The next test checks, for every kind, that a row's results do not depend on the others.
    """
    batch_size, hidden_size = sizes
    spec, dtype = EXPERTS[kind[0]], torch.bfloat16
    weights, stream = make_quantized_experts(spec, hidden_size, kind[1:]), prepared(batch_size, hidden_size, dtype)
    shares, logits = torch.rand(batch_size, spec.num_chosen, device=DEVICE), randn(batch_size, spec.num_experts)
    got = make_expert_buffers(spec, batch_size, hidden_size, dtype, logits)
    want = make_expert_buffers(spec, batch_size, hidden_size, torch.float32, logits)
    for buffers in (got, want):
        buffers.chosen.copy_(choose(spec, batch_size) if buffers is got else got.chosen)
        buffers.shares.copy_(shares)
    x = normed(stream) if batch_size != 3 else Normed(stream.scaled)
    TritonOps(DEVICE, EPS).experts(x, weights, spec, got)
    TorchOps(EPS).experts(replace(x, x=x.x.float()), weights, spec, want)
    torch.testing.assert_close(got.gated.float(), want.gated, rtol=8e-3, atol=1e-3)
    got_stream = make_stream(batch_size, hidden_size, dtype)
    want_stream, read = copy_of(got_stream), readers("both", hidden_size)
    before = got_stream.hidden.float()
    want.gated.copy_(got.gated)
    TritonOps(DEVICE, EPS).experts_add(weights, spec, got, 0.5, got_stream, read)
    TorchOps(EPS).experts_add(weights, spec, want, 0.5, want_stream, read)
    torch.testing.assert_close(got.parts.float(), want.parts, rtol=8e-3, atol=1e-3)
    added = before + 0.5 * got.parts.float().sum(1)
    torch.testing.assert_close(got_stream.hidden.float(), added, rtol=8e-3, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS_OF_EXPERTS, ids=lambda kind: f"{kind[0]}-{kind[1]}-{kind[2]}")
def test_a_rows_quantized_experts_have_the_same_bits_in_any_batch(kind: tuple[str, WeightFormat, int, bool]) -> None:
    """This includes which tiles a thread block computes before the row's own."""
    spec, hidden_size, batch_size = EXPERTS[kind[0]], 700, 12
    weights, x = (
        make_quantized_experts(spec, hidden_size, kind[1:]),
        randn(batch_size, hidden_size, dtype=torch.bfloat16),
    )
    chosen, shares = choose(spec, batch_size), torch.rand(batch_size, spec.num_chosen, device=DEVICE)
    results = []
    for parts in ([list(range(batch_size))], [[0], [1, 2], [3, 4, 5, 6, 7], list(range(8, batch_size))]):
        gated, added = [], []
        for rows in parts:
            buffers = make_expert_buffers(
                spec, len(rows), hidden_size, torch.bfloat16, randn(len(rows), spec.num_experts)
            )
            buffers.chosen.copy_(chosen[rows])
            buffers.shares.copy_(shares[rows])
            TritonOps(DEVICE, EPS).experts(Normed(x[rows]), weights, spec, buffers)
            stream = make_stream(len(rows), hidden_size, torch.bfloat16)
            TritonOps(DEVICE, EPS).experts_add(weights, spec, buffers, 1.0, stream, readers("both", hidden_size))
            gated.append(buffers.gated)
            added.append(buffers.parts)
        results.append([torch.cat(each) for each in (gated, added)])
    for together, alone in zip(*results, strict=True):
        assert torch.equal(together, alone) and not together.isnan().any()


@pytest.mark.parametrize("kind", [("fp4", 32, False), ("fp8", 0, False), ("int4", 32, True)], ids=str)
@pytest.mark.parametrize("batch_size", [2, 17])
def test_codes_beyond_a_shares_last_input_are_ignored(kind: tuple[WeightFormat, int, bool], batch_size: int) -> None:
    """A device's share of the inputs may end within a run."""
    spec = replace(EXPERTS["clamped"], intermediate_size=192)
    weights = make_quantized_experts(spec, 70, kind)
    assert weights.quantized is not None
    down = make_quantized(spec.num_experts * 70, 320, *kind).inputs(slice(0, 192))
    gates, ups, downs = by_expert(weights.quantized.gate_up.words, down.words, spec.num_experts, spec.gated)
    kept = QuantizedExperts(weights.quantized.gate_up, down)
    weights = replace(weights, gates=gates, ups=ups, down=downs, quantized=kept)
    buffers = make_expert_buffers(spec, batch_size, 70, torch.bfloat16, randn(batch_size, spec.num_experts))
    buffers.chosen.copy_(choose(spec, batch_size))
    buffers.shares.copy_(torch.rand(batch_size, spec.num_chosen, device=DEVICE))
    buffers.gated.copy_(randn(*buffers.gated.shape))
    want = replace(buffers, gated=buffers.gated.float(), parts=buffers.parts.float())
    out = torch.empty(batch_size, 70, device=DEVICE)
    TritonOps(DEVICE, EPS).experts_out(weights, spec, buffers, out)
    TorchOps(EPS).experts_out(weights, spec, want, out)
    torch.testing.assert_close(buffers.parts.float(), want.parts, rtol=8e-3, atol=1e-3)


def test_scales_of_experts_that_are_not_chosen_are_not_read() -> None:
    """The scales of all experts that are not chosen are NaN, and so is what lies before and after x in memory."""
    spec = EXPERTS["plain"]
    weights = make_quantized_experts(spec, 200, ("fp8", 64, False))
    assert weights.quantized is not None
    chosen = torch.tensor([[1, 3]], dtype=torch.int32, device=DEVICE)

    def poisoned(matrix: QuantizedWeight) -> QuantizedWeight:
        scales = torch.full_like(matrix.scales, torch.nan).view(len(matrix.scales), spec.num_experts, -1)
        scales[:, [1, 3]] = matrix.scales.view(scales.shape)[:, [1, 3]]
        return replace(matrix, scales=scales.view(matrix.scales.shape))

    kept = weights.quantized
    poison = replace(weights, quantized=QuantizedExperts(poisoned(kept.gate_up), poisoned(kept.down)))
    got, want = (make_expert_buffers(spec, 1, 200, torch.bfloat16, randn(1, spec.num_experts)) for _ in range(2))
    buffer = torch.full((600,), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    x = buffer[200:400].view(1, 200)
    x.copy_(randn(1, 200))
    for buffers, of in ((got, poison), (want, weights)):
        buffers.chosen.copy_(chosen)
        buffers.shares.fill_(0.5)
        TritonOps(DEVICE, EPS).experts(Normed(x), of, spec, buffers)
        stream = make_stream(1, 200, torch.bfloat16)
        TritonOps(DEVICE, EPS).experts_add(of, spec, buffers, 1.0, stream, readers("both", 200))
    assert not got.parts.isnan().any()
    torch.testing.assert_close(got.parts, want.parts, **CLOSE)
