"""The Triton operations of a decode step agree with their definition in torch: in the interpreter, or on the GPU."""

import dataclasses
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton, whose interpreter runs these kernels on a CPU, is not installed")

from csattn.batch import make_step_rows
from csattn.models.latent import LatentQueries
from csattn.models.spec import DeltaSpec, ExpertsSpec, IndexerSpec, LatentSpec, Temper
from csattn.models.weights import DeltaWeights, ExpertWeights, Frequencies, HeadNorms, LatentWeights, Linear
from workers.model.gpu.triton_ops import TritonOps
from workers.model.ops import DeltaState, LatentRoom, Normed, Readers, Rotation, Stream, num_squares
from workers.model.torch_ops import ACTIVATIONS, TorchOps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float32, torch.float16]
EPS = 1e-5


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}


def randn(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape) * scale).to(dtype).to(DEVICE)


def make_stream(batch_size: int, hidden_size: int, dtype: torch.dtype) -> Stream:
    """Everything but the residual stream itself is NaN until it is written."""
    poison = torch.full((batch_size, hidden_size), torch.nan, dtype=dtype, device=DEVICE)
    squares = torch.full((num_squares(hidden_size), batch_size), torch.nan, device=DEVICE)
    return Stream(randn(batch_size, hidden_size, dtype=dtype), poison.clone(), poison.clone(), squares)


def copy_of(stream: Stream) -> Stream:
    hidden, scaled, ahead = stream.hidden.clone(), stream.scaled.clone(), stream.scaled_ahead.clone()
    return Stream(hidden, scaled, ahead, stream.squares.clone(), stream.centred)


def assert_same_stream(got: Stream, want: Stream, ahead: bool) -> None:
    close = tolerance(want.hidden.dtype)
    torch.testing.assert_close(got.hidden, want.hidden, **close)
    torch.testing.assert_close(got.scaled, want.scaled, **close)
    torch.testing.assert_close(got.squares, want.squares, rtol=3e-2, atol=3e-2)  # of a rounded stream
    if ahead:
        torch.testing.assert_close(got.scaled_ahead, want.scaled_ahead, **close)
    else:
        assert got.scaled_ahead.isnan().all()


def prepared(batch_size: int, hidden_size: int, dtype: torch.dtype) -> Stream:
    stream = make_stream(batch_size, hidden_size, dtype)
    linear = Linear(randn(hidden_size, 8, dtype=dtype))
    TorchOps().linear_add(randn(batch_size, 8, dtype=dtype), linear, 1.0, stream, readers("both", hidden_size))
    return stream


def normed(stream: Stream) -> Normed:
    return Normed(stream.scaled, stream.squares, EPS)


READERS = ["none", "one", "both"]


def readers(kind: str, hidden_size: int) -> Readers:
    norm, ahead = 1 + randn(2, hidden_size, scale=0.3)
    return Readers(None if kind == "none" else norm, ahead if kind == "both" else None, EPS)


def make_linear(num_out: int, num_in: int, dtype: torch.dtype, bias: bool = False, scale: float = 1.0) -> Linear:
    weight = randn(num_out, num_in, dtype=dtype, scale=scale * num_in**-0.5)
    return Linear(weight, randn(num_out, dtype=dtype) if bias else None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("read_by", READERS)
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(("batch_size", "hidden_size"), [(1, 64), (3, 100), (2, 576)])
def test_begin(batch_size, hidden_size, centred, read_by, dtype) -> None:
    embedding = randn(50, hidden_size, dtype=dtype)
    rows = make_step_rows(batch_size, DEVICE)
    rows.token_ids.copy_(torch.tensor([49, 0, 7][:batch_size]))
    got = replace(make_stream(batch_size, hidden_size, dtype), centred=centred)
    want = copy_of(got)
    read, multiplier = readers(read_by, hidden_size), 1.0 if read_by == "one" else 2.5
    TritonOps(DEVICE).begin(rows, embedding, multiplier, got, read)
    TorchOps().begin(rows, embedding, multiplier, want, read)
    exact = embedding[rows.token_ids].float() * multiplier
    assert centred or torch.equal(got.hidden, exact.to(dtype))
    torch.testing.assert_close(got.hidden.float(), exact - centred * exact.mean(1, keepdim=True), **tolerance(dtype))
    assert_same_stream(got, want, read.ahead is not None)


@pytest.mark.parametrize("temper", [None, Temper(beta=0.3, every=50, offset=1)])
@pytest.mark.parametrize(("batch_size", "half"), [(1, 8), (3, 12), (2, 32), (2, 0)])
def test_turn(batch_size, half, temper) -> None:
    rows = make_step_rows(batch_size, DEVICE)
    rows.positions.copy_(torch.tensor([131_071, 49, 900][:batch_size]))
    frequencies = Frequencies((10_000.0 ** -torch.linspace(0, 1, half)).to(DEVICE), 1.25)
    got, want = make_rotation(batch_size, half), make_rotation(batch_size, half)
    if temper is None:
        for rotation in (got, want):
            rotation.q_scale.fill_(1)
    TritonOps(DEVICE).turn(rows, frequencies, temper, got)
    TorchOps().turn(rows, frequencies, temper, want)
    for field in ("cos", "sin", "q_scale"):
        torch.testing.assert_close(getattr(got, field), getattr(want, field), **tolerance(torch.float32))
    assert temper is None or got.q_scale[-1] > 1


@pytest.mark.parametrize("cap", [None, 7.0])
@pytest.mark.parametrize("vocab_size", [1, 4096, 9001])
def test_finish_logits(vocab_size, cap) -> None:
    got = randn(3, vocab_size, scale=50)
    want = got.clone()
    TritonOps(DEVICE).finish_logits(got, 0.3, cap)
    TorchOps().finish_logits(want, 0.3, cap)
    torch.testing.assert_close(got, want, **tolerance(torch.float32))
    assert cap is None or got.abs().max() <= cap


@pytest.mark.parametrize("vocab_size", [5, 4096, 9001])
def test_likeliest(vocab_size) -> None:
    logits = randn(5, vocab_size)
    logits[1, -1] = logits[2, 3] = logits[2, -1] = 9.0  # the last, and the first of two
    logits[3] = -torch.inf
    got, want = torch.full((2, 5), -1, device=DEVICE)
    TritonOps(DEVICE).likeliest(logits, got)
    TorchOps().likeliest(logits, want)
    assert got.tolist()[:3] == want.tolist()[:3] and got[4] == want[4]
    assert got[1] == vocab_size - 1 and got[2] == 3 and got[3] == 0


@pytest.mark.parametrize("vocab_size", [5, 4096, 9001])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_likeliest_of_what_is_no_number_is_no_token(vocab_size, bad) -> None:
    """Wherever it stands, also beside what is a number; the rows beside it have theirs."""
    logits = randn(5, vocab_size)
    logits[0] = bad
    logits[1, 0] = logits[2, -1] = logits[3, vocab_size // 2] = bad
    logits[4, 1] = -torch.inf
    for ops in (TritonOps(DEVICE), TorchOps()):
        token_ids = torch.full((5,), 7, device=DEVICE)
        ops.likeliest(logits, token_ids)
        assert token_ids.tolist() == [-1, -1, -1, -1, int(logits[4].argmax())]


def test_advance() -> None:
    got, want = make_rows([0, 0, -1], [0, 1, 2], [5, 0, 1]), make_rows([0, 0, -1], [0, 1, 2], [5, 0, 1])
    next_ids = torch.tensor([7, -1, 2**40], device=DEVICE)
    TritonOps(DEVICE).advance(got, next_ids)
    TorchOps().advance(want, next_ids)
    for field in ("token_ids", "positions", "context_ids", "tail_ids", "tail_lens"):
        assert torch.equal(getattr(got, field), getattr(want, field)), field
    assert got.tail_lens.tolist() == [6, 0, 2]
    assert got.token_ids.tolist() == [7, 0, 2**40], "a row that has no token is fed one that there is"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("batch_size", "hidden_size", "num_out"), [(1, 64, 64), (3, 100, 65), (17, 576, 130), (2, 1024, 63)]
)
def test_linear(batch_size, hidden_size, num_out, with_bias, with_norm, dtype) -> None:
    stream = prepared(batch_size, hidden_size, dtype)
    linear, x = make_linear(num_out, hidden_size, dtype, with_bias), normed(stream)
    got = torch.full((batch_size, num_out), torch.nan, dtype=dtype, device=DEVICE)
    want = got.clone()
    x = x if with_norm else Normed(stream.scaled)
    TritonOps(DEVICE).linear(x, [linear], got)
    TorchOps().linear(x, [linear], want)
    torch.testing.assert_close(got, want, **tolerance(dtype))


def test_linear_is_the_norm_and_the_product() -> None:
    stream = prepared(3, 100, torch.float32)
    linear = make_linear(40, 100, torch.float32, bias=True)
    out, unnormed = randn(2, 3, 40)
    TorchOps().linear(normed(stream), [linear], out)
    TorchOps().linear(Normed(stream.hidden), [linear], unnormed)
    norm = stream.scaled[0] / stream.hidden[0]
    want = torch.nn.functional.rms_norm(stream.hidden, (100,), norm, EPS) @ linear.weight.T + linear.bias
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(unnormed, stream.hidden @ linear.weight.T + linear.bias, rtol=1e-4, atol=1e-4)


def test_linears_side_by_side_are_one_of_all_their_outputs() -> None:
    stream, whole = prepared(3, 100, torch.float32), make_linear(70, 100, torch.float32, bias=True)
    together, apart = randn(2, 3, 70)
    TorchOps().linear(normed(stream), [whole], together)
    TorchOps().linear(normed(stream), [whole.outputs(0, 33), whole.outputs(33, 70)], apart)
    torch.testing.assert_close(apart, together, rtol=1e-5, atol=1e-5)


def test_logits_may_be_wider_than_the_model() -> None:
    stream = prepared(2, 128, DTYPES[1])
    head = make_linear(70, 128, DTYPES[1])
    got, want = randn(2, 70), randn(2, 70)
    TritonOps(DEVICE).linear(normed(stream), [head], got)
    TorchOps().linear(normed(stream), [head], want)
    torch.testing.assert_close(got, want, **tolerance(DTYPES[1]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("batch_size", "hidden_size", "num_out"), [(1, 64, 32), (3, 100, 33), (2, 256, 96)])
def test_mlp(batch_size, hidden_size, num_out, activation, gated, dtype) -> None:
    stream = prepared(batch_size, hidden_size, dtype)
    linear = make_linear((1 + gated) * num_out, hidden_size, dtype, bias=batch_size == 3, scale=2)
    got = torch.full((batch_size, num_out), torch.nan, dtype=dtype, device=DEVICE)
    want = got.clone()
    TritonOps(DEVICE).mlp(normed(stream), [linear], gated, activation, got)
    TorchOps().mlp(normed(stream), [linear], gated, activation, want)
    torch.testing.assert_close(got, want, **tolerance(dtype))


EXPERTS = {
    "plain": ExpertsSpec(num_experts=5, num_chosen=2, intermediate_size=33, scores="softmax", normed=True),
    "one": ExpertsSpec(num_experts=1, num_chosen=1, intermediate_size=40, scores="sigmoid"),
    "all": ExpertsSpec(num_experts=3, num_chosen=3, intermediate_size=32, scores="sigmoid", on_input=True),
    "groups": ExpertsSpec(
        num_experts=12, num_chosen=3, intermediate_size=20, scores="sigmoid", has_choice_bias=True, groups=(4, 2),
        normed=True, scale=1.5,
    ),
    "clamped": ExpertsSpec(
        num_experts=7, num_chosen=4, intermediate_size=65, scores="softmax_of_chosen", activation="clamped", bias=True
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize("batch_size", [1, 3, 17])
def test_choose_experts(kind: str, batch_size: int) -> None:
    spec = EXPERTS[kind]
    logits = randn(batch_size, spec.num_experts, scale=2)
    logits[0] = float(logits[0, 0])  # of equals the first
    bias = randn(spec.num_experts) if spec.has_choice_bias else None
    got_chosen, want_chosen = torch.full((2, batch_size, spec.num_chosen), -1, dtype=torch.int32, device=DEVICE)
    got_shares, want_shares = randn(2, batch_size, spec.num_chosen)
    TritonOps(DEVICE).choose_experts(logits, bias, spec, got_chosen, got_shares)
    TorchOps().choose_experts(logits, bias, spec, want_chosen, want_shares)
    assert torch.equal(got_chosen, want_chosen)
    torch.testing.assert_close(got_shares, want_shares, **tolerance(torch.float32))


def test_experts_of_what_is_no_number_are_some() -> None:
    spec = replace(EXPERTS["plain"], scores="sigmoid", normed=False)
    chosen = torch.full((2, 2), -1, dtype=torch.int32, device=DEVICE)
    TritonOps(DEVICE).choose_experts(torch.full((2, 5), torch.nan, device=DEVICE), None, spec, chosen, randn(2, 2))
    assert chosen.min() >= 0 and chosen.max() < 5


def make_experts(spec: ExpertsSpec, hidden_size: int, dtype: torch.dtype) -> ExpertWeights:
    num, width = spec.num_experts, spec.intermediate_size
    both = randn(num, 2 * width, hidden_size, dtype=dtype, scale=2 * hidden_size**-0.5)
    biases = randn(num, 2 * width, dtype=dtype).chunk(2, dim=1) if spec.bias else (None, None)
    return ExpertWeights(
        router=make_linear(num, hidden_size, dtype),
        gates=both[:, :width],
        ups=both[:, width:],
        down=randn(num, hidden_size, width, dtype=dtype, scale=width**-0.5),
        gate_bias=biases[0],
        up_bias=biases[1],
        down_bias=randn(num, hidden_size, dtype=dtype) if spec.bias else None,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize(("batch_size", "hidden_size"), [(1, 64), (3, 100), (17, 130)])
def test_experts(batch_size: int, hidden_size: int, kind: str, dtype: torch.dtype) -> None:
    """Of rows that share experts, more than a tile of them, and of experts that no row has."""
    spec, stream = EXPERTS[kind], prepared(batch_size, hidden_size, dtype)
    weights = make_experts(spec, hidden_size, dtype)
    chosen = torch.stack([torch.randperm(max(1, spec.num_experts - 1))[: spec.num_chosen] for _ in range(batch_size)])
    if chosen.shape[1] < spec.num_chosen:
        chosen = torch.arange(spec.num_chosen).repeat(batch_size, 1)
    chosen, shares = chosen.int().to(DEVICE), torch.rand(batch_size, spec.num_chosen, device=DEVICE)
    got = torch.full((batch_size, spec.num_chosen, spec.intermediate_size), torch.nan, dtype=dtype, device=DEVICE)
    want, x = got.clone(), normed(stream) if batch_size != 3 else Normed(stream.scaled)
    TritonOps(DEVICE).experts(x, weights, spec, chosen, shares, got)
    TorchOps().experts(x, weights, spec, chosen, shares, want)
    torch.testing.assert_close(got, want, **tolerance(dtype))
    got_stream = make_stream(batch_size, hidden_size, dtype)
    want_stream = copy_of(got_stream)
    parts = torch.full((2, batch_size, spec.num_chosen, hidden_size), torch.nan, dtype=dtype, device=DEVICE)
    told, read = (weights, spec, chosen, shares), readers("both", hidden_size)
    TritonOps(DEVICE).experts_add(want, *told, parts[0], 0.5, got_stream, read)
    TorchOps().experts_add(want, *told, parts[1], 0.5, want_stream, read)
    assert_same_stream(got_stream, want_stream, ahead=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch_size", "width"), [(1, 64), (3, 1000), (17, 130)])
def test_gate(batch_size: int, width: int, dtype: torch.dtype) -> None:
    got, gates = randn(2, batch_size, width, dtype=dtype, scale=3)
    want = got.clone()
    TritonOps(DEVICE).gate(got, gates)
    TorchOps().gate(want, gates)
    torch.testing.assert_close(got, want, **tolerance(dtype))


DELTAS = [
    DeltaSpec(num_k_heads=2, num_v_heads=4, k_dim=12, v_dim=20, conv_len=4),
    DeltaSpec(num_k_heads=1, num_v_heads=1, k_dim=64, v_dim=33, conv_len=2),
    DeltaSpec(num_k_heads=3, num_v_heads=3, k_dim=8, v_dim=16, conv_len=3),
]


@pytest.mark.parametrize("versions", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", DELTAS)
def test_delta(spec: DeltaSpec, dtype: torch.dtype, versions: int) -> None:
    """Tokens of one request in one step, beside others and idle rows; of states that nobody reads or writes nothing."""
    rows = make_rows([0, 0, 1, 0, -1, 1], [3, 0, 2, 3, 5, 2], [1, 0, 5, 2, 1, 6])
    inputs = randn(6, spec.in_width, dtype=dtype)
    decay, decay_bias = torch.rand(2, spec.num_v_heads, device=DEVICE)
    norm, conv = 1 + randn(spec.v_dim, scale=0.2), randn(spec.num_channels, spec.conv_len)
    weights = DeltaWeights((make_linear(spec.in_width, 8, dtype),), conv, decay, decay_bias, norm)
    turn = torch.tensor([0, 0, versions - 1, 0, 0, 0], device=DEVICE)
    states = [randn(6, versions, *sizes) for sizes in spec.parts]
    for state in states:
        state[[0, 1, 4]] = torch.nan  # of no row that counts
    got, want = (DeltaState(*(state.clone() for state in states), turn) for _ in range(2))
    mixed = torch.full((2, 6, spec.num_channels), torch.nan, dtype=dtype, device=DEVICE)
    outs = torch.zeros(2, 6, spec.v_width, dtype=dtype, device=DEVICE)
    TritonOps(DEVICE).delta(inputs, weights, spec, EPS, rows, got, mixed[0], outs[0])
    TorchOps().delta(inputs, weights, spec, EPS, rows, want, mixed[1], outs[1])
    torch.testing.assert_close(outs[0], outs[1], **tolerance(dtype))
    close = {"rtol": 1e-2, "atol": 1e-2} if dtype != torch.float32 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(got.conv, want.conv, equal_nan=True, **close)
    torch.testing.assert_close(got.memory, want.memory, equal_nan=True, **close)
    assert got.memory[[2, 3, 5]].isfinite().all() and got.memory[[0, 1, 4]].isnan().all()
    if versions == 2:
        assert torch.equal(got.memory[3, 0], states[1][3, 0]), "what was read is still there"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("read_by", READERS)
@pytest.mark.parametrize(("batch_size", "num_in", "hidden_size"), [(1, 64, 64), (3, 100, 100), (5, 1500, 130)])
def test_linear_add(batch_size, num_in, hidden_size, read_by, dtype) -> None:
    x = randn(batch_size, num_in, dtype=dtype)
    linear, read = make_linear(hidden_size, num_in, dtype, bias=read_by == "one"), readers(read_by, hidden_size)
    got = make_stream(batch_size, hidden_size, dtype)
    want = copy_of(got)
    multiplier = 0.22 if read_by == "none" else 1.0
    TritonOps(DEVICE).linear_add(x, linear, multiplier, got, read)
    TorchOps().linear_add(x, linear, multiplier, want, read)
    assert_same_stream(got, want, read.ahead is not None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("read_by", READERS)
@pytest.mark.parametrize(("batch_size", "hidden_size"), [(1, 63), (3, 100), (5, 576)])
def test_add_normed(batch_size, hidden_size, read_by, dtype) -> None:
    x, read = randn(batch_size, hidden_size, dtype=dtype, scale=3.0), readers(read_by, hidden_size)
    norm = 1 + randn(hidden_size, scale=0.3)
    got = make_stream(batch_size, hidden_size, dtype)
    before, want = got.hidden.clone(), copy_of(got)
    TritonOps(DEVICE).add_normed(x, norm, EPS, 0.5, got, read)
    TorchOps().add_normed(x, norm, EPS, 0.5, want, read)
    assert_same_stream(got, want, read.ahead is not None)
    added = 0.5 * torch.nn.functional.rms_norm(x.float(), (hidden_size,), norm, EPS)
    torch.testing.assert_close(got.hidden.float(), before.float() + added, **tolerance(dtype))


def test_a_sum_over_devices_is_added_as_it_is() -> None:
    """float32, whatever the stream is; without a norm of its own."""
    x, read = randn(3, 100, scale=3.0), readers("both", 100)
    got = make_stream(3, 100, torch.bfloat16)
    before, want = got.hidden.clone(), copy_of(got)
    TritonOps(DEVICE).add_normed(x, None, EPS, 0.5, got, read)
    TorchOps().add_normed(x, None, EPS, 0.5, want, read)
    assert_same_stream(got, want, read.ahead is not None)
    torch.testing.assert_close(got.hidden.float(), before.float() + 0.5 * x, **tolerance(torch.bfloat16))


def test_a_split_product_can_be_taken_again() -> None:
    """The counters that tell which program came last are zero again after each product."""
    ops, x = TritonOps(DEVICE), randn(2, 1500)
    linear, read = make_linear(70, 1500, torch.float32), readers("one", 70)
    first = make_stream(2, 70, torch.float32)
    second = copy_of(first)
    ops.linear_add(x, linear, 1.0, first, read)
    ops.linear_add(x, linear, 1.0, second, read)
    assert torch.equal(first.hidden, second.hidden)
    assert torch.equal(first.squares, second.squares)


@pytest.mark.parametrize("batch_size", [2, 3, 16])
def test_a_row_does_not_depend_on_its_batch(batch_size) -> None:
    dtype = DTYPES[1]
    stream = prepared(batch_size, 640, dtype)
    linear = make_linear(300, 640, dtype)
    whole, alone = randn(batch_size, 300, dtype=dtype), randn(1, 300, dtype=dtype)
    ops, last = TritonOps(DEVICE), slice(batch_size - 1, batch_size)
    ops.linear(normed(stream), [linear], whole)
    ops.linear(Normed(stream.scaled[last], stream.squares[:, last].contiguous(), EPS), [linear], alone)
    assert torch.equal(whole[last], alone)


def make_rotation(batch_size: int, half: int, interleaved: bool = False) -> Rotation:
    angles = torch.randn(batch_size, half, device=DEVICE) * 3
    return Rotation(angles.cos(), angles.sin(), 1 + torch.rand(batch_size, device=DEVICE), interleaved)


# how many pairs of a head of 24 dimensions turn, and which
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
    return HeadNorms(1 + randn(q_heads * head_dim, scale=0.5), 1 + randn(kv_heads * head_dim, scale=0.5))


def make_rows(context_ids: list[int], tail_ids: list[int], tail_lens: list[int]):
    rows = make_step_rows(len(context_ids), DEVICE)
    for tensor, values in zip(
        (rows.context_ids, rows.tail_ids, rows.tail_lens), (context_ids, tail_ids, tail_lens), strict=True
    ):
        tensor.copy_(torch.tensor(values))
    return rows


# every norm with every rotation where a head's width is no power of two; other widths and the narrow dtype with one
HEADS = [
    *((2, 2, 24, norm, rotates, DTYPES[0]) for norm in ("none", "head", "projection") for rotates in ROTATIONS),
    (4, 2, 16, "projection", "whole", DTYPES[0]),
    (4, 2, 16, "head", "part interleaved", DTYPES[1]),
    (3, 1, 64, "none", "interleaved", DTYPES[0]),
    (3, 1, 64, "projection", "part", DTYPES[1]),
]


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim", "norm", "rotates", "dtype"), HEADS)
def test_rotate_append(num_q_heads, num_kv_heads, head_dim, norm, rotates, dtype) -> None:
    rows = make_rows([0, 1, -1, -1], [2, 0, 0, 0], [5, 0, 1, 2])  # the last two are tokens of one question
    qkv = randn(4, (num_q_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    head_norms = make_head_norms(norm, num_q_heads, num_kv_heads, head_dim)
    rotation = rotation_of(rotates, 4, head_dim)
    got_tail = torch.full((3, num_kv_heads, 7, 2, head_dim), torch.nan, dtype=dtype, device=DEVICE)
    want_tail = got_tail.clone()
    got_q, want_q = randn(4, num_q_heads, head_dim, dtype=dtype), randn(4, num_q_heads, head_dim, dtype=dtype)
    TritonOps(DEVICE).rotate_append(qkv, head_norms, EPS, rotation, rows, got_tail, got_q)
    TorchOps().rotate_append(qkv, head_norms, EPS, rotation, rows, want_tail, want_q)
    torch.testing.assert_close(got_q, want_q, **tolerance(dtype))
    torch.testing.assert_close(got_tail, want_tail, equal_nan=True, **tolerance(dtype))
    written = ~got_tail[:, 0, :, 0, 0].isnan()
    assert written.nonzero().tolist() == [[0, 0], [0, 1], [2, 4]]


@pytest.mark.parametrize(("num_q_heads", "_", "head_dim", "norm", "rotates", "dtype"), HEADS)
def test_predict_query(num_q_heads, _, head_dim, norm, rotates, dtype) -> None:
    rows = make_rows([1, -1, 0], [0, 0, 1], [1, 0, 1])
    early = randn(3, num_q_heads * head_dim, dtype=dtype)
    norms, rotation = make_head_norms(norm, num_q_heads, 1, head_dim), rotation_of(rotates, 3, head_dim)
    layers = randn(2, 3, num_q_heads, head_dim + 1, head_dim, dtype=dtype, scale=head_dim**-0.5)
    got, want = randn(3, num_q_heads, head_dim, dtype=dtype), randn(3, num_q_heads, head_dim, dtype=dtype)
    TritonOps(DEVICE).predict_query(early, norms, EPS, layers[:, 1], rotation, rows, got)
    TorchOps().predict_query(early, norms, EPS, layers[:, 1], rotation, rows, want)
    active = rows.context_ids >= 0
    torch.testing.assert_close(got[active], want[active], **tolerance(dtype))
    assert got.isfinite().all()


def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """Which the interpreter does not tell."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.workers.model.compile_kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


INDEXER = IndexerSpec(num_heads=3, head_dim=13, interleaved=False)
WIDE = IndexerSpec(num_heads=4, head_dim=128, interleaved=True)
LATENTS = [  # the last one's are those of DeepSeek-V3.2, but for the heads
    LatentSpec(num_heads=3, q_rank=None, kv_rank=20, nope_dim=12, rope_dim=6, v_dim=5),
    LatentSpec(num_heads=5, q_rank=24, kv_rank=37, nope_dim=7, rope_dim=10, v_dim=20, indexer=INDEXER, top_k=4),
    LatentSpec(num_heads=2, q_rank=9, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128, indexer=WIDE, top_k=4),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("spec", LATENTS)
def test_latents(spec: LatentSpec, interleaved: bool, dtype: torch.dtype) -> None:
    """Rows of two requests, one of them idle; what nobody writes of tails stays as it was."""
    rows = make_rows([0, 1, -1, -1], [2, 0, 0, 1], [5, 0, 1, 2])
    weights, rotation = latent_weights(spec, dtype), make_rotation(4, spec.rope_dim // 2, interleaved)
    inputs, tail = randn(4, sum(spec.in_widths), dtype=dtype), randn(3, 1, 6, 2, -(-spec.row_width // 2), dtype=dtype)
    got, want = (latent_room(spec, inputs, dtype) for _ in range(2))
    tails = tail.clone(), tail.clone()
    for ops, room, own in ((TritonOps(DEVICE), got, tails[0]), (TorchOps(), want, tails[1])):
        ops.append_latents(weights, spec, rotation, rows, own, room)
        room.projected.copy_(want.projected)
        ops.ask_latents(weights, spec, rotation, room)
        ops.latent_values(weights, spec, room)
    own = tuple(tail.flatten(3)[..., : spec.row_width] for tail in tails)
    torch.testing.assert_close(*own, **tolerance(dtype))
    behind = (tail.flatten(3)[..., spec.row_width :] for tail in (tails[0], tail))
    assert torch.equal(*(x[[0, 1]][:, :, 2:] for x in (tails[0], tail))) and all(x.shape[-1] < 2 for x in behind)
    if spec.q_rank is not None:
        torch.testing.assert_close(got.q_latents, want.q_latents, **tolerance(dtype))
    for made, wanted in zip(dataclasses.astuple(got.queries), dataclasses.astuple(want.queries), strict=True):
        assert (made is None) == (wanted is None)
        if made is not None:
            torch.testing.assert_close(made, wanted, **tolerance(dtype))
    torch.testing.assert_close(got.values, want.values, **tolerance(dtype))


def latent_weights(spec: LatentSpec, dtype: torch.dtype) -> LatentWeights:
    ups = [randn(spec.num_heads, n, spec.kv_rank, dtype=dtype, scale=0.2) for n in (spec.nope_dim, spec.v_dim)]
    return LatentWeights(
        inputs=(),
        queries=(),
        up_k=ups[0],
        up_v=ups[1],
        q_norm=None if spec.q_rank is None else 1 + randn(spec.q_rank, scale=0.3),
        kv_norm=1 + randn(spec.kv_rank, scale=0.3),
        index_norm=None if spec.indexer is None else 1 + randn(2, spec.indexer.head_dim, scale=0.3),
    )


def latent_room(spec: LatentSpec, inputs: torch.Tensor, dtype: torch.dtype) -> LatentRoom:
    """What is to be written is NaN."""

    def nan(*sizes: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.full((len(inputs), *sizes), torch.nan, dtype=of, device=DEVICE)

    indexer, seed = spec.indexer, torch.Generator().manual_seed(1)
    projected = torch.randn(len(inputs), spec.q_width + spec.index_q_width, generator=seed).to(DEVICE, dtype)
    attended = torch.randn(len(inputs), spec.num_heads, spec.kv_rank, generator=seed).to(DEVICE, dtype)
    asked = LatentQueries(
        nan(spec.num_heads, spec.key_width),
        None if indexer is None else nan(indexer.num_heads, indexer.head_dim),
        None if indexer is None else nan(indexer.num_heads, of=torch.float32),
    )
    q_latents = nan(spec.q_rank or 0)
    return LatentRoom(
        inputs, q_latents, inputs if spec.q_rank is None else projected, asked, attended, nan(spec.v_width)
    )
