"""The Triton operations of a decode step agree with their definition in torch: in the interpreter, or on the GPU."""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest
import torch

pytest.importorskip("triton", reason="Triton, whose interpreter runs these kernels on a CPU, is not installed")

from csattn.batch import make_step_rows
from csattn.models.query import Rotation
from csattn.models.spec import Temper
from csattn.models.weights import Frequencies, HeadNorms, InputWeights
from tests.cuda_on_cpu.emulated import Emulator, crossed
from tests.workers.model.step_ops import (
    DEVICE,
    DTYPES,
    EPS,
    READERS,
    assert_same_stream,
    copy_of,
    make_linear,
    make_rotation,
    make_rows,
    make_stream,
    normed,
    prepared,
    randn,
    readers,
    tolerance,
)
from workers.model.gpu.triton_ops import TritonOps
from workers.model.ops import Normed
from workers.model.torch_ops import ACTIVATIONS, TorchOps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("read_by", READERS)
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(("batch_size", "hidden_size"), [(1, 64), (3, 100), (2, 576)])
def test_triton_begin_equals_torch(batch_size, hidden_size, centred, read_by, dtype) -> None:
    embedding = randn(50, hidden_size, dtype=dtype)
    rows = make_step_rows(batch_size, DEVICE)
    rows.token_ids.copy_(torch.tensor([49, 0, 7][:batch_size]))
    got = replace(make_stream(batch_size, hidden_size, dtype), centred=centred)
    want = copy_of(got)
    read, multiplier = readers(read_by, hidden_size), 1.0 if read_by == "one" else 2.5
    TritonOps(DEVICE, EPS).begin(rows, embedding, multiplier, got, read)
    TorchOps(EPS).begin(rows, embedding, multiplier, want, read)
    exact = embedding[rows.token_ids].float() * multiplier
    assert centred or torch.equal(got.hidden, exact.to(dtype))
    torch.testing.assert_close(got.hidden.float(), exact - centred * exact.mean(1, keepdim=True), **tolerance(dtype))
    assert_same_stream(got, want, read.ahead is not None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 64), (3, 100), (2, 1)])
def test_triton_norm_equals_torch(num_rows, width, dtype) -> None:
    x, norm = randn(num_rows, width, dtype=dtype), randn(width)
    got, want = (torch.full_like(x, torch.nan) for _ in range(2))
    TritonOps(DEVICE, EPS).norm(x, norm, got)
    TorchOps(EPS).norm(x, norm, want)
    torch.testing.assert_close(got, want, **tolerance(dtype))
    TritonOps(DEVICE, EPS).norm(x * 0.5 + 1, norm, got, adds=True)
    TorchOps(EPS).norm(x * 0.5 + 1, norm, want, adds=True)
    torch.testing.assert_close(got, want, **tolerance(dtype))


@pytest.mark.parametrize("temper", [None, Temper(beta=0.3, every=50, offset=1)])
@pytest.mark.parametrize(("batch_size", "half"), [(1, 8), (3, 12), (2, 32), (2, 0)])
def test_triton_compute_rotation_equals_torch(batch_size, half, temper) -> None:
    rows = make_step_rows(batch_size, DEVICE)
    rows.positions.copy_(torch.tensor([131_071, 49, 900][:batch_size]))
    frequencies = Frequencies((10_000.0 ** -torch.linspace(0, 1, half)).to(DEVICE), 1.25)
    got, want = make_rotation(batch_size, half), make_rotation(batch_size, half)
    if temper is None:
        for rotation in (got, want):
            rotation.q_scale.fill_(1)
    TritonOps(DEVICE, EPS).compute_rotation(rows, frequencies, temper, got)
    TorchOps(EPS).compute_rotation(rows, frequencies, temper, want)
    for field in ("cos", "sin", "q_scale"):
        torch.testing.assert_close(getattr(got, field), getattr(want, field), **tolerance(torch.float32))
    assert temper is None or got.q_scale[-1] > 1


@pytest.mark.parametrize("cap", [None, 7.0])
@pytest.mark.parametrize("vocab_size", [1, 4096, 9001])
def test_triton_finish_logits_equals_torch(vocab_size, cap) -> None:
    got = randn(3, vocab_size, scale=50)
    want = got.clone()
    TritonOps(DEVICE, EPS).finish_logits(got, 0.3, cap)
    TorchOps(EPS).finish_logits(want, 0.3, cap)
    torch.testing.assert_close(got, want, **tolerance(torch.float32))
    assert cap is None or got.abs().max() <= cap


@pytest.mark.parametrize("vocab_size", [5, 4096, 9001])
def test_triton_argmax_equals_torch_and_takes_the_first_of_equal_logits(vocab_size) -> None:
    logits = randn(5, vocab_size)
    logits[1, -1] = logits[2, 3] = logits[2, -1] = 9.0  # the largest is the last; of two equal ones the first counts
    logits[3] = -torch.inf
    got, want = torch.full((2, 5), -1, device=DEVICE)
    TritonOps(DEVICE, EPS).argmax(logits, got)
    TorchOps(EPS).argmax(logits, want)
    assert got.tolist()[:3] == want.tolist()[:3] and got[4] == want[4]
    assert got[1] == vocab_size - 1 and got[2] == 3 and got[3] == 0


@pytest.mark.parametrize("vocab_size", [5, 4096, 9001])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_argmax_of_logits_with_nan_or_inf_is_minus_one(vocab_size, bad) -> None:
    """A NaN or inf anywhere in a row makes its token -1; the other rows get their argmax."""
    logits = randn(5, vocab_size)
    logits[0] = bad
    logits[1, 0] = logits[2, -1] = logits[3, vocab_size // 2] = bad
    logits[4, 1] = -torch.inf
    for ops in (TritonOps(DEVICE, EPS), TorchOps(EPS)):
        token_ids = torch.full((5,), 7, device=DEVICE)
        ops.argmax(logits, token_ids)
        assert token_ids.tolist() == [-1, -1, -1, -1, int(logits[4].argmax())]


BOTH = list(product([False, True], [False, True]))


@pytest.mark.parametrize(
    ("with_bias", "with_norm", "dtype", "sizes"),
    crossed(
        [(*which, dtype) for dtype, those in zip(DTYPES, (BOTH, BOTH[::-1]), strict=True) for which in those],
        [(1, 64, 64), (3, 100, 65), (17, 576, 130), (2, 1024, 63)],
    ),
)
def test_triton_linear_equals_torch(with_bias, with_norm, dtype, sizes) -> None:
    batch_size, hidden_size, num_out = sizes
    stream = prepared(batch_size, hidden_size, dtype)
    linear, x = make_linear(num_out, hidden_size, dtype, with_bias), normed(stream)
    got = torch.full((batch_size, num_out), torch.nan, dtype=dtype, device=DEVICE)
    want = got.clone()
    x = x if with_norm else Normed(stream.scaled)
    TritonOps(DEVICE, EPS).linear(x, [linear], got)
    TorchOps(EPS).linear(x, [linear], want)
    torch.testing.assert_close(got, want, **tolerance(dtype))


def test_torch_linear_is_the_norm_followed_by_the_product() -> None:
    stream = prepared(3, 100, torch.float32)
    linear = make_linear(40, 100, torch.float32, bias=True)
    out, unnormed = randn(2, 3, 40)
    TorchOps(EPS).linear(normed(stream), [linear], out)
    TorchOps(EPS).linear(Normed(stream.hidden), [linear], unnormed)
    norm = stream.scaled[0] / stream.hidden[0]
    want = torch.nn.functional.rms_norm(stream.hidden, (100,), norm, EPS) @ linear.weight.T + linear.bias
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(unnormed, stream.hidden @ linear.weight.T + linear.bias, rtol=1e-4, atol=1e-4)


def test_several_linears_equal_one_with_all_their_outputs() -> None:
    stream, whole = prepared(3, 100, torch.float32), make_linear(70, 100, torch.float32, bias=True)
    together, separate = randn(2, 3, 70)
    TorchOps(EPS).linear(normed(stream), [whole], together)
    TorchOps(EPS).linear(normed(stream), [whole.outputs(0, 33), whole.outputs(33, 70)], separate)
    torch.testing.assert_close(separate, together, rtol=1e-5, atol=1e-5)


def test_logits_may_have_a_wider_dtype_than_the_model() -> None:
    stream = prepared(2, 128, DTYPES[1])
    head = make_linear(70, 128, DTYPES[1])
    got, want = randn(2, 70), randn(2, 70)
    TritonOps(DEVICE, EPS).linear(normed(stream), [head], got)
    TorchOps(EPS).linear(normed(stream), [head], want)
    torch.testing.assert_close(got, want, **tolerance(DTYPES[1]))


@pytest.mark.parametrize(
    ("activation", "gated", "dtype", "sizes"),
    crossed(
        [*product(ACTIVATIONS, [False, True], DTYPES), *product(["clamped", "limited"], [True], DTYPES)],
        [(1, 64, 32), (3, 100, 33), (2, 256, 96)],
    ),
)
def test_triton_mlp_equals_torch(activation, gated, dtype, sizes) -> None:
    batch_size, hidden_size, num_out = sizes
    stream = prepared(batch_size, hidden_size, dtype)
    scale = 2 if activation in ACTIVATIONS else 8  # exceeds their limits
    linear = make_linear((1 + gated) * num_out, hidden_size, dtype, bias=batch_size == 3, scale=scale)
    got = torch.full((batch_size, num_out), torch.nan, dtype=dtype, device=DEVICE)
    want = got.clone()
    TritonOps(DEVICE, EPS).linear(normed(stream), [linear], got, activation, gated)
    TorchOps(EPS).linear(normed(stream), [linear], want, activation, gated)
    torch.testing.assert_close(got, want, **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [None, "gelu_tanh"])
@pytest.mark.parametrize(("batch_size", "width"), [(1, 64), (3, 1000), (17, 130)])
def test_triton_gate_equals_torch(batch_size: int, width: int, activation, dtype: torch.dtype) -> None:
    got, gates = randn(2, batch_size, width, dtype=dtype)
    want = got.clone()
    TritonOps(DEVICE, EPS).gate(got, gates, activation)
    TorchOps(EPS).gate(want, gates, activation)
    torch.testing.assert_close(got, want, **tolerance(dtype))


@pytest.mark.parametrize(
    ("read_by", "dtype", "sizes"),
    crossed(list(product(READERS, DTYPES)), [(1, 64, 64), (3, 100, 100), (5, 1500, 130)]),
)
def test_triton_linear_add_equals_torch(read_by, dtype, sizes) -> None:
    batch_size, num_in, hidden_size = sizes
    x = randn(batch_size, num_in, dtype=dtype)
    linear, read = make_linear(hidden_size, num_in, dtype, bias=read_by == "one"), readers(read_by, hidden_size)
    got = make_stream(batch_size, hidden_size, dtype)
    want = copy_of(got)
    multiplier = 0.22 if read_by == "none" else 1.0
    TritonOps(DEVICE, EPS).linear_add(x, linear, multiplier, got, read)
    TorchOps(EPS).linear_add(x, linear, multiplier, want, read)
    assert_same_stream(got, want, read.ahead is not None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("read_by", READERS)
@pytest.mark.parametrize(("batch_size", "hidden_size"), [(1, 63), (3, 100), (5, 576)])
def test_triton_add_normed_equals_torch(batch_size, hidden_size, read_by, dtype) -> None:
    x, read = randn(batch_size, hidden_size, dtype=dtype, scale=3.0), readers(read_by, hidden_size)
    norm = 1 + randn(hidden_size, scale=0.3)
    got = make_stream(batch_size, hidden_size, dtype)
    before, want = got.hidden.clone(), copy_of(got)
    scale = 0.7 if read_by == "one" else 1.0
    TritonOps(DEVICE, EPS).add_normed(x, norm, 0.5, scale, got, read)
    TorchOps(EPS).add_normed(x, norm, 0.5, scale, want, read)
    assert_same_stream(got, want, read.ahead is not None)
    added = 0.5 * torch.nn.functional.rms_norm(x.float(), (hidden_size,), norm, EPS)
    torch.testing.assert_close(got.hidden.float(), scale * (before.float() + added), **tolerance(dtype))


def test_a_sum_over_devices_is_added_unnormed_in_float32() -> None:
    """The sum is float32, whatever the stream's dtype, and is not normed."""
    x, read = randn(3, 100, scale=3.0), readers("both", 100)
    got = make_stream(3, 100, torch.bfloat16)
    before, want = got.hidden.clone(), copy_of(got)
    TritonOps(DEVICE, EPS).add_normed(x, None, 0.5, 1.0, got, read)
    TorchOps(EPS).add_normed(x, None, 0.5, 1.0, want, read)
    assert_same_stream(got, want, read.ahead is not None)
    torch.testing.assert_close(got.hidden.float(), before.float() + 0.5 * x, **tolerance(torch.bfloat16))


def test_a_split_k_product_can_be_repeated() -> None:
    """Split-K's counters, which show a program that it is the last one, are zero again after each product."""
    ops, x = TritonOps(DEVICE, EPS), randn(2, 1500)
    linear, read = make_linear(70, 1500, torch.float32), readers("one", 70)
    first = make_stream(2, 70, torch.float32)
    second = copy_of(first)
    ops.linear_add(x, linear, 1.0, first, read)
    ops.linear_add(x, linear, 1.0, second, read)
    assert torch.equal(first.hidden, second.hidden)
    assert torch.equal(first.squares, second.squares)


@pytest.mark.parametrize("batch_size", [2, 3, 16])
def test_a_rows_triton_linear_has_the_same_bits_in_any_batch(batch_size) -> None:
    dtype = DTYPES[1]
    stream = prepared(batch_size, 640, dtype)
    linear = make_linear(300, 640, dtype)
    whole, alone = randn(batch_size, 300, dtype=dtype), randn(1, 300, dtype=dtype)
    ops, last = TritonOps(DEVICE, EPS), slice(batch_size - 1, batch_size)
    ops.linear(normed(stream), [linear], whole)
    ops.linear(Normed(stream.scaled[last], stream.squares[:, last].contiguous()), [linear], alone)
    assert torch.equal(whole[last], alone)


# pairs that are rotated in a head of 24 dimensions, and whether they are interleaved
ROTATIONS = {
    "whole": (12, False),
    "part": (4, False),
    "interleaved": (12, True),
    "part interleaved": (5, True),
    "scaled alone": (0, False),
    "none": None,
}


def rotation_of(kind: str, batch_size: int, head_dim: int) -> Rotation | None:
    if ROTATIONS[kind] is None:
        return None
    pairs, interleaved = ROTATIONS[kind]
    return make_rotation(batch_size, pairs * head_dim // 24, interleaved)


def make_head_norms(kind: str, num_q_heads: int, num_kv_heads: int, head_dim: int) -> HeadNorms | None:
    if kind == "none":
        return None
    q_heads, kv_heads = (num_q_heads, num_kv_heads) if kind == "projection" else (1, 1)
    of_v = torch.ones(head_dim, device=DEVICE) if head_dim == 24 else None
    of_q, of_k = (1 + randn(heads * head_dim, scale=0.5) for heads in (q_heads, kv_heads))
    return HeadNorms(of_q, of_k, of_v, after_rope=kind == "after")


# every norm with every rotation for a head_dim that is no power of two; other widths and the narrow dtype with one
NORMS = ("none", "head", "projection", "after")
HEADS = [
    *((2, 2, 24, norm, rotates, DTYPES[0]) for norm in NORMS for rotates in ROTATIONS),
    (4, 2, 16, "projection", "whole", DTYPES[0]),
    (4, 2, 16, "head", "part interleaved", DTYPES[1]),
    (3, 1, 64, "none", "interleaved", DTYPES[0]),
    (3, 1, 64, "projection", "part", DTYPES[1]),
    (2, 1, 512, "head", "whole", DTYPES[1]),
    (2, 1, 512, "after", "whole", DTYPES[1]),
    (1, 1, 288, "head", "part interleaved", DTYPES[0]),
]


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim", "norm", "rotates", "dtype"), HEADS)
def test_triton_rotate_append_equals_torch(num_q_heads, num_kv_heads, head_dim, norm, rotates, dtype) -> None:
    rows = make_rows([0, 1, -1, -1], [2, 0, 0, 0], [1029, 0, 1, 2])  # the last two are tokens of one question
    rows.tail_starts[0] = 1024
    qkv = randn(4, (num_q_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    head_norms = make_head_norms(norm, num_q_heads, num_kv_heads, head_dim)
    rotation = rotation_of(rotates, 4, head_dim)
    got_tail = torch.full((3, num_kv_heads, 7, 2, head_dim), torch.nan, dtype=dtype, device=DEVICE)
    want_tail = got_tail.clone()
    got_q, want_q = randn(4, num_q_heads, head_dim, dtype=dtype), randn(4, num_q_heads, head_dim, dtype=dtype)
    TritonOps(DEVICE, EPS).rotate_append(qkv, head_norms, rotation, rows, got_tail, got_q)
    TorchOps(EPS).rotate_append(qkv, head_norms, rotation, rows, want_tail, want_q)
    torch.testing.assert_close(got_q, want_q, **tolerance(dtype))
    torch.testing.assert_close(got_tail, want_tail, equal_nan=True, **tolerance(dtype))
    written = ~got_tail[:, 0, :, 0, 0].isnan()
    assert written.nonzero().tolist() == [[0, 0], [0, 1], [2, 4]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_that_shares_rows_rotates_queries_and_copies_anothers_rows(dtype) -> None:
    rows = make_rows([0, 1, -1, -1], [2, 0, 0, 0], [1029, 0, 1, 2])
    rows.tail_starts[0] = 1024
    projected, rotation = randn(4, 3 * 24, dtype=dtype), rotation_of("whole", 4, 24)
    norms = make_head_norms("head", 3, 1, 24)
    got_q, want_q = (randn(4, 3, 24, dtype=dtype) for _ in range(2))
    for ops, q in ((TritonOps(DEVICE, EPS), got_q), (TorchOps(EPS), want_q)):
        ops.rotate_append(projected, norms, rotation, rows, None, q)
    torch.testing.assert_close(got_q, want_q, **tolerance(dtype))
    source = randn(3, 2, 7, 2, 24, dtype=dtype)
    got, want = torch.full_like(source, torch.nan), torch.full_like(source, torch.nan)
    TritonOps(DEVICE, EPS).copy_rows(source, got, rows)
    TorchOps(EPS).copy_rows(source, want, rows)
    assert torch.equal(got.nan_to_num(9.0), want.nan_to_num(9.0))
    written = ~got.isnan().any(dim=-1).any(dim=-1).any(dim=1)
    assert written.nonzero().tolist() == [[0, 0], [0, 1], [2, 4]] and torch.equal(got[2, :, 4], source[2, :, 4])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [20, 32])
def test_triton_make_inputs_equals_torch(width, dtype) -> None:
    rows, norm = make_rows([0, 1, 0], [0, 1, 2], [1, 1, 1]), 1 + randn(width, scale=0.3)
    rows.token_ids.copy_(torch.tensor([3, 0, 8]))
    table, projected = randn(9, 4 * width, dtype=dtype), randn(3, 4 * width, dtype=dtype)
    weights = InputWeights(make_linear(4 * width, 8, dtype, bias=False), 0.35, norm, table, 4.5)
    got, want = (randn(4, 3, width, dtype=dtype) for _ in range(2))
    TritonOps(DEVICE, EPS).make_inputs(projected.clone(), weights, rows, got)
    TorchOps(EPS).make_inputs(projected.clone(), weights, rows, want)
    torch.testing.assert_close(got, want, **tolerance(dtype))


@pytest.mark.parametrize(("num_q_heads", "_", "head_dim", "norm", "rotates", "dtype"), HEADS)
def test_triton_predict_query_equals_torch(num_q_heads, _, head_dim, norm, rotates, dtype) -> None:
    rows = make_rows([1, -1, 0], [0, 0, 1], [1, 0, 1])
    early = randn(3, num_q_heads * head_dim, dtype=dtype)
    norms, rotation = make_head_norms(norm, num_q_heads, 1, head_dim), rotation_of(rotates, 3, head_dim)
    layers = randn(2, 3, num_q_heads, head_dim + 1, head_dim, dtype=dtype, scale=head_dim**-0.5)
    got, want = randn(3, num_q_heads, head_dim, dtype=dtype), randn(3, num_q_heads, head_dim, dtype=dtype)
    TritonOps(DEVICE, EPS).predict_query(early, norms, layers[:, 1], rotation, rows, got)
    TorchOps(EPS).predict_query(early, norms, layers[:, 1], rotation, rows, want)
    active = rows.context_ids >= 0
    torch.testing.assert_close(got[active], want[active], **tolerance(dtype))
    assert got.isfinite().all()


def test_kernels_compile_for_a_gpu(emulator: Emulator) -> None:
    """The interpreter does not show this. Triton's cache directory is kept, so each kernel is compiled only once."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(emulator.directory / "triton")}
    command = [sys.executable, "-m", "tests.workers.model.compile_kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
