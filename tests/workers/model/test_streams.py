"""Several residual streams: a step's branches read and add the same values as in `transformers`."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4HyperHead

from csattn.cpu.team import Team
from csattn.models.module_weights import stream_weights
from csattn.models.spec import StreamsSpec
from csattn.models.streams import mixture_of
from tests.workers.model.step_ops import DEVICE, DTYPES, EPS, make_stream, randn, tolerance
from workers.model.cpu.tape_ops import TapeOps
from workers.model.ops import Readers, Stream, StreamsBuffers
from workers.model.torch_ops import TorchOps

NAN = torch.nan
# streams, iterations, rows and hidden_size
SIZES = [(1, 1, 1, 64), (2, 2, 3, 100), (3, 5, 2, 33), (4, 20, 2, 576), (5, 3, 3, 129), (4, 1, 1, 15), (3, 4, 9, 64)]
ON_CPU = pytest.mark.skipif(DEVICE.type == "cuda", reason="what these make is on the GPU if there is one")


def make_spec(num: int, iterations: int) -> StreamsSpec:
    return StreamsSpec(num=num, iterations=iterations, eps=1e-4)


def make_modules(spec: StreamsSpec, hidden_size: int, branches: int, eps: float = EPS) -> list[Any]:
    """Make `transformers` modules for the branches and the final join, which weight the streams far from equally."""
    config: Any = SimpleNamespace(
        hc_mult=spec.num,
        hc_sinkhorn_iters=spec.iterations,
        hc_eps=spec.eps,
        hidden_size=hidden_size,
        rms_norm_eps=eps,
    )
    modules = [*(DeepseekV4HyperConnection(config) for _ in range(branches)), DeepseekV4HyperHead(config)]
    for module in modules:
        for parameter in module.to(DEVICE).requires_grad_(False).parameters():
            parameter.copy_(
                randn(*parameter.shape, scale=2 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1)
            )
    return modules


def make_streams_buffers(
    spec: StreamsSpec, rows: int, hidden_size: int, dtype: torch.dtype
) -> tuple[StreamsBuffers, Stream]:
    """Make buffers that are NaN until they are written, except the hidden state that a step begins with."""
    sizes = (spec.num,), (spec.num, spec.num), (spec.num_mixes,)
    streams = torch.full((rows, spec.num, hidden_size), NAN, dtype=dtype, device=DEVICE)
    others = [torch.full((rows, *size), NAN, device=DEVICE) for size in sizes]
    return StreamsBuffers(streams, *others), make_stream(rows, hidden_size, dtype)


def read_in_transformers(spec: StreamsSpec, modules: list[Any], row: Tensor, given: Tensor) -> list[Tensor]:
    """Return what each branch and then the final norm read in a step that begins with row, each [rows, hidden_size].

    given: what each branch adds, [branches, rows, hidden_size].
    """
    *mixing, joining = modules
    streams = row.float()[:, None, None].repeat(1, 1, spec.num, 1)
    read = []
    for module, added in zip(mixing, given.float(), strict=True):
        post, comb, collapsed = module(streams)
        read.append(collapsed[:, 0])
        streams = post[..., None] * added[:, None, None] + comb.transpose(-1, -2) @ streams
    return [*read, joining(streams)[:, 0]]


def read_in_step(
    ops: Any,
    finish: Callable[[], None],  # runs what is enqueued
    spec: StreamsSpec,
    modules: list[Any],
    row: Tensor,
    given: Tensor,
    norms: list[Tensor | None],  # of each branch, then the final one
) -> list[Tensor]:
    """Return the same after norms, computed by a step's operations, and then the joined stream."""
    buffers, stream = make_streams_buffers(spec, *row.shape, row.dtype)
    stream.hidden.copy_(row)
    read = []
    for number, (module, norm) in enumerate(zip(modules, norms, strict=True)):
        joins = number == len(given)
        weights = stream_weights(module, "hc_" if joins else "")
        ops.remix(weights, spec, number == 0, buffers, stream, Readers(norm))
        finish()
        assert stream.scaled_ahead.isnan().all()
        is_normed = norm is None or isinstance(ops, TapeOps)
        scale = 1.0 if is_normed else torch.rsqrt(stream.squares.sum(0) / row.shape[1] + EPS)[:, None]
        read.append(stream.scaled.float() * scale)
        if not joins:
            assert not stream.hidden.any(), "what branches add to it is all that is in it then"
            stream.hidden.copy_(given[number])
    return [*read, stream.hidden.float()]


def compare(ops: Any, finish: Callable[[], None], sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Compare a step of three branches. Of several rows, one begins as NaN, and another gets NaN from a branch."""
    num, iterations, rows, hidden_size = sizes
    spec = make_spec(num, iterations)
    modules = make_modules(spec, hidden_size, 3)
    row, given = randn(rows, hidden_size, dtype=dtype), randn(3, rows, hidden_size, dtype=dtype)
    if rows > 1:
        row[rows // 2], given[1, 0] = NAN, NAN
    norms = [None, *(1 + randn(3, hidden_size, scale=0.3))]
    got = read_in_step(ops, finish, spec, modules, row, given, norms)
    want = read_in_transformers(spec, modules, row, given)
    for number, (norm, own) in enumerate(zip([*norms, None], [*want, want[-1]], strict=True)):
        if norm is not None:
            own = own * torch.rsqrt(own.square().mean(-1, keepdim=True) + EPS) * norm
        close = tolerance(dtype)  # streams are rounded after each branch
        torch.testing.assert_close(got[number], own, equal_nan=True, rtol=close["rtol"], atol=3 * close["atol"])
        assert own.isfinite().all(1).sum() == rows - (rows > 1) * (1 + (number > 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_torch_ops_mix_streams_as_transformers_does(sizes, dtype) -> None:
    compare(TorchOps(EPS), lambda: None, sizes, dtype)


def test_mixing_weights_of_these_tests_are_far_from_equal() -> None:
    """Otherwise a matrix and its transpose would be nearly equal. Rows and columns of comb sum to 1."""
    spec = make_spec(4, 50)
    mixture = mixture_of(randn(7, 4, 100), stream_weights(make_modules(spec, 100, 1)[0]), spec, EPS)
    assert mixture.comb.std() > 0.15 and (mixture.comb - mixture.comb.transpose(1, 2)).abs().mean() > 0.1
    for dim in (1, 2):
        torch.testing.assert_close(mixture.comb.sum(dim), torch.ones(7, 4, device=DEVICE), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [*SIZES, (3, 2, 2, 700), (7, 2, 2, 33)])
def test_triton_ops_mix_streams_as_transformers_does(sizes, dtype) -> None:
    """Triton's interpreter runs these kernels where there is no GPU."""
    triton_ops = pytest.importorskip("workers.model.gpu.triton_ops", reason="Triton is not installed")
    compare(triton_ops.TritonOps(DEVICE, EPS), lambda: None, sizes, dtype)


@ON_CPU
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", SIZES)
def test_tape_ops_mix_streams_as_transformers_does(sizes, kind) -> None:
    """kind: the dtype of the model's weights; those that mix streams are always float32."""
    ops = TapeOps(kind, np.array([sizes[2]]), EPS, 2)
    with Team(2) as team:

        def run() -> None:
            tape = ops.cut()
            tape.set_rows(sizes[2])
            team.run(tape.tape)

        compare(ops, run, sizes, torch.float32)


@ON_CPU
def test_tapes_mix_a_rows_streams_to_the_same_bits_in_any_batch() -> None:
    spec, num_rows = make_spec(3, 4), np.array([5])
    modules, row, given = make_modules(spec, 70, 2), randn(5, 70), randn(2, 5, 70)
    row[1] = NAN
    ops = TapeOps("float32", num_rows, EPS, 2)
    with Team(2) as team:

        def run() -> None:
            tape = ops.cut()
            tape.set_rows(num_rows[0])
            team.run(tape.tape)

        together = read_in_step(ops, run, spec, modules, row, given, 3 * [None])
        num_rows[0] = 1
        for at in (0, 2, 3, 4):
            alone = read_in_step(ops, run, spec, modules, row[at : at + 1], given[:, at : at + 1], 3 * [None])
            assert all(torch.equal(a[0], b[at]) for a, b in zip(alone, together, strict=True))
