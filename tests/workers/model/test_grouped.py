"""Products of groups, each with its own part of the matrix: tapes read the quantized weights only."""

import numpy as np
import pytest
import torch

from csattn.cpu.team import Team
from csattn.models.quantized_weight import WeightFormat
from csattn.models.weights import Linear
from tests.workers.model.quantized import KINDS, make_quantized
from tests.workers.model.step_ops import EPS
from workers.model.cpu.tape_ops import TapeOps
from workers.model.torch_ops import TorchOps

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="what these make is on the GPU if there is one")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}-{kind[2]}")
@pytest.mark.parametrize(
    ("num_rows", "num_groups", "num_out", "num_in"), [(1, 1, 1, 128), (3, 2, 24, 256), (7, 3, 37, 260)]
)
def test_grouped_products_of_quantized_weights_equal_those_of_decoded_ones(
    kind: tuple[WeightFormat, int, bool], num_rows: int, num_groups: int, num_out: int, num_in: int
) -> None:
    quantized = make_quantized(num_groups * num_out, num_in, *kind)
    x, decoded = torch.randn(num_groups, num_rows, num_in), quantized.decoded(torch.float32)
    got, want = (torch.full((num_rows, num_groups * num_out), torch.nan) for _ in range(2))
    ops = TapeOps("float32", np.array([num_rows]), EPS)
    ops.grouped(x, Linear(torch.full_like(decoded, torch.nan), quantized=quantized), got)
    tape = ops.cut()
    tape.set_rows(num_rows)
    with Team(2) as team:
        team.run(tape.tape)
    TorchOps(EPS).grouped(x, Linear(decoded), want)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
