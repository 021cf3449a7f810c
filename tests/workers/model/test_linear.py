"""Linear stages agree with their definition, touch nothing else, and give a row the same bits in any batch."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from csattn.cpu.addresses import KindStage
from csattn.cpu.arguments import words_of
from csattn.cpu.tape import Tape
from csattn.cpu.team import Team
from csattn.models.quantized_weight import ROUNDINGS, QuantizedWeight, WeightFormat
from csattn.models.spec import Activation
from csattn.models.weights import Linear
from tests.workers.model.quantized import KINDS, make_quantized
from workers.model.cpu.linear_stage import ACTIVATIONS, LINEAR, linear_stage, num_groups
from workers.model.cpu.quantized_products import FLOATS
from workers.model.cpu.stage_recorder import weights_of_product
from workers.model.torch_ops import activated

DTYPES = ["float32", "bfloat16", "float16"]
NAN = float("nan")
Weight = torch.Tensor | QuantizedWeight


def poisoned(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Make a random tensor that lies between NaNs."""
    size = int(np.prod(sizes))
    buffer = torch.full((size + 2000,), NAN).to(dtype)
    buffer[1000 : 1000 + size] = torch.randn(size).to(dtype)
    return buffer[1000 : 1000 + size].view(sizes)


def run(
    x: torch.Tensor,
    weight: Weight,
    out: torch.Tensor,  # [num_rows, num_out], a view of a wider tensor
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    up_weight: Weight | None = None,
    up_bias: torch.Tensor | None = None,
    multiplier: float | None = None,
    num_threads: int = 1,
) -> None:
    num_rows, times = np.array([len(x)]), None if multiplier is None else np.array([multiplier])
    weights, scales, format, group_size = weights_of_product(
        [as_linear(part) for part in (weight, up_weight) if part is not None]
    )
    (weight_at, *up_at), (scales_at, *up_scales_at) = weights, scales
    assert (format != FLOATS) == isinstance(weight, QuantizedWeight)
    product = num_rows, x, x.shape[1], format, group_size, weight_at, scales_at, bias
    gated = ACTIVATIONS.index(activation), *(up_at or [None]), *(up_scales_at or [None]), up_bias
    groups = 1 + len(x) % 3
    values = *product, *gated, len(weight), groups, out.data_ptr(), out.stride(0), times
    tape = Tape()
    arguments = words_of(LINEAR, dict(zip(LINEAR, values, strict=True)))
    kind = "float32" if isinstance(weight, QuantizedWeight) else str(weight.dtype).removeprefix("torch.")
    tape.add(KindStage(linear_stage, kind), arguments, -(-num_groups(len(weight)) // groups))
    with Team(num_threads) as team:
        team.run(tape)


def as_linear(weight: Weight) -> Linear:
    if isinstance(weight, torch.Tensor):
        return Linear(weight)
    nothing = torch.full((len(weight), weight.num_in), NAN)  # decoded weights are not read
    return Linear(nothing, None, weight)


def definition(
    x: torch.Tensor,  # [num_rows, num_in] float32
    weight: Weight,  # [num_out, num_in]
    out: torch.Tensor,  # [num_rows, num_out] float32: its previous contents
    bias: torch.Tensor | None = None,  # [num_out]
    activation: Activation | None = None,
    up_weight: Weight | None = None,  # [num_out, num_in]
    up_bias: torch.Tensor | None = None,  # [num_out]
    multiplier: float | None = None,
) -> torch.Tensor:
    """Return what is to be written to `out`, computed in float64."""
    product = _product(x, weight, bias)
    up = torch.ones_like(product) if up_weight is None else _product(x, up_weight, up_bias)
    product = product * up if activation is None else activated(activation, product, up)
    return (product if multiplier is None else out.double() + multiplier * product).float()


def _product(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    weight = weight.decoded(torch.float32) if isinstance(weight, QuantizedWeight) else weight
    return torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())


SIZES = [(1, 1, 1), (1, 48, 32), (2, 17, 15), (3, 16, 33), (5, 31, 64), (33, 5, 100)]


@pytest.mark.parametrize("multiplier", [None, 1.0, 0.22])
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_stage_equals_its_definition(dtype: str, multiplier: float | None) -> None:
    for num_rows, num_out, num_in in SIZES:
        weight = poisoned(num_out, num_in, dtype=getattr(torch, dtype)) * num_in**-0.5
        bias = poisoned(num_out, dtype=weight.dtype) if num_rows > 2 else None
        check(weight, poisoned(num_rows, num_in), bias=bias, multiplier=multiplier)


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
@pytest.mark.parametrize("gated", [False, True])
def test_activations_of_the_linear_stage_equal_their_definitions(activation: str, gated: bool) -> None:
    for num_rows, num_out, num_in in SIZES:
        weight, up_weight = (poisoned(num_out, num_in) * 3 * num_in**-0.5 for _ in range(2))
        bias, up_bias = (poisoned(num_out) if num_rows > 2 else None for _ in range(2))
        up = {"up_weight": up_weight, "up_bias": up_bias} if gated else {}
        check(weight, poisoned(num_rows, num_in), bias=bias, activation=activation, **up)


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_activations_of_extreme_inputs_and_nan_equal_their_definitions(activation: str) -> None:
    x = torch.tensor([-1e4, -200.0, -90.0, -1.0, 0.0, 90.0, 200.0, NAN])[:, None]
    weight, out = torch.ones(17, 1), torch.full((8, 17), NAN)
    want = definition(x, weight, out, activation=activation)
    run(x, weight, out, activation=activation)
    torch.testing.assert_close(out, want, rtol=2e-5, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("kind", [*KINDS, ("fp4", 32, False)], ids=lambda kind: f"{kind[0]}-{kind[1]}-{kind[2]}")
def test_products_with_quantized_weights_equal_those_with_decoded_ones(kind: tuple[WeightFormat, int, bool]) -> None:
    for num_rows, num_out, num_in in [
        (1, 1, 1),
        (1, 48, 300),
        (2, 17, 256),
        (3, 16, 129),
        (5, 31, 511),
        (1, 7, 384),
        (2, 18, 336),
        (1, 5, 16),
        (33, 5, 64),
        (4, 6, 256),
    ]:
        weight, up_weight = (make_quantized(num_out, num_in, *kind).to("cpu") for _ in range(2))
        bias, up_bias = (poisoned(num_out) if num_rows > 2 else None for _ in range(2))
        x, outs = poisoned(num_rows, num_in), [torch.full((num_rows, num_out), NAN) for _ in range(2)]
        run(x, weight, outs[0])
        run(x, weight.decoded(torch.float32), outs[1])
        assert torch.equal(*outs)
        check(weight, poisoned(num_rows, num_in), bias=bias, multiplier=0.22)
        more = {"activation": "silu", "up_weight": up_weight, "up_bias": up_bias}
        check(weight, poisoned(num_rows, num_in), bias=bias, **more)
        some = slice(num_out // 3, num_out)  # outputs of a matrix that has others before them
        check(weight.outputs(some), poisoned(num_rows, num_in))


def test_quantized_weights_that_products_do_not_support_are_read_decoded() -> None:
    """These are inputs in another order than their groups', and gates and ups in different formats."""
    plain, other = make_quantized(40, 256, "int4", 64, True), make_quantized(40, 256, "int4", 128, True)
    reordered = replace(plain, order=torch.randperm(256))
    for parts in ([plain, other], [plain, None], [reordered]):
        linears = [Linear(torch.ones(40, 256), None, part) for part in parts]
        weights, scales, format, _ = weights_of_product(linears)
        assert format == FLOATS
        assert all(weight is linear.weight for weight, linear in zip(weights, linears, strict=True))
        assert scales == [None for _ in parts]


def check(weight: Weight, x: torch.Tensor, **options: object) -> None:
    num_rows, num_out = len(x), len(weight)
    wide = torch.full((num_rows + 2, num_out + 7), NAN)
    out = wide[1:-1, 3 : 3 + num_out]
    out.copy_(torch.randn(num_rows, num_out))
    want = definition(x, weight, out.clone(), **options)
    run(x, weight, out, **options)
    torch.testing.assert_close(out, want, rtol=2e-5, atol=2e-5)
    assert wide.isnan().sum() == wide.numel() - out.numel()


@pytest.mark.parametrize("format", ["float32", "bfloat16", "int4", "fp8"])
@pytest.mark.parametrize(("num_out", "num_in"), [(7, 5), (33, 100), (64, 640)])
def test_a_rows_product_has_the_same_bits_in_any_batch(format: str, num_out: int, num_in: int) -> None:
    weight: Weight = torch.randn(num_out, num_in)
    weight = QuantizedWeight.rounded(weight, format) if format in ROUNDINGS else weight.to(getattr(torch, format))
    x = torch.randn(33, num_in)
    alone = torch.full((33, num_out), NAN)
    for row in range(33):
        run(x[row : row + 1], weight, alone[row : row + 1])
    for num_rows in range(2, 34):
        out = torch.full((num_rows, num_out), NAN)
        run(x[33 - num_rows :].contiguous(), weight, out, num_threads=1 + num_rows % 3)
        assert torch.equal(out, alone[33 - num_rows :])
