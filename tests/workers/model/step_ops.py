"""Inputs for tests of a decode step's operations."""

import torch

from csattn.batch import StepRows, make_step_rows
from csattn.models.query import Rotation
from csattn.models.spec import ExpertsSpec
from csattn.models.weights import ExpertWeights, Linear
from workers.model.ops import ExpertBuffers, Normed, Readers, Stream, num_squares
from workers.model.torch_ops import TorchOps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float32, torch.float16]
EPS = 1e-5
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
    "scaled": ExpertsSpec(
        num_experts=7, num_chosen=3, intermediate_size=33, scores="softmax", normed=True, has_scales=True
    ),
    "limited": ExpertsSpec(
        num_experts=9, num_chosen=3, intermediate_size=36, scores="root_softplus", activation="limited",
        has_choice_bias=True, normed=True, scale=1.5,
    ),
    "by_token": ExpertsSpec(
        num_experts=6, num_chosen=5, intermediate_size=24, scores="root_softplus", activation="limited", normed=True,
        scale=2.5, by_token=True,
    ),
    "ungated": ExpertsSpec(
        num_experts=7, num_chosen=3, intermediate_size=37, scores="sigmoid", activation="relu2", gated=False,
        has_choice_bias=True, normed=True, scale=1.5,
    ),
}  # fmt: skip


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}


def randn(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape) * scale).to(dtype).to(DEVICE)


def make_stream(batch_size: int, hidden_size: int, dtype: torch.dtype) -> Stream:
    """Make a stream in which everything but `hidden` is NaN until it is written."""
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
    torch.testing.assert_close(got.squares, want.squares, rtol=3e-2, atol=3e-2)  # sums over a rounded stream
    if ahead:
        torch.testing.assert_close(got.scaled_ahead, want.scaled_ahead, **close)
    else:
        assert got.scaled_ahead.isnan().all()


def prepared(batch_size: int, hidden_size: int, dtype: torch.dtype) -> Stream:
    stream = make_stream(batch_size, hidden_size, dtype)
    linear = Linear(randn(hidden_size, 8, dtype=dtype))
    TorchOps(EPS).linear_add(randn(batch_size, 8, dtype=dtype), linear, 1.0, stream, readers("both", hidden_size))
    return stream


def normed(stream: Stream) -> Normed:
    return Normed(stream.scaled, stream.squares)


READERS = ["none", "one", "both"]


def readers(kind: str, hidden_size: int) -> Readers:
    norm, ahead = 1 + randn(2, hidden_size, scale=0.3)
    return Readers(None if kind == "none" else norm, ahead if kind == "both" else None)


def make_linear(num_out: int, num_in: int, dtype: torch.dtype, bias: bool = False, scale: float = 1.0) -> Linear:
    weight = randn(num_out, num_in, dtype=dtype, scale=scale * num_in**-0.5)
    return Linear(weight, randn(num_out, dtype=dtype) if bias else None)


def make_expert_buffers(
    spec: ExpertsSpec, batch_size: int, hidden_size: int, dtype: torch.dtype, logits: torch.Tensor
) -> ExpertBuffers:
    """Make buffers whose outputs are NaN, and -1 where experts are to be chosen."""

    def nan(*sizes: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.full((batch_size, spec.num_chosen, *sizes), torch.nan, dtype=of, device=DEVICE)

    chosen = torch.full((batch_size, spec.num_chosen), -1, dtype=torch.int32, device=DEVICE)
    return ExpertBuffers(logits, chosen, nan(of=torch.float32), nan(spec.intermediate_size), nan(hidden_size))


def make_choice(spec: ExpertsSpec, vocab_size: int = 11) -> ExpertWeights:
    """Make experts without matrices, with what routing reads besides logits."""
    nothing = torch.empty(0, device=DEVICE)
    experts = torch.rand(vocab_size, spec.num_experts).argsort()[:, : spec.num_chosen]
    return ExpertWeights(
        router=Linear(nothing),
        gates=nothing,
        ups=nothing,
        down=nothing,
        choice_bias=randn(spec.num_experts) if spec.has_choice_bias else None,
        scales=randn(spec.num_experts) if spec.has_scales else None,
        by_token=experts.int().contiguous().to(DEVICE) if spec.by_token else None,
    )


def rows_of_tokens(token_ids: list[int]) -> StepRows:
    rows = make_step_rows(len(token_ids), DEVICE)
    rows.token_ids.copy_(torch.tensor(token_ids))
    return rows


def make_rotation(batch_size: int, half: int, interleaved: bool = False) -> Rotation:
    angles = torch.randn(batch_size, half, device=DEVICE) * 3
    return Rotation(angles.cos(), angles.sin(), 1 + torch.rand(batch_size, device=DEVICE), interleaved)


def make_rows(context_ids: list[int], tail_ids: list[int], tail_lens: list[int]) -> StepRows:
    rows = make_step_rows(len(context_ids), DEVICE)
    for tensor, values in zip(
        (rows.context_ids, rows.tail_ids, rows.tail_lens), (context_ids, tail_ids, tail_lens), strict=True
    ):
        tensor.copy_(torch.tensor(values))
    return rows
