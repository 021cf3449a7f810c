"""Products with weights in 8 or 4 bits agree with decoding them first, on an emulated or a real GPU.

CUDA C computes them for few rows, Triton for more. Triton's interpreter multiplies in float32.
"""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton, whose interpreter runs these kernels on a CPU, is not installed")

from csattn.models.quantized_weight import CODES, RUN, QuantizedWeight, WeightFormat
from csattn.models.weights import Linear
from tests.cuda_on_cpu.emulated import crossed
from tests.workers.model.quantized import KINDS, make_quantized
from tests.workers.model.step_ops import (
    DEVICE,
    EPS,
    READERS,
    assert_same_stream,
    copy_of,
    make_stream,
    normed,
    prepared,
    randn,
    readers,
    tolerance,
)
from workers.model.gpu.triton_ops import TritonOps
from workers.model.ops import QUANTIZED_ROWS, Normed
from workers.model.torch_ops import TorchOps

pytestmark = pytest.mark.usefixtures("two_multiprocessors")

NAN = float("nan")
CLOSE = {"rtol": 1e-4, "atol": 1e-4}  # for few rows: zero points are subtracted from sums of 128 + code


PACKED = [*KINDS, ("fp4", 32, False)]  # fp4 is for experts only


def make_linear(num_out: int, num_in: int, kind: tuple[WeightFormat, int, bool], bias: bool = False) -> Linear:
    quantized = make_quantized(num_out, num_in, *kind)
    return Linear(quantized.words, randn(num_out, dtype=torch.bfloat16) if bias else None, quantized)


@pytest.mark.parametrize("kind", PACKED)
def test_a_packed_weight_decodes_to_codes_times_scales(kind) -> None:
    format, group_size, zeros = kind
    codes = torch.randint(0, 256 if format == "fp8" else 16, (3, 300), dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    groups = -(-300 // (group_size or 300))
    scales = (torch.rand(3, groups).half() + 0.1).float()  # as published: float16's precision
    if format == "fp4":
        scales = torch.randint(100, 150, (3, groups), dtype=torch.uint8)
    zero_of = torch.randint(0, 16, (3, groups)) if zeros else torch.full((3, groups), 8)
    weight = QuantizedWeight.pack(format, codes, scales, group_size, zero_of if zeros else None)
    got = weight.decoded(torch.float32)
    for row in range(3):
        for i in range(300):
            code, group = int(codes[row, i]), i // (group_size or 300)
            if format == "fp8":
                want = float(torch.tensor([code], dtype=torch.uint8).view(torch.float8_e4m3fn).float())
            elif format == "fp4":
                want = (0, 0.5, 1, 1.5, 2, 3, 4, 6)[code & 7] * (-1) ** (code >> 3)
            else:
                want = code - int(zero_of[row, group])
            scale = 2.0 ** (int(scales[row, group]) - 127) if format == "fp4" else float(scales[row, group])
            assert float(got[row, i]) == want * scale
    assert len(weight) == 3 and weight.words.shape == (3, 384 // CODES[format])
    assert torch.equal(weight.outputs(slice(1, 3)).decoded(torch.float32), got[1:])


@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("num_rows", [1, QUANTIZED_ROWS + 1])
def test_grouped_products_equal_those_of_decoded_weights(kind, num_rows: int) -> None:
    dtype = torch.bfloat16 if kind is not None and num_rows <= QUANTIZED_ROWS else torch.float32
    linear = make_linear(64, 128, kind) if kind is not None else Linear(randn(64, 128))
    x = randn(2, num_rows, 128, dtype=dtype)
    got, want = (torch.full((num_rows, 64), torch.nan, dtype=dtype, device=DEVICE) for _ in range(2))
    TritonOps(DEVICE, EPS).grouped(x, linear, got)
    TorchOps(EPS).grouped(x, Linear(linear.plain(dtype)), want)
    torch.testing.assert_close(got, want, **tolerance(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_in", [127, 128, 129, 192, 300])
@pytest.mark.parametrize("kind", PACKED)
def test_a_decoded_weight_is_contiguous(kind, num_in: int, dtype: torch.dtype) -> None:
    weight = make_quantized(3, num_in, *kind)
    for of in weight, replace(weight, order=torch.randperm(num_in, device=DEVICE)):
        decoded = of.decoded(dtype)
        assert decoded.shape == (3, num_in) and decoded.is_contiguous()


def dtype_of(num_rows: int) -> torch.dtype:
    return torch.bfloat16 if num_rows <= QUANTIZED_ROWS or DEVICE.type == "cuda" else torch.float32


SIZES = [
    (1, 128, 64),
    (2, 77, 33),
    (3, 300, 65),
    (5, 576, 200),
    (8, 1024, 31),
    (9, 1208, 32),
    (16, 129, 7),
    (17, 1500, 100),
    (32, 256, 16),
    (33, 64, 1),
    (64, 200, 40),
]


def test_quantized_products_are_right_on_a_small_gpu(as_ampere: None) -> None:
    compare_with_decoding_first(("int4", 32, True), [(8, 1024, 31)])


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_linear_equals_linear_with_decoded_weights(kind) -> None:
    """On the CPU, where compiling takes longest, each size is tested with one fp8 and two int4 kinds only."""
    compare_with_decoding_first(kind, SIZES if DEVICE.type == "cuda" else SIZES[KINDS.index(kind) % 3 :: 3])


def compare_with_decoding_first(kind, sizes: list[tuple[int, int, int]]) -> None:
    for batch_size, num_in, num_out in sizes:
        linear = make_linear(num_out, num_in, kind, bias=batch_size == 3)
        stream = prepared(batch_size, num_in, dtype_of(batch_size))
        x = normed(stream) if batch_size % 2 else Normed(stream.scaled)
        got = torch.full((batch_size, num_out), NAN, device=DEVICE)
        want = got.clone()
        TritonOps(DEVICE, EPS).linear(x, [linear], got)
        TorchOps(EPS).linear(replace(x, x=x.x.float()), [linear], want)
        torch.testing.assert_close(got, want, **(CLOSE if batch_size <= QUANTIZED_ROWS else tolerance(torch.float32)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_quantized_product_has_the_same_bits_in_any_batch(kind) -> None:
    linear, x = make_linear(70, 700, kind), randn(8, 700, dtype=torch.bfloat16)
    alone, together = torch.full((2, 8, 70), NAN, dtype=torch.bfloat16, device=DEVICE)
    for rows in ([0], [1, 2], [3, 4, 5, 6, 7]):
        got = torch.full((len(rows), 70), NAN, dtype=torch.bfloat16, device=DEVICE)
        TritonOps(DEVICE, EPS).linear(Normed(x[rows]), [linear], got)
        alone[rows] = got
    TritonOps(DEVICE, EPS).linear(Normed(x), [linear], together)
    assert torch.equal(alone, together) and not alone.isnan().any()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind[1] < RUN])
@pytest.mark.parametrize("batch_size", [2, 17])
def test_codes_beyond_a_shares_last_input_are_ignored(kind, batch_size: int) -> None:
    """A device's share of the inputs may end within a run."""
    share = make_quantized(40, 320, *kind).inputs(slice(0, 192))
    x, of = randn(batch_size, 192, dtype=dtype_of(batch_size)), Linear(share.words, None, share)
    got = torch.full((batch_size, 40), NAN, device=DEVICE)
    TritonOps(DEVICE, EPS).linear(Normed(x), [of], got)
    want = x.float() @ share.decoded(torch.float32).T
    torch.testing.assert_close(got, want, **(CLOSE if batch_size <= QUANTIZED_ROWS else tolerance(torch.float32)))


@pytest.mark.parametrize("kind", KINDS)
def test_memory_around_x_and_scales_of_other_outputs_is_not_read(kind) -> None:
    """NaNs surround x in memory, and the scales of other outputs are NaN."""
    whole = make_quantized(70, 200, *kind)
    poison = torch.full_like(whole.scales, NAN)
    poison[:, 3:43] = whole.scales[:, 3:43]
    linear = Linear(whole.words, None, whole).outputs(3, 43)
    poisoned = QuantizedWeight(whole.format, whole.words, poison, 200, whole.group_size, whole.has_zeros).outputs(
        slice(3, 43)
    )
    buffer = torch.full((6 * 200 + 500,), NAN, dtype=torch.bfloat16, device=DEVICE)
    x = buffer[200:800].view(3, 200)
    x.copy_(randn(3, 200))
    got, want = torch.full((2, 3, 40), NAN, device=DEVICE)
    TritonOps(DEVICE, EPS).linear(Normed(x), [Linear(linear.weight, None, poisoned)], got)
    TorchOps(EPS).linear(Normed(x.float()), [linear], want)
    torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize(
    ("batch_size", "num_in", "hidden_size", "kind"),
    crossed([(1, 512, 64), (3, 1500, 100), (8, 300, 576), (18, 300, 100)], [KINDS[1], KINDS[4], KINDS[5]]),
)
def test_quantized_mlp_and_linear_add_equal_those_with_decoded_weights(batch_size, num_in, hidden_size, kind) -> None:
    dtype = dtype_of(batch_size)
    stream = prepared(batch_size, hidden_size, dtype)
    gate_up, down = make_linear(2 * num_in, hidden_size, kind), make_linear(hidden_size, num_in, kind, bias=True)
    gated, want_gated = torch.full((2, batch_size, num_in), NAN, device=DEVICE)
    x = normed(stream)
    activations = ["silu", "gelu_tanh", "quick_gelu", "relu", "relu2"]  # activations do not depend on the kind
    for activation in activations if kind == KINDS[1] else activations[:1]:
        TritonOps(DEVICE, EPS).linear(x, [gate_up], gated, activation, True)
        TorchOps(EPS).linear(replace(x, x=x.x.float()), [gate_up], want_gated, activation, True)
        torch.testing.assert_close(
            gated, want_gated, **(CLOSE if batch_size <= QUANTIZED_ROWS else tolerance(torch.float32))
        )
    for kind_of_readers in READERS:
        got, read = make_stream(batch_size, hidden_size, dtype), readers(kind_of_readers, hidden_size)
        want = copy_of(got)
        TritonOps(DEVICE, EPS).linear_add(gated.to(dtype), down, 0.7, got, read)
        TorchOps(EPS).linear_add(gated.to(dtype).float(), down, 0.7, want, read)
        assert_same_stream(got, want, kind_of_readers == "both")


def test_inputs_reordered_by_group_are_multiplied_in_their_order() -> None:
    """Checkpoints with `desc_act` order inputs by group."""
    plain, order = make_quantized(40, 256, "int4", 64, True), torch.randperm(256, device=DEVICE)
    mixed = replace(plain, order=order)
    assert torch.equal(mixed.decoded(torch.float32)[:, order], plain.decoded(torch.float32))
    x = randn(3, 256, dtype=torch.bfloat16)
    got, want = torch.full((2, 3, 40), NAN, device=DEVICE)
    TritonOps(DEVICE, EPS).linear(Normed(x), [Linear(mixed.words, None, mixed)], got)
    TorchOps(EPS).linear(Normed(x[:, order].float()), [Linear(plain.words, None, plain)], want)
    torch.testing.assert_close(got, want, **CLOSE)
    stream, read = make_stream(3, 40, torch.bfloat16), readers("both", 40)
    same = copy_of(stream)
    TritonOps(DEVICE, EPS).linear_add(x, Linear(mixed.words, None, mixed), 1.0, stream, read)
    TorchOps(EPS).linear_add(x, Linear(mixed.words, None, mixed), 1.0, same, read)
    assert_same_stream(stream, same, True)
