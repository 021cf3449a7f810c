"""Attention over rows in place agrees with its definition, and a row's bits do not depend on its batch."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from csattn.attention import attend, in_place, merge_state
from csattn.attention.in_place_arguments import ARGUMENTS, MAX_PARTS
from csattn.attention.in_place_reference import OwnChoice, attend_row
from csattn.attention.in_place_rest import RANGE_ROWS, num_rest_ranges, rest_queries_stage, rest_stage
from csattn.cpu.addresses import KindStage
from csattn.cpu.arguments import words_of
from csattn.cpu.tape import Tape
from csattn.cpu.team import Team
from csattn.rest import Moments, moments_of
from csattn.search.sketch import describe_sketch, query_bytes
from csattn.sketch import SketchIndex
from csattn.sketch.rest import attend_rest
from tests.sketch.synthetic import make_heads, make_sketch

DTYPES = ["float32", "bfloat16", "float16"]
NAN = float("nan")


@dataclass(frozen=True)
class Row:
    """What one row of a step attends to."""

    q: torch.Tensor
    context: torch.Tensor
    near: tuple[int, int]
    kv_indices: torch.Tensor
    valid_len: torch.Tensor
    tail: torch.Tensor  # its own rows, then NaN
    moments: Moments | None = field(default=None, kw_only=True)
    sketch: SketchIndex | None = field(default=None, kw_only=True)
    rest: np.ndarray | None = field(default=None, kw_only=True)  # [num_q_heads, head_dim + 2] instead of a sketch
    own: OwnChoice | None = field(default=None, kw_only=True)
    own_rest: np.ndarray | None = field(default=None, kw_only=True)  # [num_q_heads, head_dim + 2] instead of own.sketch
    tail_start: int = field(default=0, kw_only=True)  # the tail's first visible row

    @property
    def tail_len(self) -> int:
        return int((~self.tail[0, :, 0, 0].isnan()).nonzero()[-1]) + 1

    @property
    def memory(self) -> torch.Tensor:
        """The context's rows as they are stored."""
        return self.context

    @property
    def layout(self) -> tuple[int, int, int, int]:
        """row_bytes, v_offset, k_reader, v_reader"""
        return self.context[0, 0].nbytes, self.context[0, 0, 0].nbytes, 0, 0

    def want(self, logit_cap: float | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
        scale = self.q.shape[-1] ** -0.5
        tail = self.tail[:, self.tail_start : self.tail_len]
        rest = self.moments, self.sketch
        chosen = self.kv_indices, self.valid_len
        return attend_row(self.q, self.context, *self.near, *chosen, tail, scale, *rest, self.own, logit_cap, sinks)


def make_row(
    dtype: torch.dtype,
    heads: tuple[int, int, int],  # query heads, KV heads, index heads
    head_dim: int,
    context_len: int,
    near: tuple[int, int],
    top_k: int,
    tail_len: int,
    capacity: int,
) -> Row:
    """Return a row of a step. Rows of the context that it does not attend to are NaN."""
    num_q_heads, num_kv_heads, num_index_heads = heads
    kv_indices = torch.full((num_index_heads, top_k), -1, dtype=torch.int32)
    valid_len = torch.zeros(num_index_heads, dtype=torch.int32)
    seen = torch.zeros(num_kv_heads, context_len, dtype=torch.bool)
    seen[:, : near[0]] = True
    seen[:, near[1] :] = True
    for head in range(num_index_heads):
        valid = min(max(0, top_k - head), near[1] - near[0])
        chosen = (torch.randperm(near[1] - near[0])[:valid] + near[0]).sort().values
        kv_indices[head, :valid], valid_len[head] = chosen.int(), valid
        seen[head // (num_index_heads // num_kv_heads), chosen] = True
    context = torch.randn(num_kv_heads, context_len, 2, head_dim)
    context[~seen] = NAN
    tail = torch.full((num_kv_heads, capacity, 2, head_dim), NAN)
    tail[:, :tail_len] = torch.randn(num_kv_heads, tail_len, 2, head_dim)
    q = torch.randn(num_q_heads, head_dim)
    return Row(q, context.to(dtype), near, kv_indices, valid_len, tail.to(dtype))


def run(
    rows: list[Row], num_threads: int = 1, logit_cap: float | None = None, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Attend to the rows and return out [num_rows, num_q_heads, head_dim]."""
    num_rows, (num_q_heads, head_dim) = len(rows), rows[0].q.shape
    q, tails = torch.stack([row.q for row in rows]), torch.stack([row.tail for row in rows])
    owns = [row.own for row in rows]
    sketches = [row.sketch for row in rows]
    sketches += [row.own.sketch if row.own is not None and row.own_rest is None else None for row in rows]
    records = [describe_sketch(sketch) if sketch is not None else None for sketch in sketches]
    num_kv_heads, of_query = rows[0].context.shape[0], [0]
    of_query += [query_bytes(sketch, num_q_heads // num_kv_heads) for sketch in sketches if sketch is not None]
    by_row = {
        "kv": [row.memory.data_ptr() for row in rows],
        "context_lens": [row.context.shape[1] for row in rows],
        "sink_ends": [row.near[0] for row in rows],
        "window_starts": [row.near[1] for row in rows]
        + [row.own.sketch.context_len if row.own else row.tail_start for row in rows],
        "num_index_heads": [len(row.valid_len) for row in rows],
        "top_ks": [row.kv_indices.shape[1] for row in rows] + [own.kv_indices.shape[1] if own else 0 for own in owns],
        "kv_indices": [of.kv_indices.data_ptr() if of else 0 for of in (*rows, *owns)],
        "valid_lens": [of.valid_len.data_ptr() if of and of.kv_indices.shape[1] else 0 for of in (*rows, *owns)],
        "moments": [row.moments.table.ctypes.data if row.moments is not None else 0 for row in rows],
        "sketches": [record.ctypes.data if record is not None else 0 for record in records],
        "rests": [
            rest.ctypes.data if rest is not None else 0
            for rest in [row.rest for row in rows] + [row.own_rest for row in rows]
        ],
        "tail_ids": list(range(num_rows)),
        "tail_lens": [row.tail_len for row in rows],
    }
    lists = (row.near[0] + row.context.shape[1] - row.near[1] + row.kv_indices.shape[1] + row.tail_len for row in rows)
    layout = "row_bytes", "v_offsets", "k_readers", "v_readers"
    by_row["sink_ends"] += [0] * num_rows
    by_row |= dict(zip(layout, map(list, zip(*(row.layout for row in rows), strict=True)), strict=True))
    arrays = {name: np.array(values, np.int64) for name, values in by_row.items()}
    arrays["num_rows"], arrays["softmax_scale"] = np.array([num_rows]), np.array([head_dim**-0.5])
    arrays["logit_cap"] = np.array([logit_cap or 0.0])
    arrays["parts"] = np.full((num_rows, num_q_heads, MAX_PARTS, head_dim + 2), NAN, np.float32)
    arrays["queries"] = np.full((2 * num_rows, num_kv_heads, max(of_query)), 0xFF, np.uint8)
    arrays["out"] = np.full((num_rows, num_q_heads, head_dim), NAN, np.float32)
    values = {name: array.ctypes.data for name, array in arrays.items()} | {
        "q": q.data_ptr(),
        "sinks": 0 if sinks is None else sinks.data_ptr(),
        "num_q_heads": num_q_heads,
        "num_kv_heads": num_kv_heads,
        "own_rows": num_rows,
        "query_bytes": max(of_query),
        "max_rest_ranges": max(num_rest_ranges(end) for end in by_row["window_starts"]),
        "head_dim": head_dim,
        "tails": tails.data_ptr(),
        "tail_capacity": tails.shape[2],
        "max_index_heads": max(by_row["num_index_heads"]),
        "max_ranges": max(in_place.num_ranges(length) for length in lists),
    }
    if logit_cap is None:
        values["logit_cap"] = 0
    arguments = words_of(ARGUMENTS, values)
    tape = Tape()
    pieces = num_rows * values["max_index_heads"] * values["max_ranges"]
    tape.add(rest_queries_stage, arguments, 2 * num_rows * num_kv_heads)
    tape.add(rest_stage, arguments, 2 * num_rows * num_kv_heads * values["max_rest_ranges"])
    tape.add(KindStage(in_place.attend_stage, str(tails.dtype).removeprefix("torch.")), arguments, pieces, waits=False)
    tape.add(in_place.merge_stage, arguments, num_rows * num_q_heads)
    with Team(num_threads) as team:
        team.run(tape)
    return torch.from_numpy(arrays["out"])


def rows_of_all_kinds(dtype: torch.dtype = torch.float32, head_dim: int = 16) -> list[Row]:
    return [
        make_row(dtype, (6, 2, num_index_heads), head_dim, context_len, near, top_k, tail_len, 40)
        for num_index_heads, context_len, near, top_k, tail_len in [
            (2, 1, (0, 0), 0, 1),
            (2, 50, (0, 50), 1, 1),
            (2, 300, (4, 250), 15, 3),
            (6, 300, (4, 250), 16, 40),  # one selection per query head
            (2, 255, (255, 255), 0, 1),  # exactly one range
            (2, 255, (255, 255), 0, 2),
            (6, 1000, (10, 800), 333, 17),
            (2, 5001, (5001, 5001), 0, 39),  # longer than sixteen short ranges
        ]
    ]


@pytest.mark.parametrize("head_dim", [2, 15, 16, 24, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_in_place_equals_its_definition(dtype: str, head_dim: int) -> None:
    rows = rows_of_all_kinds(getattr(torch, dtype), head_dim)
    got = run(rows)
    for row, out in zip(rows, got, strict=True):
        torch.testing.assert_close(out, row.want(), rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_in_place_applies_logit_cap_and_sinks(dtype: str, rng: np.random.Generator) -> None:
    """This holds where a token sees only part of the tail, and together with attention to the rest by its codes."""
    rows, sinks = rows_of_all_kinds(getattr(torch, dtype), 24), 3 * torch.randn(6)
    rows = [replace(row, q=5 * row.q, tail_start=row.tail_len // 2) for row in rows]
    for row in rows:
        row.tail[:, : row.tail_start] = NAN
    for row, out in zip(rows, run(rows, logit_cap=2.5, sinks=sinks), strict=True):
        torch.testing.assert_close(out, row.want(2.5, sinks), rtol=1e-5, atol=3e-6)
    sketched = with_sketches(rows, rng) if dtype == "float32" else []
    for row, out in zip(sketched, run(sketched, sinks=sinks) if sketched else [], strict=True):
        torch.testing.assert_close(out, row.want(None, sinks), rtol=1e-3, atol=1e-3)


def test_an_estimate_of_unselected_rows_is_merged() -> None:
    """It joins rows of all kinds, beside rows without one, and changes nothing where all rows are selected."""
    plain = rows_of_all_kinds(head_dim=24)
    rows = [replace(row, moments=moments_of([torch.randn(2, 90, 2, 24)])) for row in plain]
    both = run([*rows, *plain])
    assert torch.equal(both[len(rows) :], run(plain))
    for row, out, without in zip(rows, both, run(plain), strict=False):
        torch.testing.assert_close(out, row.want(), rtol=1e-4, atol=1e-5)
        left = row.near[1] - row.near[0] - row.valid_len
        assert torch.equal(out, without) == bool((left == 0).all())


def with_sketches(rows: list[Row], rng: np.random.Generator) -> list[Row]:
    """Return the rows, and give those with one selection per KV head a sketch of their context."""
    sketched = []
    for row in rows:
        if len(row.valid_len) == row.context.shape[0]:
            heads = make_heads(rng, 2, 3, row.context.shape[1], row.q.shape[1])
            starts = tuple(range(0, row.context.shape[1], 3072))
            row = replace(row, sketch=make_sketch(*heads, 1, 0, starts))
        sketched.append(row)
    return sketched


def test_unselected_rows_are_attended_to_by_their_codes(rng) -> None:
    """This holds for rows of all kinds, beside rows without a sketch; where all is selected, nothing changes."""
    long = RANGE_ROWS + 2000
    plain = [*rows_of_all_kinds(head_dim=24), make_row(torch.float32, (6, 2, 2), 24, long, (5, long - 70), 400, 3, 40)]
    rows = with_sketches(plain, rng)
    both = run([*rows, *plain])
    assert torch.equal(both[len(rows) :], run(plain))
    for row, out, without in zip(rows, both, run(plain), strict=False):
        torch.testing.assert_close(out, row.want(), rtol=1e-3, atol=1e-3)
        left = row.near[1] - row.near[0] - row.valid_len
        assert torch.equal(out, without) == (row.sketch is None or bool((left == 0).all()))


def test_a_rest_computed_by_the_search_equals_one_computed_from_the_sketch(rng: np.random.Generator) -> None:
    """A rest that the search computed counts as one computed here from the same sketch."""
    rows = [row for row in with_sketches(rows_of_all_kinds(head_dim=24), rng) if row.sketch is not None]
    given = []
    for row in rows:
        of_token = row.q[None].numpy(), row.sketch, row.kv_indices[None].numpy(), row.valid_len[None].numpy()
        (out,), (lse,) = attend_rest(*of_token, *row.near, 24**-0.5)
        rest = np.concatenate([out, lse[:, None], np.isfinite(lse)[:, None]], axis=1).astype(np.float32)
        given.append(replace(row, sketch=None, rest=rest))
    torch.testing.assert_close(run(given), run(rows), rtol=1e-5, atol=1e-5)


def with_own_segments(rows: list[Row], rng: np.random.Generator) -> list[Row]:
    """Return the rows, and give those with one selection per KV head codes of all of the tail but its last row.

    Coded rows of the tail that are not chosen are NaN.
    """
    grown = []
    for row in rows:
        num_heads, num_coded = row.tail.shape[0], row.tail_len - 1
        if len(row.valid_len) == num_heads and num_coded > 0:
            heads = make_heads(rng, num_heads, len(row.q) // num_heads, num_coded, row.q.shape[1])
            top_k = num_coded // 3
            ids = torch.stack([torch.randperm(num_coded)[:top_k].sort().values for _ in range(num_heads)])
            tail = row.tail.clone()
            for head in range(num_heads):
                left = torch.ones(num_coded, dtype=torch.bool)
                left[ids[head]] = False
                tail[head, :num_coded][left] = NAN
            sketch = make_sketch(*heads, 1, 0)
            own = OwnChoice(ids.int(), torch.full((num_heads,), top_k, dtype=torch.int32), sketch)
            row = replace(row, tail=tail, own=own)
        grown.append(row)
    return grown


def test_coded_rows_of_a_tail_are_selected_from_and_attended_to_by_their_codes(rng: np.random.Generator) -> None:
    """This holds beside rows that attend to their whole tail, with and without a sketch of the context."""
    plain = rows_of_all_kinds(head_dim=24)
    rows = with_own_segments([*plain, *with_sketches(plain, rng)], rng)
    assert sum(row.own is not None for row in rows) >= 6
    both = run([*rows, *plain])
    assert torch.equal(both[len(rows) :], run(plain))
    assert torch.equal(run(rows, 3), torch.cat([run([row]) for row in rows]))
    for row, out in zip(rows, both, strict=False):
        torch.testing.assert_close(out, row.want(), rtol=1e-3, atol=1e-3)


def test_a_tail_rest_computed_by_the_search_equals_one_computed_from_the_sketch(rng: np.random.Generator) -> None:
    """A rest that the search computed counts as one computed here from the same sketch."""
    rows = [row for row in with_own_segments(rows_of_all_kinds(head_dim=24), rng) if row.own is not None]
    given = []
    for row in rows:
        assert row.own is not None
        of_token = (
            row.q[None].numpy(),
            row.own.sketch,
            row.own.kv_indices[None].numpy(),
            row.own.valid_len[None].numpy(),
        )
        (out,), (lse,) = attend_rest(*of_token, 0, row.own.sketch.context_len, 24**-0.5)
        own_rest = np.concatenate([out, lse[:, None], np.isfinite(lse)[:, None]], axis=1).astype(np.float32)
        given.append(replace(row, own_rest=own_rest))
    torch.testing.assert_close(run(given), run(rows), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fault", [NAN, float("inf")])
def test_a_non_finite_query_gives_nan_and_affects_no_other(fault: float, rng: np.random.Generator) -> None:
    row = make_row(torch.float32, (6, 2, 2), 16, 300, (4, 250), 15, 3, 40)
    (row,) = with_sketches([row], rng)
    broken = replace(row, q=row.q.clone())
    broken.q[4, 5] = fault
    both, alone = run([broken, row]), run([row])
    assert torch.equal(both[1], alone[0])
    assert torch.equal(both[0, [0, 1, 2, 3, 5]], alone[0, [0, 1, 2, 3, 5]])
    assert both[0, 4].isnan().all()


@pytest.mark.parametrize("fault", [NAN, float("inf")])
@pytest.mark.parametrize("cap", [None, 30.0])
def test_a_non_finite_key_reaches_the_output_of_its_heads_only(fault: float, cap: float | None) -> None:
    """The heads that attend to it output NaN where the definition does: a cap makes infinity finite. Others do not."""
    row = make_row(torch.float32, (4, 2, 2), 16, 300, (4, 250), 15, 3, 40)
    broken = replace(row, context=row.context.clone())
    broken.context[0, 2, 0] = fault
    out, want = run([broken], logit_cap=cap)[0], broken.want(cap)
    assert want[:2].isnan().all()
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert torch.equal(out[2:], run([row], logit_cap=cap)[0, 2:])


def test_logits_of_minus_infinity_do_not_contribute() -> None:
    """This holds even where all logits of a range are minus infinity."""
    row = make_row(torch.float32, (2, 1, 1), 16, 700, (300, 700), 0, 3, 4)
    row.q.abs_()
    row.context[:, :300, 0] = -float("inf")
    torch.testing.assert_close(run([row])[0], row.want(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_rows_attention_in_place_has_the_same_bits_in_any_batch(num_threads: int, rng: np.random.Generator) -> None:
    rows = with_sketches(rows_of_all_kinds(), rng)
    alone = torch.cat([run([row]) for row in rows])
    assert torch.equal(run(rows, num_threads), alone)
    assert torch.equal(run(rows[::-1], num_threads).flip(0), alone)


def test_attention_in_place_equals_gathered_attention_and_a_merge() -> None:
    row = make_row(torch.float32, (6, 2, 2), 32, 400, (4, 300), 50, 9, 12)
    scale, q = 32**-0.5, row.q.view(1, 2, 3, 32)
    near = torch.cat([row.context[:, :4], row.context[:, 300:], row.tail[:, :9]], dim=1)[None]
    outs = []
    for head in range(2):
        far = row.context[head, row.kv_indices[head, : row.valid_len[head]].long()][None, None]
        part = q[:, head : head + 1]
        near_state = attend(part, near[:, head : head + 1, :, 0], near[:, head : head + 1, :, 1], scale)
        outs.append(merge_state(*near_state, *attend(part, far[..., 0, :], far[..., 1, :], scale))[0][0, 0])
    torch.testing.assert_close(run([row])[0], torch.cat(outs), rtol=1e-5, atol=1e-6)


def test_large_logits_do_not_overflow_in_place() -> None:
    row = make_row(torch.float32, (2, 1, 1), 16, 600, (4, 500), 300, 3, 4)
    row.q.mul_(200)
    torch.testing.assert_close(run([row])[0], row.want(), rtol=1e-4, atol=1e-4)
