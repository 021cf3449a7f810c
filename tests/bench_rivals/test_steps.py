"""Whole steps of the rivals attend as their selectors are defined."""

import pytest
import torch

from bench.decode.rivals.choosers import PqChooser, SparqChooser
from bench.decode.rivals.chosen import ChosenSteps
from bench.decode.rivals.chosen_on_device import PqOnDeviceSteps, choose_rows
from bench.decode.rivals.heavy import HeavySteps, heavy_rows
from bench.decode.rivals.sampled import HashedLayer, SampledSteps
from csattn.batch import StepRows, make_device_selection, make_step_rows
from csattn.config import SearchConfig
from csattn.selectors import ContextLayer
from csattn.selectors.h2o import PreparedH2o
from csattn.selectors.magicpig import PreparedMagicpig
from csattn.selectors.pqcache import PreparedPqcache
from csattn.selectors.sparq import PreparedSparq
from offload.pinned import PinnedRows
from tests.bench_rivals.layers import (
    DEVICE,
    HEAD_DIM,
    NUM_KV_HEADS,
    SCALE,
    assert_best_by_codes,
    bits_of,
    make_layer,
    make_queries,
    make_view,
)
from workers.engine import CachedRows, EngineShape


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
