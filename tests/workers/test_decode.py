"""One layer's step against attention over the same rows, with poison in every row that must not be read."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from csattn.attention import reference
from csattn.config import SearchConfig
from csattn.rest import moments_of
from csattn.rest import reference as rest_reference
from csattn.selection import Rest, Selection
from csattn.selectors import ContextView
from csattn.sketch import reference as sketch_reference
from offload.host_store import HostStore
from tests.sketch.synthetic import make_heads, make_sketch
from workers.decode import LayerDecoder, StepCount

CONTEXT_LEN, SINK_LEN, WINDOW_LEN, HEAD_DIM, SCALE = 70, 3, 8, 16, 0.25


class Chosen:
    """A selector that was told what to choose."""

    indexes_tail = True
    search_bytes = 7

    def __init__(self, selection):
        self.selection = selection
        self.appended, self.recent = [], []

    def append(self, k, v):
        self.appended.append(np.stack([k, v], axis=1))

    def select(self, q, recent):
        self.recent.append(recent.clone())
        return self.selection


def make_decoder(context, selector, ahead=None, rest=None):
    view = ContextView(CONTEXT_LEN, SCALE, SearchConfig(keep=0.1, sink_len=SINK_LEN, window_len=WINDOW_LEN))
    return LayerDecoder(0, HostStore([context]), selector, view, ahead, StepCount(), lambda: 0.0, rest=rest)


def poisoned_except(context, rows_by_head):
    poisoned = torch.full_like(context, torch.nan)
    always = [*range(SINK_LEN), *range(CONTEXT_LEN - WINDOW_LEN, CONTEXT_LEN)]
    for head, rows in enumerate(rows_by_head):
        keep = sorted({*always, *(row for row in rows if 0 <= row < CONTEXT_LEN)})
        poisoned[head, keep] = context[head, keep]
    return poisoned


@pytest.mark.parametrize("num_index_heads", [2, 6], ids=["shared by the group", "one per query head"])
@pytest.mark.parametrize("num_chosen", [0, 1, 5])
@pytest.mark.parametrize("tail_len", [1, WINDOW_LEN, WINDOW_LEN + 6])
def test_a_step_attends_to_exactly_the_resident_and_chosen_rows(num_index_heads, num_chosen, tail_len, rng) -> None:
    num_q_heads, num_kv_heads, top_k = 6, 2, 7
    context = torch.randn(num_kv_heads, CONTEXT_LEN, 2, HEAD_DIM)
    tail = torch.randn(num_kv_heads, tail_len, 2, HEAD_DIM)
    num_left = max(0, tail_len - WINDOW_LEN)  # rows of the tail that only a selection can bring back
    candidates = np.concatenate([np.arange(SINK_LEN, CONTEXT_LEN - WINDOW_LEN), CONTEXT_LEN + np.arange(num_left)])
    kv_indices = np.full((num_index_heads, top_k), -1, dtype=np.int32)
    valid_len = np.zeros(num_index_heads, dtype=np.int32)
    for head in range(num_index_heads):
        rows = rng.choice(candidates, num_chosen, replace=False)
        if num_left and num_chosen:
            rows[0] = CONTEXT_LEN + num_left - 1
        kv_indices[head, :num_chosen] = np.sort(np.unique(rows)) if num_chosen else rows
        valid_len[head] = num_chosen
    group = num_index_heads // num_kv_heads
    read = [set(kv_indices[h * group : (h + 1) * group].ravel().tolist()) for h in range(num_kv_heads)]

    selector = Chosen(Selection(kv_indices, valid_len))
    decoder = make_decoder(poisoned_except(context, read), selector)
    decoder.append(tail[:, :, 0], tail[:, :, 1])
    q = torch.randn(num_q_heads, 1, HEAD_DIM)
    out = decoder.attend(q, SCALE)

    kv = torch.cat([context, tail], dim=1)
    for head in range(num_q_heads):
        chosen = kv_indices[head * num_index_heads // num_q_heads]
        resident = [*range(SINK_LEN), *range(CONTEXT_LEN - WINDOW_LEN, CONTEXT_LEN)]
        resident += range(CONTEXT_LEN + num_left, CONTEXT_LEN + tail_len)
        rows = kv[head // 3, [*resident, *chosen[chosen >= 0].tolist()]]
        want, _ = reference.attend(q[None, head : head + 1], rows[None, None, :, 0], rows[None, None, :, 1], SCALE)
        torch.testing.assert_close(out[head], want[0, 0], rtol=1e-4, atol=1e-5)
    assert len(selector.appended) == num_left
    for row, kv in enumerate(selector.appended):
        np.testing.assert_array_equal(kv, tail[:, row].numpy())
    assert torch.equal(selector.recent[0], tail[:, num_left:])


@pytest.mark.parametrize("num_index_heads", [2, 6], ids=["shared by the group", "one per query head"])
def test_weights_shift_the_logits_of_selected_rows_and_the_rest_takes_its_share(num_index_heads, rng) -> None:
    """Over several tokens, whose selections differ in width."""
    num_q_heads, num_tokens = 6, 20
    context, tail = torch.randn(2, CONTEXT_LEN, 2, HEAD_DIM), torch.randn(2, num_tokens, 2, HEAD_DIM)
    chosen = []
    for _ in range(num_tokens):
        valid_len = rng.integers(0, 5, num_index_heads).astype(np.int32)
        kv_indices = np.full((num_index_heads, max(valid_len.max(), 1)), -1, np.int32)
        for head, valid in enumerate(valid_len):
            kv_indices[head, :valid] = np.sort(rng.choice(np.arange(SINK_LEN, 60), valid, replace=False))
        weights = np.where(kv_indices >= 0, rng.standard_normal(kv_indices.shape), 0).astype(np.float32)
        rest = Rest(rng.standard_normal((num_q_heads, HEAD_DIM), np.float32), rng.random(num_q_heads, np.float32))
        chosen.append(Selection(kv_indices, valid_len, weights, rest))
        chosen[-1].check(CONTEXT_LEN)

    class InTurn(Chosen):
        def select(self, q, recent):
            return chosen[len(self.appended) + recent.shape[1] - 1]

    decoder = make_decoder(context, InTurn(None))
    decoder.append(tail[:, :, 0], tail[:, :, 1])
    q = torch.randn(num_q_heads, num_tokens, HEAD_DIM)
    out = decoder.attend(q, SCALE)

    for token, selection in enumerate(chosen):
        for head in range(num_q_heads):
            index_head = head * num_index_heads // num_q_heads
            far = selection.kv_indices[index_head, : selection.valid_len[index_head]].tolist()
            near = [*range(SINK_LEN), *range(CONTEXT_LEN - WINDOW_LEN, CONTEXT_LEN)]
            own = tail[head // 3, max(0, token + 1 - WINDOW_LEN) : token + 1]
            rows = torch.cat([context[head // 3, far], context[head // 3, near], own])[None, None]
            weights = torch.zeros(rows.shape[2])
            weights[: len(far)] = torch.from_numpy(selection.log_weights[index_head, : len(far)])
            query = q[head, token][None, None, None]
            want, _ = reference.attend(query, rows[..., 0, :], rows[..., 1, :], SCALE, log_weights=weights)
            share = float(selection.rest.share[head])
            want = (1 - share) * want[0, 0, 0] + share * torch.from_numpy(selection.rest.out[head])
            torch.testing.assert_close(out[head, token], want, rtol=1e-4, atol=1e-5)


def test_a_search_submitted_ahead_is_the_one_that_is_used() -> None:
    context = torch.randn(2, CONTEXT_LEN, 2, HEAD_DIM)
    asked = []

    class Recorder(Chosen):
        def select(self, q, recent):
            asked.append((q.copy(), recent.shape[1]))
            return self.selection

    rows = np.array([[10, 11], [12, 13]], dtype=np.int32)
    with ThreadPoolExecutor(1) as ahead:
        decoder = make_decoder(context, Recorder(Selection(rows, np.array([2, 2], dtype=np.int32))), ahead)
        early, own = torch.randn(6, 1, HEAD_DIM), torch.randn(6, 1, HEAD_DIM)
        for _ in range(2):
            decoder.look_ahead(early)
            decoder.append(torch.randn(2, 1, HEAD_DIM), torch.randn(2, 1, HEAD_DIM))
            decoder.attend(own, SCALE)
        decoder.append(torch.randn(2, 1, HEAD_DIM), torch.randn(2, 1, HEAD_DIM))
        decoder.attend(own, SCALE)
    np.testing.assert_array_equal(asked[0][0], early[:, 0].numpy())
    np.testing.assert_array_equal(asked[2][0], own[:, 0].numpy())
    assert [num_recent for _, num_recent in asked] == [0, 1, 3], "ahead of its own row, a token sees those before it"


def test_an_error_in_a_search_ahead_reaches_the_step() -> None:
    class Failing(Chosen):
        def select(self, q, recent):
            raise RuntimeError("the index is gone")

    with ThreadPoolExecutor(1) as ahead:
        decoder = make_decoder(torch.randn(2, CONTEXT_LEN, 2, HEAD_DIM), Failing(None), ahead)
        decoder.look_ahead(torch.randn(6, 1, HEAD_DIM))
        decoder.append(torch.randn(2, 1, HEAD_DIM), torch.randn(2, 1, HEAD_DIM))
        with pytest.raises(RuntimeError, match="the index is gone"):
            decoder.attend(torch.randn(6, 1, HEAD_DIM), SCALE)


@pytest.mark.parametrize("num_index_heads", [2, 6], ids=["shared by the group", "one per query head"])
def test_an_estimate_of_the_rest_joins_by_its_log_sum_exp(num_index_heads, rng) -> None:
    """By the layer's own queries, and with the tail's rows that have left its window among those not chosen."""
    num_q_heads, num_tokens = 6, WINDOW_LEN + 4
    context, tail = torch.randn(2, CONTEXT_LEN, 2, HEAD_DIM), torch.randn(2, num_tokens, 2, HEAD_DIM)
    valid_len = rng.integers(0, 5, num_index_heads).astype(np.int32)
    kv_indices = np.full((num_index_heads, 5), -1, np.int32)
    for head, valid in enumerate(valid_len):
        kv_indices[head, :valid] = np.sort(rng.choice(np.arange(SINK_LEN, 60), valid, replace=False))
    chosen = Chosen(Selection(kv_indices, valid_len))
    num_middle = CONTEXT_LEN - SINK_LEN - WINDOW_LEN
    moments = moments_of([context[:, SINK_LEN : SINK_LEN + num_middle]])
    decoder = make_decoder(context, chosen, rest=moments)
    decoder.append(tail[:, :, 0], tail[:, :, 1])
    q = torch.randn(num_q_heads, num_tokens, HEAD_DIM)
    out = decoder.attend(q, SCALE)

    left = np.maximum(0, np.arange(1, num_tokens + 1) - WINDOW_LEN)
    counts = np.tile(valid_len, (num_tokens, 1))
    rest_out, rest_lse = rest_reference.estimate_rest(
        q.transpose(0, 1).numpy(), moments, counts, num_middle + left, SCALE
    )
    for token in range(num_tokens):
        for head in range(num_q_heads):
            index_head = head * num_index_heads // num_q_heads
            far = kv_indices[index_head, : valid_len[index_head]].tolist()
            near = [*range(SINK_LEN), *range(CONTEXT_LEN - WINDOW_LEN, CONTEXT_LEN)]
            rows = torch.cat(
                [context[head // 3, far], context[head // 3, near], tail[head // 3, left[token] : token + 1]]
            )
            logits = SCALE * rows[:, 0] @ q[head, token]
            values = torch.cat([rows[:, 1], torch.from_numpy(rest_out[token, head])[None]])
            weights = torch.cat([logits, torch.tensor([rest_lse[token, head]])]).softmax(0)
            torch.testing.assert_close(out[head, token], weights @ values, rtol=1e-4, atol=1e-5)
    assert decoder._count.search_bytes == num_tokens * (chosen.search_bytes + moments.table.nbytes)


def test_the_rest_is_attended_to_by_codes(rng) -> None:
    """All rows between sinks and window that are not chosen; the tail's have no codes, and chosen ones are exact."""
    num_q_heads, num_kv_heads, num_tokens = 6, 2, WINDOW_LEN + 4
    q, k, v = make_heads(rng, num_kv_heads, num_q_heads // num_kv_heads, CONTEXT_LEN, HEAD_DIM)
    sketch = make_sketch(q, k, v, num_fine=1, num_coarse=0)
    context = torch.from_numpy(np.stack([k, v], axis=2))
    tail = torch.randn(num_kv_heads, num_tokens, 2, HEAD_DIM)
    valid_len = np.array([5, 3], np.int32)
    kv_indices = np.array([[4, 9, 33, 61, CONTEXT_LEN], [3, 40, CONTEXT_LEN + 1, -1, -1]], np.int32)
    chosen = Chosen(Selection(kv_indices, valid_len))
    read = [[row for row in rows if 0 <= row < CONTEXT_LEN] for rows in kv_indices.tolist()]
    decoder = make_decoder(poisoned_except(context, read), chosen, rest=sketch)
    decoder.append(tail[:, :, 0], tail[:, :, 1])
    asked = torch.from_numpy(q[:, :num_tokens])
    out = decoder.attend(asked, SCALE)

    is_rest = np.zeros((num_kv_heads, CONTEXT_LEN), np.bool_)
    is_rest[:, SINK_LEN : CONTEXT_LEN - WINDOW_LEN] = True
    for head, rows in enumerate(read):
        is_rest[head, rows] = False
    for token in range(num_tokens):
        rest_out, rest_lse = sketch_reference.attend_rest(asked[:, token].numpy(), sketch, is_rest, SCALE)
        for head in range(num_q_heads):
            far, of_tail = read[head // 3], [int(row) for row in kv_indices[head // 3] if row >= CONTEXT_LEN]
            near = [*range(SINK_LEN), *range(CONTEXT_LEN - WINDOW_LEN, CONTEXT_LEN)]
            own = [*(row - CONTEXT_LEN for row in of_tail), *range(max(0, token + 1 - WINDOW_LEN), token + 1)]
            rows = torch.cat([context[head // 3, far], context[head // 3, near], tail[head // 3, own]])
            logits = SCALE * rows[:, 0] @ asked[head, token]
            weights = torch.cat([logits, torch.tensor([rest_lse[head]])]).softmax(0)
            want = weights @ torch.cat([rows[:, 1], torch.from_numpy(rest_out[head])[None]])
            torch.testing.assert_close(out[head, token], want, rtol=1e-3, atol=1e-3)
    assert decoder._count.search_bytes == num_tokens * (chosen.search_bytes + sketch.num_bytes)
