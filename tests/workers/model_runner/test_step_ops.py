"""The Triton operations of a decode step agree with their definition in torch: in the interpreter, or on the GPU."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton, whose interpreter runs these kernels on a CPU, is not installed")

from csattn.batch import make_step_rows
from workers.model_runner.ops import HeadNorms, Rotation, Stream, num_squares
from workers.model_runner.torch_ops import TorchOps
from workers.model_runner.triton_ops import TritonOps

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
    return Stream(stream.hidden.clone(), stream.scaled.clone(), stream.scaled_ahead.clone(), stream.squares.clone())


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
    TorchOps().linear_add(randn(batch_size, 8, dtype=dtype), randn(hidden_size, 8, dtype=dtype), stream, *norms(stream))
    return stream


def norms(stream: Stream) -> tuple[torch.Tensor, torch.Tensor]:
    hidden_size, dtype = stream.hidden.shape[1], stream.hidden.dtype
    return 1 + randn(hidden_size, dtype=dtype, scale=0.3), 1 + randn(hidden_size, dtype=dtype, scale=0.3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("batch_size", "hidden_size", "head_dim"), [(1, 64, 16), (3, 100, 24), (2, 576, 64)])
def test_begin(batch_size, hidden_size, head_dim, ahead, dtype) -> None:
    embedding = randn(50, hidden_size, dtype=dtype)
    rows = make_step_rows(batch_size, DEVICE)
    rows.token_ids.copy_(torch.tensor([49, 0, 7][:batch_size]))
    rows.positions.copy_(torch.tensor([131_071, 0, 900][:batch_size]))
    frequencies = (10_000.0 ** -torch.linspace(0, 1, head_dim // 2)).to(DEVICE)
    got = make_stream(batch_size, hidden_size, dtype)
    want = copy_of(got)
    got_rotation, want_rotation = make_rotation(batch_size, head_dim), make_rotation(batch_size, head_dim)
    norm, norm_ahead = norms(got)
    ahead_norm = norm_ahead if ahead else None
    TritonOps(DEVICE).begin(rows, embedding, got, norm, ahead_norm, frequencies, 1.25, got_rotation)
    TorchOps().begin(rows, embedding, want, norm, ahead_norm, frequencies, 1.25, want_rotation)
    assert torch.equal(got.hidden, embedding[rows.token_ids])
    assert_same_stream(got, want, ahead)
    torch.testing.assert_close(got_rotation.cos, want_rotation.cos, **tolerance(torch.float32))
    torch.testing.assert_close(got_rotation.sin, want_rotation.sin, **tolerance(torch.float32))


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
    got, want = make_rows([0, -1, 3], [0, 1, 2], [5, 0, 1]), make_rows([0, -1, 3], [0, 1, 2], [5, 0, 1])
    next_ids = torch.tensor([7, -1, 2**40], device=DEVICE)
    TritonOps(DEVICE).advance(got, next_ids)
    TorchOps().advance(want, next_ids)
    for field in ("token_ids", "positions", "context_ids", "tail_ids", "tail_lens"):
        assert torch.equal(getattr(got, field), getattr(want, field)), field
    assert got.tail_lens.tolist() == [6, 0, 2]
    assert got.token_ids.tolist() == [7, 0, 2**40], "a row that has no token is fed one that there is"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("batch_size", "hidden_size", "num_out"), [(1, 64, 64), (3, 100, 65), (17, 576, 130), (2, 1024, 63)]
)
def test_normed_linear(batch_size, hidden_size, num_out, with_bias, dtype) -> None:
    stream = prepared(batch_size, hidden_size, dtype)
    weight = randn(num_out, hidden_size, dtype=dtype, scale=hidden_size**-0.5)
    bias = randn(num_out, dtype=dtype) if with_bias else None
    got = torch.full((batch_size, num_out), torch.nan, dtype=dtype, device=DEVICE)
    want = got.clone()
    TritonOps(DEVICE).normed_linear(stream.scaled, stream.squares, EPS, weight, bias, got)
    TorchOps().normed_linear(stream.scaled, stream.squares, EPS, weight, bias, want)
    torch.testing.assert_close(got, want, **tolerance(dtype))


def test_normed_linear_is_the_norm_and_the_product() -> None:
    stream = prepared(3, 100, torch.float32)
    weight = randn(40, 100)
    out = randn(3, 40)
    norm = stream.scaled[0] / stream.hidden[0]
    TorchOps().normed_linear(stream.scaled, stream.squares, EPS, weight, None, out)
    want = torch.nn.functional.rms_norm(stream.hidden, (100,), norm, EPS) @ weight.T
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)


def test_logits_may_be_wider_than_the_model() -> None:
    stream = prepared(2, 128, DTYPES[1])
    weight = randn(70, 128, dtype=DTYPES[1], scale=0.1)
    got, want = randn(2, 70), randn(2, 70)
    TritonOps(DEVICE).normed_linear(stream.scaled, stream.squares, EPS, weight, None, got)
    TorchOps().normed_linear(stream.scaled, stream.squares, EPS, weight, None, want)
    torch.testing.assert_close(got, want, **tolerance(DTYPES[1]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch_size", "hidden_size", "num_out"), [(1, 64, 32), (3, 100, 33), (2, 256, 96)])
def test_normed_gate_up(batch_size, hidden_size, num_out, dtype) -> None:
    stream = prepared(batch_size, hidden_size, dtype)
    weight = randn(2 * num_out, hidden_size, dtype=dtype, scale=2 * hidden_size**-0.5)
    got = torch.full((batch_size, num_out), torch.nan, dtype=dtype, device=DEVICE)
    want = got.clone()
    TritonOps(DEVICE).normed_gate_up(stream.scaled, stream.squares, EPS, weight, got)
    TorchOps().normed_gate_up(stream.scaled, stream.squares, EPS, weight, want)
    torch.testing.assert_close(got, want, **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("batch_size", "num_in", "hidden_size"), [(1, 64, 64), (3, 100, 100), (5, 1500, 130)])
def test_linear_add(batch_size, num_in, hidden_size, ahead, dtype) -> None:
    x = randn(batch_size, num_in, dtype=dtype)
    weight = randn(hidden_size, num_in, dtype=dtype, scale=num_in**-0.5)
    got = make_stream(batch_size, hidden_size, dtype)
    want = copy_of(got)
    norm, norm_ahead = norms(got)
    TritonOps(DEVICE).linear_add(x, weight, got, norm, norm_ahead if ahead else None)
    TorchOps().linear_add(x, weight, want, norm, norm_ahead if ahead else None)
    assert_same_stream(got, want, ahead)


def test_a_split_product_can_be_taken_again() -> None:
    """The counters that tell which program came last are zero again after each product."""
    ops, x = TritonOps(DEVICE), randn(2, 1500)
    weight = randn(70, 1500, scale=0.02)
    first = make_stream(2, 70, torch.float32)
    second = copy_of(first)
    norm, _ = norms(first)
    ops.linear_add(x, weight, first, norm, None)
    ops.linear_add(x, weight, second, norm, None)
    assert torch.equal(first.hidden, second.hidden)
    assert torch.equal(first.squares, second.squares)


@pytest.mark.parametrize("batch_size", [2, 3, 16])
def test_a_row_does_not_depend_on_its_batch(batch_size) -> None:
    dtype = DTYPES[1]
    stream = prepared(batch_size, 640, dtype)
    weight = randn(300, 640, dtype=dtype, scale=0.05)
    whole, alone = randn(batch_size, 300, dtype=dtype), randn(1, 300, dtype=dtype)
    ops, last = TritonOps(DEVICE), slice(batch_size - 1, batch_size)
    ops.normed_linear(stream.scaled, stream.squares, EPS, weight, None, whole)
    ops.normed_linear(stream.scaled[last], stream.squares[:, last].contiguous(), EPS, weight, None, alone)
    assert torch.equal(whole[last], alone)


def make_rotation(batch_size: int, head_dim: int) -> Rotation:
    angles = torch.randn(batch_size, head_dim // 2, device=DEVICE) * 3
    return Rotation(angles.cos(), angles.sin())


def make_rows(context_ids: list[int], tail_ids: list[int], tail_lens: list[int]):
    rows = make_step_rows(len(context_ids), DEVICE)
    for tensor, values in zip(
        (rows.context_ids, rows.tail_ids, rows.tail_lens), (context_ids, tail_ids, tail_lens), strict=True
    ):
        tensor.copy_(torch.tensor(values))
    return rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim"), [(4, 2, 16), (3, 1, 64), (2, 2, 24)])
def test_rotate_append(num_q_heads, num_kv_heads, head_dim, with_norms, dtype) -> None:
    rows = make_rows([0, -1, 1, 1], [2, 0, 0, 0], [5, 1, 1, 2])  # the last two are tokens of one question
    qkv = randn(4, (num_q_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    head_norms = HeadNorms(1 + randn(head_dim, dtype=dtype), 1 + randn(head_dim, dtype=dtype)) if with_norms else None
    rotation = make_rotation(4, head_dim)
    got_tail = torch.full((3, num_kv_heads, 7, 2, head_dim), torch.nan, dtype=dtype, device=DEVICE)
    want_tail = got_tail.clone()
    got_q, want_q = randn(4, num_q_heads, head_dim, dtype=dtype), randn(4, num_q_heads, head_dim, dtype=dtype)
    TritonOps(DEVICE).rotate_append(qkv, head_norms, EPS, rotation, rows, got_tail, got_q)
    TorchOps().rotate_append(qkv, head_norms, EPS, rotation, rows, want_tail, want_q)
    torch.testing.assert_close(got_q, want_q, **tolerance(dtype))
    torch.testing.assert_close(got_tail, want_tail, equal_nan=True, **tolerance(dtype))
    written = ~got_tail[:, 0, :, 0, 0].isnan()
    assert written.nonzero().tolist() == [[0, 0], [0, 1], [2, 4]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(("num_q_heads", "head_dim"), [(4, 16), (3, 64), (2, 24)])
def test_predict_query(num_q_heads, head_dim, with_norm, dtype) -> None:
    rows = make_rows([1, -1, 0], [0, 0, 1], [1, 0, 1])
    early = randn(3, num_q_heads * head_dim, dtype=dtype)
    norm = 1 + randn(head_dim, dtype=dtype) if with_norm else None
    layers = randn(2, 3, num_q_heads, head_dim + 1, head_dim, dtype=dtype, scale=head_dim**-0.5)
    rotation = make_rotation(3, head_dim)
    got, want = randn(3, num_q_heads, head_dim, dtype=dtype), randn(3, num_q_heads, head_dim, dtype=dtype)
    TritonOps(DEVICE).predict_query(early, norm, EPS, layers[:, 1], rotation, rows, got)
    TorchOps().predict_query(early, norm, EPS, layers[:, 1], rotation, rows, want)
    active = rows.context_ids >= 0
    torch.testing.assert_close(got[active], want[active], **tolerance(dtype))
    assert got.isfinite().all()
