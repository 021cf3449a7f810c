"""The kernels of the selectors that csattn is compared with choose and attend as their definitions say."""

import numpy as np
import pytest
import torch

from bench.decode.rivals import best_rows
from bench.decode.rivals.choosers import PqChooser, SparqChooser
from bench.decode.rivals.chosen import ChosenSteps
from bench.decode.rivals.chosen_on_device import PqOnDeviceSteps, choose_rows
from bench.decode.rivals.heavy import HeavySteps, heavy_rows
from bench.decode.rivals.magicpig import SampledAttention
from bench.decode.rivals.pqcache import PqSearch
from bench.decode.rivals.sampled import HashedLayer, SampledSteps
from bench.decode.rivals.sparq import SparqSearch
from csattn.batch import StepRows, make_device_selection, make_step_rows
from csattn.config import SearchConfig
from csattn.cpu.team import Team
from csattn.selectors import ContextLayer, ContextView
from csattn.selectors.h2o import PreparedH2o
from csattn.selectors.magicpig import PreparedMagicpig
from csattn.selectors.pqcache import PreparedPqcache
from csattn.selectors.sparq import PreparedSparq
from offload.pinned import PinnedRows
from workers.engine import CachedRows, EngineShape

NUM_KV_HEADS, HEAD_DIM = 2, 64
SCALE = HEAD_DIM**-0.5
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # of Triton's kernels, or its interpreter


@pytest.fixture(scope="module")
def team():
    with Team(2) as team:
        yield team


def make_layer(context_len: int, group_size: int, seed: int = 0) -> ContextLayer:
    """Keys with a mean of their own, in bfloat16 as in host memory."""
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(NUM_KV_HEADS, context_len, 2, HEAD_DIM, generator=generator)
    kv[:, :, 0] += torch.randn(NUM_KV_HEADS, 1, HEAD_DIM, generator=generator)
    keys, values = kv.bfloat16().unbind(2)
    return ContextLayer(keys, values, NUM_KV_HEADS * group_size, lambda: torch.zeros(0))


def make_view(context_len: int, keep: float) -> ContextView:
    return ContextView(context_len, SCALE, SearchConfig(keep=keep, sink_len=4, window_len=16))


def make_queries(group_size: int) -> torch.Tensor:
    return torch.randn(NUM_KV_HEADS * group_size, HEAD_DIM, generator=torch.Generator().manual_seed(5)) * 3


def give_room(told, top_k: int) -> None:
    told["kv_indices"] = np.full((NUM_KV_HEADS, top_k), -7, np.int32)
    told["valid_len"] = np.zeros(NUM_KV_HEADS, np.int32)


def bits_of(x: torch.Tensor) -> np.ndarray:
    return x.contiguous().view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize(("context_len", "keep"), [(40, 0.3), (3000, 0.05), (20_011, 0.05)])
@pytest.mark.parametrize("ties", [False, True])
def test_the_best_rows_are_chosen_and_of_equal_ones_the_first(team, rng, context_len, keep, ties):
    told, view = best_rows.Told(best_rows.CHOICE), make_view(context_len, keep)
    best_rows.tell_choice(told, NUM_KV_HEADS, 1, context_len, view.middle, view.top_k)
    give_room(told, view.top_k)
    tape = best_rows.Tape()
    best_rows.add_choice(tape, told, NUM_KV_HEADS, context_len)
    high = 5 if ties else 2**31 - 1
    worth = rng.integers(-high, high, (NUM_KV_HEADS, context_len)).astype(np.int32)
    told["worth"][:] = 2**31 - 1  # behind the keys: must not be chosen
    told["worth"][:, :context_len] = worth
    team.run(tape)
    for head in range(NUM_KV_HEADS):
        middle = np.arange(view.middle.start, view.middle.stop)
        order = middle[np.argsort(-worth[head, middle].astype(np.int64), kind="stable")]
        want = np.sort(order[: view.top_k])
        assert told["valid_len"][head] == len(want)
        np.testing.assert_array_equal(told["kv_indices"][head, : len(want)], want)


def test_a_sample_that_misleads_changes_nothing(team):
    """Every sampled key is among the best, so that the first guess is far too high."""
    context_len, top_k = 40_000, 4000
    told = best_rows.Told(best_rows.CHOICE)
    best_rows.tell_choice(told, NUM_KV_HEADS, 1, context_len, slice(0, context_len), top_k)
    give_room(told, top_k)
    tape = best_rows.Tape()
    best_rows.add_choice(tape, told, NUM_KV_HEADS, context_len)
    worth = np.zeros(context_len, np.int32)
    worth[:: context_len // best_rows.SAMPLE] = 1000
    told["worth"][:, :context_len] = worth
    team.run(tape)
    want = np.sort(np.argsort(-worth, kind="stable")[:top_k])
    np.testing.assert_array_equal(told["kv_indices"], np.stack([want] * NUM_KV_HEADS))


@pytest.mark.parametrize(("context_len", "group_size"), [(37, 3), (500, 1), (9001, 4), (700, 7)])
def test_pqcache_chooses_as_defined(team, context_len, group_size):
    layer, view, q = make_layer(context_len, group_size), make_view(context_len, 0.1), make_queries(group_size)
    prepared = PreparedPqcache(layer, num_centroids=16, num_iterations=2)
    shape, (_, num_subspaces, num_centroids, _) = (NUM_KV_HEADS, group_size, HEAD_DIM), prepared.centroids.shape
    search = PqSearch(shape, context_len, view.middle, view.top_k, SCALE, num_subspaces, num_centroids)
    give_room(search.told, view.top_k)
    search.told["q"] = q.numpy()
    search.told["centroids"], search.told["codes"] = prepared.centroids.numpy(), prepared.codes.numpy()
    for _ in range(2):
        team.run(search.tape)
        assert_best_by_codes(prepared, view, q, search.told["kv_indices"], search.told["valid_len"])


def assert_best_by_codes(prepared: PreparedPqcache, view: ContextView, q: torch.Tensor, kv_indices, valid_len) -> None:
    """As many rows as the selector takes, and no other is worth more, rounding aside; ascending, -1 padded."""
    chosen = prepared.selector(view).select(q.numpy(), torch.empty(NUM_KV_HEADS, 0, 2, HEAD_DIM))
    np.testing.assert_array_equal(valid_len, chosen.valid_len)
    centroids = prepared.centroids.double()
    told = [centroids[:, b][torch.arange(NUM_KV_HEADS)[:, None], prepared.codes[:, :, b].long()] for b in range(2)]
    grouped = q.double().view(NUM_KV_HEADS, -1, HEAD_DIM)
    worth = (grouped @ torch.cat(told, dim=2).mT * SCALE).softmax(-1).sum(1).numpy()
    for head, num_chosen in enumerate(valid_len):
        rows = kv_indices[head, :num_chosen]
        assert (np.diff(rows) > 0).all() and (kv_indices[head, num_chosen:] == -1).all()
        others = np.setdiff1d(np.arange(view.middle.start, view.middle.stop), rows)
        assert len(others) == view.middle.stop - view.middle.start - num_chosen
        assert worth[head, rows].min() >= worth[head, others].max(initial=0) * (1 - 1e-4)


@pytest.mark.parametrize(("context_len", "group_size", "tail_len"), [(37, 3, 1), (500, 1, 17), (9001, 4, 33)])
def test_sparq_chooses_and_estimates_as_defined(team, context_len, group_size, tail_len):
    layer, view, q = make_layer(context_len, group_size), make_view(context_len, 0.1), make_queries(group_size)
    recent = torch.randn(NUM_KV_HEADS, tail_len, 2, HEAD_DIM).bfloat16()
    prepared = PreparedSparq(layer, num_components=8)
    capacity = 48
    shape = NUM_KV_HEADS, group_size, HEAD_DIM
    search = SparqSearch(shape, context_len, view.middle, view.top_k, SCALE, 8, capacity)
    give_room(search.told, view.top_k)
    tail = torch.full((NUM_KV_HEADS, HEAD_DIM, capacity), torch.nan, dtype=torch.bfloat16)
    tail[:, :, :tail_len] = recent[:, :, 0].mT
    told = search.told
    told["q"], told["channels"], told["tail_channels"] = q.numpy(), bits_of(layer.keys.mT), bits_of(tail)
    told["tail_len"] = tail_len
    for _ in range(2):
        team.run(search.tape)
        want = prepared.selector(view).select(q.numpy(), recent)
        np.testing.assert_array_equal(told["valid_len"], want.valid_len)
        np.testing.assert_array_equal(told["kv_indices"], want.kv_indices)
        np.testing.assert_allclose(told["shares"].flatten(), want.rest.share, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("context_len", "group_size"), [(40, 1), (700, 3), (9001, 4)])
def test_magicpig_attends_to_what_is_sampled_as_defined(team, context_len, group_size):
    layer, view, q = make_layer(context_len, group_size), make_view(context_len, 0.1), make_queries(group_size)
    prepared = PreparedMagicpig(layer, num_bits=6, num_tables=20)
    shape = NUM_KV_HEADS, group_size, HEAD_DIM
    sampled = SampledAttention(shape, context_len, view.middle, SCALE, 6, 20, team.num_threads)
    told = sampled.told
    kv = torch.stack([layer.keys, layer.values], dim=2).contiguous()
    told["q"], told["codes"], told["kv"] = q.numpy(), prepared.hash(q).contiguous().numpy(), bits_of(kv)
    told["rows"], told["starts"] = prepared.rows.numpy(), prepared.starts.numpy()
    told["key_mean"] = prepared.key_mean[:, 0].contiguous().numpy()
    told["norms"] = (layer.keys.float() - prepared.key_mean).norm(dim=-1).numpy()
    told["out"] = np.full((len(q), HEAD_DIM + 2), np.nan, np.float32)
    want = prepared.selector(view).select(q.numpy(), torch.empty(NUM_KV_HEADS, 0, 2, HEAD_DIM))
    for _ in range(2):  # the second finds counters that the first has cleared
        team.run(sampled.tape)
        for head in range(len(q)):
            rows = want.kv_indices[head, : want.valid_len[head]]
            num_sampled = told["num_sampled"][head]
            np.testing.assert_array_equal(np.sort(told["sampled"][head, :num_sampled]), rows)
            acc, (top, total) = np.split(told["out"][head], [HEAD_DIM])
            if len(rows) == 0:
                assert total == 0
                continue
            near = kv[head // group_size, torch.from_numpy(rows).long()].double()
            logits = near[:, 0] @ q[head].double() * SCALE + torch.from_numpy(want.log_weights[head, : len(rows)])
            np.testing.assert_allclose(acc / total, logits.softmax(0) @ near[:, 1], rtol=2e-3, atol=2e-3)
            np.testing.assert_allclose(top + np.log(total), logits.logsumexp(0), rtol=1e-3, atol=1e-3)


def make_shape(context_len: int, batch_size: int, group_size: int, dtype: torch.dtype, top_k: int = 8) -> EngineShape:
    return EngineShape(
        num_layers=2,
        num_q_heads=NUM_KV_HEADS * group_size,
        num_kv_heads=NUM_KV_HEADS,
        num_index_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=dtype,
        softmax_scale=SCALE,
        search=SearchConfig(keep=top_k / context_len, sink_len=4, window_len=16),
        max_context_len=context_len,
        batch_sizes=(batch_size,),
        num_contexts=batch_size,
        num_tails=batch_size,
        tail_capacity=80,
    )


def make_rows(batch_size: int, tail_lens: list[int]) -> StepRows:
    rows = make_step_rows(batch_size, DEVICE)
    rows.context_ids.copy_(torch.arange(batch_size))
    rows.tail_ids.copy_(torch.arange(batch_size))
    rows.tail_lens.copy_(torch.tensor(tail_lens))
    return rows


@pytest.mark.parametrize("group_size", [1, 3, 4])
def test_h2o_attends_to_what_is_left_and_keeps_book_as_defined(group_size):
    """Against the selector, whose rows the definition of attention gets; the last row of the step is idle."""
    context_len, batch_size, tail_lens = 300, 3, [5, 70, 0]
    shape, view = make_shape(context_len, batch_size, group_size, torch.float16), make_view(context_len, 0.1)
    tails = torch.randn(2, batch_size, NUM_KV_HEADS, 80, 2, HEAD_DIM).half()
    received = torch.rand(batch_size, NUM_KV_HEADS * group_size, context_len)
    kv = torch.randn(batch_size, NUM_KV_HEADS, context_len, 2, HEAD_DIM).half()
    kept_ids = [heavy_rows(r.view(NUM_KV_HEADS, group_size, -1).sum(1), view.middle, view.top_k) for r in received]
    steps = HeavySteps(shape, kept_ids[0].shape[1], DEVICE)
    steps.tails.copy_(tails)
    selectors = []
    for context, ids in enumerate(kept_ids):
        layer = ContextLayer(*kv[context].unbind(2), NUM_KV_HEADS * group_size, lambda c=context: received[c])
        book = received[context].view(NUM_KV_HEADS, group_size, -1).sum(1).gather(1, ids)
        steps.load(context, 1, kv[context][torch.arange(NUM_KV_HEADS)[:, None], ids], book)
        selectors.append(PreparedH2o(layer).selector(view))
    before = steps.received[1, 2].clone()
    rows = make_rows(batch_size, tail_lens)
    rows.context_ids[2] = -1
    for _ in range(3):
        q = torch.randn(batch_size, NUM_KV_HEADS * group_size, HEAD_DIM).half() * 2
        out = torch.empty_like(q, device=DEVICE)
        steps.attend(1, q.to(DEVICE), rows, out)
        for row in range(2):
            recent = tails[1, row, :, : tail_lens[row]]
            selectors[row].select(q[row].float().numpy(), recent)
            kept = kv[row][torch.arange(NUM_KV_HEADS)[:, None], kept_ids[row]]
            everything = torch.cat([kept, recent], dim=1).float()
            grouped = q[row].float().view(NUM_KV_HEADS, group_size, HEAD_DIM)
            weights = (grouped @ everything[:, :, 0].mT * SCALE).softmax(-1)
            want = (weights @ everything[:, :, 1]).view(-1, HEAD_DIM)
            torch.testing.assert_close(out[row].cpu().float(), want, rtol=5e-3, atol=5e-3)
            booked = steps.received[1, row, :, : view.top_k].cpu()
            torch.testing.assert_close(booked, selectors[row]._received, rtol=1e-3, atol=1e-4)
    assert torch.equal(steps.received[1, 2], before) and not steps.received[0].any()


def test_magicpig_merges_what_is_sampled_with_what_is_near(team):
    """The device's side in float16: Triton's interpreter cannot multiply bfloat16."""
    context_len, batch_size, group_size, tail_lens = 700, 2, 3, [3, 80]
    shape, view = make_shape(context_len, batch_size, group_size, torch.float16), make_view(context_len, 0.1)
    layers = [make_layer(context_len, group_size, seed) for seed in range(batch_size)]
    prepared = [PreparedMagicpig(layer, num_bits=6, num_tables=20) for layer in layers]
    kv = [torch.stack([layer.keys, layer.values], dim=2).contiguous() for layer in layers]
    resident = torch.tensor([*range(view.middle.start), *range(view.middle.stop, context_len)])
    steps = SampledSteps(shape, prepared[0].projections.to(DEVICE), 20, view.middle, len(resident), team)
    steps.tails.copy_(torch.randn(steps.tails.shape))
    for context, of_context in enumerate(prepared):
        norms = (layers[context].keys.float() - of_context.key_mean).norm(dim=-1).numpy()
        mean = of_context.key_mean[:, 0].contiguous().numpy()
        rows_, starts = of_context.rows.numpy(), of_context.starts.numpy()
        hashed = HashedLayer(bits_of(kv[context]), rows_, starts, mean, norms)
        steps.load(context, [hashed] * 2, [kv[context][:, resident]] * 2)
    rows = make_rows(batch_size, tail_lens)
    q_there = torch.zeros(batch_size, NUM_KV_HEADS * group_size, HEAD_DIM, dtype=torch.float16, device=DEVICE)
    out_there = torch.empty_like(q_there)
    for _ in range(2):  # on a GPU the second one is a replay
        q_there.copy_(torch.randn(q_there.shape) * 2)
        steps.begin_step(rows)
        steps.attend(1, q_there, rows, out_there)
    q, out = q_there.cpu(), out_there.cpu()
    for row in range(batch_size):
        tail = steps.tails[1, row, :, : tail_lens[row]].cpu()
        chosen = prepared[row].selector(view).select(q[row].float().numpy(), tail)
        for head in range(NUM_KV_HEADS * group_size):
            near = torch.cat([kv[row][head // group_size, resident], tail[head // group_size]]).double()
            ids = torch.from_numpy(chosen.kv_indices[head, : chosen.valid_len[head]]).long()
            far = kv[row][head // group_size, ids].double()
            raised = torch.from_numpy(chosen.log_weights[head, : len(ids)]).double()
            q_head = q[row, head].double()
            logits = torch.cat([near[:, 0] @ q_head * SCALE, far[:, 0] @ q_head * SCALE + raised])
            want = logits.softmax(0) @ torch.cat([near[:, 1], far[:, 1]])
            torch.testing.assert_close(out[row, head].double(), want, rtol=2e-2, atol=2e-2)
    assert len(steps.search_us) == 2 and steps.num_sampled > 0


def test_pqcache_on_the_device_chooses_as_defined():
    context_len, group_size = 900, 3
    layer, view, q = make_layer(context_len, group_size), make_view(context_len, 0.1), make_queries(group_size)
    prepared = PreparedPqcache(layer, num_centroids=64, num_iterations=2)
    shape = make_shape(context_len, 1, group_size, torch.bfloat16, view.top_k)
    selection = make_device_selection(1, NUM_KV_HEADS, view.top_k, torch.device("cpu"))
    codes = prepared.codes.permute(2, 0, 1).contiguous()
    choose_rows(q[None], prepared.centroids, codes, view.middle, shape, selection)
    assert_best_by_codes(prepared, view, q, selection.kv_indices[0].numpy(), selection.valid_len[0].numpy())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sparq", "pqcache", "pqcache on the GPU"])
def test_whole_steps_attend_to_what_is_defined(team, name):
    """Two requests of one context, four steps: again over rows that the slot cache has, and with longer tails."""
    device = torch.device("cuda")
    context_len, batch_size, group_size, top_k = 3000, 2, 4, 150
    shape = make_shape(context_len, batch_size, group_size, torch.bfloat16, top_k)
    layer, view = make_layer(context_len, group_size), make_view(context_len, top_k / context_len)
    pinned = PinnedRows([torch.stack([layer.keys, layer.values], dim=2).contiguous() for _ in range(2)])
    far = CachedRows(shape, 600, device)
    if name == "sparq":
        prepared = PreparedSparq(layer, num_components=16)
        sums = [layer.values.sum(1, dtype=torch.float32)] * 2
        chooser = SparqChooser(shape, view.middle, [bits_of(layer.keys.mT)] * 2, sums, 16, team)
        steps = ChosenSteps(shape, far, chooser, device)
    elif name == "pqcache":
        prepared = PreparedPqcache(layer, num_iterations=2)
        centroids, codes = [prepared.centroids.numpy()] * 2, [prepared.codes.numpy()] * 2
        steps = ChosenSteps(shape, far, PqChooser(shape, view.middle, centroids, codes, team), device)
    else:
        prepared = PreparedPqcache(layer, num_iterations=2)
        codes = [prepared.codes.permute(2, 0, 1).contiguous().pin_memory()] * 2
        steps = PqOnDeviceSteps(shape, far, view.middle, [prepared.centroids.to(device)] * 2, codes, device)
    for context in range(batch_size):
        far.load(context, pinned)
        steps.load(context, pinned.layers)
    selectors = [prepared.selector(view) for _ in range(batch_size)]
    kv = pinned.layers[0]
    resident = torch.tensor([*range(view.middle.start), *range(view.middle.stop, context_len)])
    q_on_device, out = (
        torch.empty(batch_size, NUM_KV_HEADS * group_size, HEAD_DIM, dtype=torch.bfloat16, device=device)
        for _ in range(2)
    )
    rows = make_rows(batch_size, [0, 0])
    for tail_len in (1, 2, 3, 4):
        q = torch.randn(q_on_device.shape).bfloat16() * 2
        q_on_device.copy_(q)
        steps.tails[:, :, :, tail_len - 1].copy_(torch.randn(steps.tails[:, :, :, 0].shape))
        rows.tail_lens.fill_(tail_len)
        steps.begin_step(rows)
        for layer_idx in range(2):
            steps.attend(layer_idx, q_on_device, rows, out)
        for row in range(batch_size):
            recent = steps.tails[1, row, :, :tail_len].cpu()
            chosen = selectors[row].select(q[row].float().numpy(), recent)
            ids = torch.from_numpy(chosen.kv_indices).long()
            picked = kv[torch.arange(NUM_KV_HEADS)[:, None], ids]
            everything = torch.cat([kv[:, resident], picked, recent], dim=1).float()
            grouped = q[row].float().view(NUM_KV_HEADS, group_size, HEAD_DIM)
            want = (grouped @ everything[:, :, 0].mT * SCALE).softmax(-1) @ everything[:, :, 1]
            want = want.view(-1, HEAD_DIM)
            if chosen.rest is not None:
                share = torch.from_numpy(chosen.rest.share)[:, None]
                want = (1 - share) * want + share * torch.from_numpy(chosen.rest.out)
            torch.testing.assert_close(out[row].cpu().float(), want, rtol=2e-2, atol=2e-2)
