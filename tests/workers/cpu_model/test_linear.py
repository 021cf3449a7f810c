"""Linear stages: agree with their definition, touch nothing else, and give a row the same bits beside any others."""

import numpy as np
import pytest
import torch

from csattn.cpu.tape import Tape
from csattn.cpu.team import Team
from workers.cpu_model import reference
from workers.cpu_model.linear_stage import ADD, GATE, LINEAR, SET, linear_pieces, linear_stage
from workers.cpu_model.model import word

DTYPES = ["float32", "bfloat16", "float16"]
NAN = float("nan")


def poisoned(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A random tensor between stretches of NaN."""
    size = int(np.prod(sizes))
    buffer = torch.full((size + 2000,), NAN).to(dtype)
    buffer[1000 : 1000 + size] = torch.randn(size).to(dtype)
    return buffer[1000 : 1000 + size].view(sizes)


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,  # [num_rows, num_out]; a view of something wider
    mode: int,
    bias: torch.Tensor | None = None,
    up_weight: torch.Tensor | None = None,
    num_threads: int = 1,
) -> None:
    num_out, num_in = weight.shape
    num_rows = np.array([len(x)])
    values = (num_rows, x, num_in, weight, num_out, out.data_ptr(), out.stride(0), bias, mode, up_weight)
    assert len(values) == len(LINEAR)
    tape = Tape()
    arguments = np.array([word(value) for value in values], np.int64)
    tape.add(linear_stage(str(weight.dtype).removeprefix("torch.")), arguments, linear_pieces(num_out))
    with Team(num_threads) as team:
        team.run(tape)


@pytest.mark.parametrize("mode", [SET, ADD, GATE])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_agrees_with_its_definition(dtype: str, mode: int) -> None:
    kind = getattr(torch, dtype)
    for num_rows, num_out, num_in in [(1, 1, 1), (1, 48, 32), (2, 17, 15), (3, 16, 33), (5, 31, 64), (33, 5, 100)]:
        weight, up_weight = (poisoned(num_out, num_in, dtype=kind) * num_in**-0.5 for _ in range(2))
        bias = poisoned(num_out, dtype=kind) if mode == SET and num_rows > 2 else None
        x, wide = poisoned(num_rows, num_in), torch.full((num_rows + 2, num_out + 7), NAN)
        out = wide[1:-1, 3 : 3 + num_out]
        out.copy_(torch.randn(num_rows, num_out))
        want = reference.linear(x, weight, out.clone(), mode, bias, up_weight)
        run(x, weight, out, mode, bias, up_weight if mode == GATE else None)
        torch.testing.assert_close(out, want, rtol=2e-5, atol=2e-5)
        assert wide.isnan().sum() == wide.numel() - out.numel()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("num_out", "num_in"), [(7, 5), (33, 100), (64, 576)])
def test_a_rows_bits_do_not_depend_on_what_is_beside_it(dtype: str, num_out: int, num_in: int) -> None:
    weight, x = torch.randn(num_out, num_in).to(getattr(torch, dtype)), torch.randn(33, num_in)
    alone = torch.full((33, num_out), NAN)
    for row in range(33):
        run(x[row : row + 1], weight, alone[row : row + 1], SET)
    for num_rows in range(2, 34):
        out = torch.full((num_rows, num_out), NAN)
        run(x[33 - num_rows :].contiguous(), weight, out, SET, num_threads=1 + num_rows % 3)
        assert torch.equal(out, alone[33 - num_rows :])
