"""Attention to every row of contexts and tails agrees with the definition, and a row's bits depend on it alone."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from csattn.attention import every_row
from csattn.attention.device import make_row_source
from csattn.attention.every_row import EveryRowAttention
from csattn.cuda import limits
from tests.attention.device_steps import Shape, Step, assert_close, change_rows, make_step
from tests.cuda_on_cpu import emulated
from tests.cuda_on_cpu.emulated import DEVICE, crossed

HALF = Shape(dtype=torch.bfloat16, tail_capacity=300)
LENS = [1, 700, 64, 257, 0]  # of contexts
# (context, tail_len): a row alone on its context, adjacent and separate rows of one context, no context, idle rows
BATCH = [(1, 5), (3, 1), (1, 300), (0, 299), (-1, 20), (2, 3), (-1, 0), (1, 257), (4, 7), (3, 256)]


@pytest.fixture(autouse=True)
def kernels(emulator: emulated.Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate the kernels on the CPU if there is no device."""
    emulator.stand_in(monkeypatch, every_row, multiprocessors=3)


def make(shape: Shape, batch: list[tuple[int, int]] = BATCH, lens: list[int] = LENS) -> Step:
    """Return a step over contexts that are wholly resident, without selections."""
    contexts = [(length, length) for length in lens]
    return make_step(shape, contexts, [(context, tail_len, 0) for context, tail_len in batch])


def attend(step: Step) -> Tensor:
    shape, size = step.shape, step.rows.batch_size
    plan = EveryRowAttention(
        batch_sizes=(size, size + 1),
        num_q_heads=shape.num_q_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=shape.dtype,
        tail_capacity=shape.tail_capacity,
        softmax_scale=shape.softmax_scale,
        device=DEVICE,
        logit_cap=step.logit_cap,
        has_sinks=step.sinks is not None,
    )
    heads = shape.num_q_heads, shape.num_kv_heads, shape.head_dim
    assert plan._parts.nbytes == every_row.workspace_bytes((size, size + 1), *heads, shape.tail_capacity)
    plan._parts.fill_(torch.nan)
    contexts = [kv.to(DEVICE) for kv in step.resident]
    source, rows = make_row_source(contexts, DEVICE), change_rows(step.rows, lambda x: x.to(DEVICE))
    out = torch.full_like(step.q, torch.nan).to(DEVICE)
    sinks = None if step.sinks is None else step.sinks.to(DEVICE)
    plan.attend(step.q.to(DEVICE), source, step.tails.to(DEVICE), rows, out, sinks)
    return out.cpu()


@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim", "dtype"),
    crossed([(8, 2, 64), (3, 3, 80), (15, 1, 128), (40, 2, 16), (12, 2, 256)], [torch.bfloat16, torch.float16]),
)
def test_attention_to_every_row_equals_the_definition(
    num_q_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    heads = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "num_index_heads": num_kv_heads}
    step = make(replace(HALF, **heads, head_dim=head_dim, dtype=dtype))
    got = attend(step)
    assert_close(got, step.wanted())
    assert not got[6].any(), "an idle row"


def test_more_batch_rows_of_a_context_than_a_block_takes_equal_the_definition() -> None:
    """A thread block takes them in several turns, among rows of other contexts; their order changes no bit."""
    batch = [(1, 1 + i) if i % 9 else (3, 2 * i + 1) for i in range(41)]
    for shape, rows in ((HALF, batch), (replace(HALF, num_q_heads=40, head_dim=16), batch[:14])):
        step = make(shape, rows)
        got, last_first = attend(step), list(reversed(range(len(rows))))
        assert_close(got, step.wanted())
        torch.testing.assert_close(attend(step.take(last_first)), got[last_first], rtol=0, atol=0)


def test_contexts_longer_than_a_split_per_block_equal_the_definition() -> None:
    step = make(replace(HALF, head_dim=16), [(0, 9), (1, 300), (0, 1)], [3000, 1111])
    assert_close(attend(step), step.wanted())


def test_attention_to_every_row_applies_logit_cap_and_sinks() -> None:
    step = make(HALF)
    step = replace(step, q=4 * step.q, logit_cap=2.5, sinks=4 + torch.randn(8))
    want = step.wanted()
    assert_close(attend(step), want)
    for without in ({"logit_cap": None}, {"sinks": None}):
        assert not torch.allclose(replace(step, **without).wanted(), want, atol=0.05)


def test_a_rows_attention_has_the_same_bits_in_any_batch() -> None:
    """Nor do they depend on the number of rows, up to 16: the number of splits of a context is then the same."""
    step = make(replace(HALF, head_dim=16), BATCH, [1, 3000, 64, 257, 0])
    want = attend(step)
    for rows in ([2], [9, 0, 2, 7], [4, 3, 1], [8, 8, 5], [*range(10), *range(6)]):
        torch.testing.assert_close(attend(step.take(rows)), want[rows], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("heads", "supported"),
    [((8, 2, 64, torch.bfloat16), True), ((8, 2, 64, torch.float32), False), ((8, 2, 512, torch.float16), False)],
)
def test_supports_heads_only_of_half_precision_up_to_the_largest_dim(
    heads: tuple[int, int, int, torch.dtype], supported: bool
) -> None:
    assert every_row.supports_heads(*heads) == supported


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tiles_fit_the_shared_memory_of_small_gpus(head_dim: int, as_ampere: None) -> None:
    for batch_size in (1, 16, 64):
        blocks = every_row.plan_blocks(batch_size, 8, 8, head_dim, 128)
        assert blocks.num_stages >= 2 and blocks.shared_bytes + every_row.OTHER_BYTES <= limits().block_bytes
    step = make(replace(HALF, head_dim=head_dim))
    assert_close(attend(step), step.wanted())
