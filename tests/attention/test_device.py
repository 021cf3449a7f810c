"""Attention to a step's rows on the device agrees with the definition, and a row's bits depend on that row alone."""

from dataclasses import replace

import pytest
import torch

from csattn.attention import device, device_blocks, reference
from csattn.attention.device import DeviceAttention, make_row_source
from csattn.attention.device_reference import merge_own
from csattn.batch import DeviceSelection
from csattn.cuda import limits
from csattn.errors import ConfigError
from csattn.reach import Reach
from tests.ampere import skip_where_refused
from tests.attention.device_steps import OnDevice, Shape, Step, assert_close, attend_on_device, make_kv, make_step
from tests.cuda_on_cpu import emulated
from tests.cuda_on_cpu.emulated import DEVICE, crossed

CONTEXTS = [(300, 20), (77, 40), (500, 1)]  # context_len and resident_len
# context, tail_len, top_k
MIXED = [(0, 5, 100), (1, 24, 17), (-1, 0, 0), (2, 1, 64), (0, 0, 1), (1, 3, 0), (-1, 20, 0)]
LONG = Shape(num_q_heads=8, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16, max_top_k=9000)
LONG_CONTEXTS = [(12000, 40), (3000, 17), (20000, 40)]
LONG_BATCH = [(0, 24, 9000), (1, 9, 1300), (-1, 0, 0), (2, 0, 4096), (2, 24, 129)]
if DEVICE.type == "cpu":  # emulated steps are shorter
    LONG = replace(LONG, head_dim=32)
    LONG_BATCH = [(0, 24, 2000), (1, 9, 1300), (-1, 0, 0), (2, 0, 1024), (2, 24, 129)]


@pytest.fixture(autouse=True)
def kernels(emulator: emulated.Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate the kernels on the CPU if there is no device."""
    emulator.stand_in(monkeypatch, device, multiprocessors=5)


def test_the_definition_for_any_placement_of_rows_is_attention_over_all_of_them() -> None:
    shape = Shape(dtype=torch.float64, max_top_k=50)
    kv, q = make_kv(shape, 90), torch.randn(1, shape.num_q_heads, shape.head_dim).double()
    step = make_step(shape, [(90, 30)], [(0, 10, 50)])
    step.far[0][:, :50], step.spill[0][:, :50] = kv[:, :50], kv[:, :50]
    step.resident[0].copy_(kv[:, 50:80])
    step.tails[0, :, :10] = kv[:, 80:]
    ids = torch.randperm(50).int()
    ids[::7] = -2 - ids[::7]
    selection = DeviceSelection(ids.repeat(1, 2, 1), torch.full((1, 2), 50, dtype=torch.int32))
    packed = q.view(1, shape.num_kv_heads, -1, shape.head_dim)
    want, _ = reference.attend(packed, kv[None, :, :, 0], kv[None, :, :, 1], shape.softmax_scale)
    got = replace(step, q=q, far_rows=selection).wanted()
    torch.testing.assert_close(got.view(packed.shape), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 256])
def test_device_attention_applies_logit_cap_and_sinks(dtype: torch.dtype, head_dim: int) -> None:
    step = make_step(Shape(dtype=dtype, head_dim=head_dim), CONTEXTS, MIXED, num_spilled=5)
    step = replace(step, q=4 * step.q, logit_cap=2.5, sinks=4 + torch.randn(8))
    want, got = step.wanted(), attend_on_device(step)
    assert_close(got, want)
    for without in ({"logit_cap": None}, {"sinks": None}):
        assert not torch.allclose(replace(step, **without).wanted(), want, atol=0.05)
    assert not got[2].any(), "an idle row"


@pytest.mark.parametrize(
    "reach", [Reach(num_rows=1), Reach(num_rows=23), Reach(num_rows=9, chunked=True), Reach(num_rows=500)]
)
def test_device_attention_reads_only_rows_within_reach(reach: Reach) -> None:
    """Attention reads the rows of the context and of the tail that are within reach, and no others."""
    lens = [300, 77, 500]
    contexts = [(length, min(length, reach.num_rows)) for length in lens]
    step = replace(make_step(Shape(), contexts, [(context, n, 0) for context, n, _ in MIXED]), reach=reach)
    unseen = [torch.ones(resident, dtype=torch.bool) for _, resident in contexts]
    for b, (context, tail_len, _) in enumerate(MIXED):
        step.rows.tail_lens[b] = tail_len = max(tail_len, 1)
        context_len = lens[context] if context >= 0 else 0
        step.rows.positions[b] = position = context_len + tail_len - 1
        first = reach.first_seen(position) - context_len
        if context >= 0:
            unseen[context][max(0, len(unseen[context]) + first) :] = False
        tail = step.tails[step.rows.tail_ids[b]]
        tail[:, :tail_len] = torch.randn(tail[:, :tail_len].shape)
        tail[:, : max(0, first)] = torch.nan
    for rows, of_context in zip(step.resident, unseen, strict=True):
        rows[:, of_context] = torch.nan
    want = step.wanted()
    assert want.isfinite().all()
    assert_close(attend_on_device(step), want)


def test_rows_that_attend_to_nothing_are_zero_in_the_definition() -> None:
    step = make_step(Shape(), [(9, 0)], [(-1, 0, 0), (0, 0, 0)])
    assert not step.wanted().any()


def test_a_row_source_holds_addresses_and_lengths() -> None:
    contexts = [make_kv(Shape(), num_rows) for num_rows in (7, 3)]
    source = make_row_source(contexts, torch.device("cpu"))
    assert source.addresses.tolist() == [kv.data_ptr() for kv in contexts]
    assert source.rows_per_head.tolist() == [7, 3]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_q_heads": 7}, "do not divide into groups"),
        ({"num_index_heads": 4}, "do not divide into groups"),
        ({"head_dim": 72}, "multiples of 16 up to 512"),
        ({"head_dim": 528}, "multiples of 16 up to 512"),
        ({"dtype": torch.float64}, "not torch.float64"),
    ],
)
def test_head_shapes_and_dtypes_that_the_kernel_does_not_support_are_refused(
    changed: dict[str, object], message: str
) -> None:
    plan: dict[str, object] = {"num_q_heads": 8, "num_kv_heads": 2, "num_index_heads": 2, "head_dim": 64}
    plan |= {"dtype": torch.float32, "batch_size": 1, "max_top_k": 1, "tail_capacity": 1}
    with pytest.raises(ConfigError, match=message):
        DeviceAttention(**plan | changed, softmax_scale=1.0, device=torch.device("cuda"))  # type: ignore[arg-type]


@pytest.mark.large_gpu
def test_wide_heads_are_split_over_blocks_if_one_has_too_little_shared_memory() -> None:
    assert device_blocks.num_shares(8, 512, torch.float32, "moments") == 2
    for dtype, rest in ((torch.float32, "sketch"), (torch.bfloat16, "moments")):
        assert device_blocks.num_shares(8, 512, dtype, rest) == 1
        blocks = device_blocks.plan_blocks(132, 1, 1, 8, 512, dtype, rest, 8)
        assert blocks.shared_bytes <= limits().block_bytes and blocks.num_splits >= 3


def test_blocks_of_a_small_gpu_take_fewer_heads_to_fit_shared_memory(as_ampere: None) -> None:
    for head_dim, dtype in ((192, torch.bfloat16), (512, torch.bfloat16), (256, torch.float32)):
        for rest in ("none", "moments", "sketch"):
            shares = device_blocks.num_shares(8, head_dim, dtype, rest)
            blocks = device_blocks.plan_blocks(132, shares, shares, 8 // shares, head_dim, dtype, rest, 8)
            assert blocks.shared_bytes <= limits().block_bytes
    wide = Shape(num_q_heads=8, num_kv_heads=1, num_index_heads=1, head_dim=512, dtype=torch.bfloat16)
    step = make_step(wide, [(90, 30)], [(0, 5, 9)])
    assert_close(attend_on_device(step), step.wanted())
    with pytest.raises(
        ConfigError, match=r"too little shared memory for a head of 512 .* choose bfloat16, or decode on the CPU"
    ):
        device_blocks.num_shares(1, 512, torch.float32, "none")


SHAPES = [(8, 2, 8, 64), (7, 1, 1, 80), (16, 2, 2, 256), (16, 2, 2, 512), (9, 3, 3, 64), (8, 2, 2, 128), (2, 2, 2, 16)]
SHAPES += [(24, 2, 2, 64), (11, 1, 1, 16)]  # groups of several units each


@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "num_index_heads", "head_dim", "dtype"),
    crossed(SHAPES, [torch.float32, torch.float16, torch.bfloat16]),
)
def test_device_attention_equals_the_definition(
    num_q_heads: int, num_kv_heads: int, num_index_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    skip_where_refused(head_dim, dtype)
    shape = Shape(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        num_index_heads=num_index_heads,
        head_dim=head_dim,
        dtype=dtype,
    )
    step = make_step(shape, CONTEXTS, MIXED, num_spilled=3)
    assert_close(attend_on_device(step), step.wanted())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_device_attention_over_several_splits_equals_the_definition(dtype: torch.dtype) -> None:
    step = make_step(replace(LONG, dtype=dtype), LONG_CONTEXTS, LONG_BATCH, num_spilled=20)
    assert_close(attend_on_device(step), step.wanted())


@pytest.mark.large_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_more_parts_than_a_block_has_tiles_equals_the_definition(
    dtype: torch.dtype, emulator: emulated.Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator.stand_in(monkeypatch, device, multiprocessors=60)
    shape = Shape(num_q_heads=16, num_kv_heads=2, num_index_heads=2, head_dim=256, dtype=dtype, max_top_k=900)
    blocks = device_blocks.plan_blocks(60, 2, 2, 8, 256, dtype, "none", 2000)
    assert blocks.num_splits == device_blocks.ENOUGH_PARTS
    step = make_step(shape, [(2000, 40)], [(0, 24, 900)], num_spilled=20)
    assert_close(attend_on_device(step), step.wanted())


@pytest.mark.large_gpu
@pytest.mark.parametrize("num_segments", [1, 5, 16])
def test_each_sketch_segment_has_a_rest_part_even_for_wide_heads(num_segments: int) -> None:
    for heads, head_dim, row_units in ((4, 128, 8), (8, 128, 4), (8, 64, 8), (2, 128, 16), (6, 256, 4), (8, 256, 2)):
        blocks = device_blocks.plan_blocks(
            132, row_units, row_units, heads, head_dim, torch.bfloat16, "sketch", num_segments
        )
        assert blocks.rest_parts == num_segments and blocks.num_splits >= 8
        assert blocks.shared_bytes <= limits().block_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 15, 16, 17, 255, 256, 257, 2047, 2048, 2049, 4095, 4097])
def test_device_attention_equals_the_definition_around_tile_and_split_sizes(num_rows: int) -> None:
    shape = Shape(num_q_heads=8, num_kv_heads=8, num_index_heads=8, max_top_k=5000, dtype=torch.float16)
    step = make_step(shape, [(5000, 0)], [(0, 0, num_rows)])
    assert_close(attend_on_device(step), step.wanted())


@pytest.mark.parametrize("num_contexts", [32, 33, 70])
def test_device_attention_with_a_context_per_row_equals_the_definition(num_contexts: int) -> None:
    contexts = [(50 + 3 * i, i % 5) for i in range(num_contexts)]
    batch = [(num_contexts - 1 - i, i % 7, 40 + i % 11) for i in range(num_contexts)]
    step = make_step(Shape(), contexts, batch)
    assert_close(attend_on_device(step), step.wanted())


def test_large_logits_do_not_overflow_on_the_device() -> None:
    step = make_step(Shape(), CONTEXTS, MIXED)
    step = replace(step, q=step.q * 300)
    assert_close(attend_on_device(step), step.wanted())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cap", [None, 30.0])
def test_a_nan_query_gives_nan_and_affects_no_other_head(dtype: torch.dtype, cap: float | None) -> None:
    step = replace(make_step(Shape(dtype=dtype), CONTEXTS, MIXED), logit_cap=cap)
    q = step.q.clone()
    q[0, 1, 3] = torch.nan
    out, sound = attend_on_device(replace(step, q=q)), attend_on_device(step)
    assert out[0, 1].isnan().all() and replace(step, q=q).wanted()[0, 1].isnan().all()
    out[0, 1] = sound[0, 1]
    assert torch.equal(out, sound)


def test_a_rows_device_attention_has_the_same_bits_in_any_batch() -> None:
    step = make_step(LONG, LONG_CONTEXTS, LONG_BATCH, num_spilled=20)
    whole = attend_on_device(step)
    for batch_rows in ([0], [3], [4, 1], [2, 2, 0, 0, 1, 3, 4, 0, 1]):
        assert torch.equal(attend_on_device(step.take(batch_rows)), whole[batch_rows])


def test_attention_has_the_same_bits_wherever_its_rows_are_stored() -> None:
    step = make_step(LONG, LONG_CONTEXTS, LONG_BATCH)
    want = attend_on_device(step)
    slots = [torch.randperm(kv.shape[1]) for kv in step.far]  # the slot of each row
    pools = [kv[:, slot.argsort()] for kv, slot in zip(step.far, slots, strict=True)]
    ids = step.far_rows.kv_indices.clone()
    for b, context in enumerate(step.rows.context_ids.tolist()):
        row_ids = ids[b].long()
        ids[b] = torch.where(row_ids < 0, row_ids, slots[context][row_ids]).int()
    pooled = replace(step, far=pools, far_rows=replace(step.far_rows, kv_indices=ids))
    assert torch.equal(attend_on_device(pooled), want)
    in_host = torch.rand(ids.shape) < 0.05
    ids = torch.where(in_host & (ids >= 0), -2 - step.far_rows.kv_indices, ids)
    spilled = replace(pooled, spill=step.far, far_rows=replace(step.far_rows, kv_indices=ids))
    assert torch.equal(attend_on_device(spilled), want)


@pytest.mark.gpu
def test_a_replayed_graph_reads_new_lengths() -> None:
    first = make_step(LONG, LONG_CONTEXTS, LONG_BATCH)
    on_device = OnDevice(first)
    on_device.attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        on_device.attend()
    batches = (LONG_BATCH, [(2, 0, 3), (0, 24, 8000), (1, 1, 2048), (-1, 0, 0), (0, 2, 700)], LONG_BATCH[::-1])
    for batch in batches:
        step = make_step(LONG, LONG_CONTEXTS, batch)
        on_device.copy_step(step)
        graph.replay()
        got = on_device.out.cpu()
        assert_close(got, step.wanted())
        graph.replay()
        assert torch.equal(on_device.out.cpu(), got)


def without_first(step: Step, tail_starts: list[int]) -> Step:
    """Return the same step without the tails' first rows: each tail begins at its row `tail_starts`."""
    tails = torch.full_like(step.tails, torch.nan)
    rows = replace(step.rows, tail_starts=torch.tensor(tail_starts, dtype=torch.int32))
    for tail_id, start in zip(rows.tail_ids.tolist(), tail_starts, strict=True):
        tails[tail_id, :, : tails.shape[2] - start] = step.tails[tail_id, :, start:]
    return replace(step, tails=tails, rows=rows)


@pytest.mark.parametrize("reach", [None, Reach(num_rows=9), Reach(num_rows=7, chunked=True)])
def test_a_tail_may_lack_first_rows_that_it_does_not_attend_to(reach: Reach | None) -> None:
    """A tail may lack the first rows that are attended to elsewhere, or that are out of reach."""
    step = replace(make_step(Shape(), CONTEXTS, [(context, n, 0) for context, n, _ in MIXED]), reach=reach)
    starts = [3, 14, 0, 0, 0, 0, 11]
    if reach is None:
        step.rows.own_lens.copy_(torch.tensor([3, 20, 0, 0, 0, 0, 11]))
    else:
        context_lens = [CONTEXTS[context][0] if context >= 0 else 0 for context, _, _ in MIXED]
        step.rows.positions.copy_(torch.tensor(context_lens) + (step.rows.tail_lens - 1).clamp(min=0))
        seen = [reach.first_seen(position) for position in step.rows.positions.tolist()]
        starts = [max(0, first - context_len) for first, context_len in zip(seen, context_lens, strict=True)]
        assert max(starts) > 9
    later = without_first(step, starts)
    want = step.wanted()
    torch.testing.assert_close(later.wanted(), want)
    assert_close(attend_on_device(later), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [80, 128])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_to_a_tails_first_rows_is_merged(dtype: torch.dtype, head_dim: int, has_sinks: bool) -> None:
    """Attention from elsewhere to a tail's first rows, here NaN, is merged, beside tails that are read whole."""
    step = make_step(Shape(dtype=dtype, head_dim=head_dim), CONTEXTS, [*MIXED, (0, 24, 30), (2, 20, 0)])
    step = replace(step, sinks=torch.randn(step.q.shape[1]) if has_sinks else None)
    for b, own_len in enumerate([3, 0, 0, 0, 0, 3, 23, 8]):
        step.rows.own_lens[b] = own_len
        step.tails[step.rows.tail_ids[b], :, :own_len] = torch.nan
    own_out, own_lse = torch.randn_like(step.q), 3 * torch.randn(step.q.shape[:2])
    out, lse = step.wanted_with_lse()
    on_device = OnDevice(step)
    on_device.attend()
    attended = on_device.out.cpu()
    on_device.plan.merge(on_device.out, own_out.to(DEVICE), own_lse.to(DEVICE), on_device.rows)
    merged, has_own = on_device.out.cpu(), step.rows.own_lens > 0
    assert_close(merged, merge_own(out, lse, own_out, own_lse, step.rows))
    assert torch.equal(merged[~has_own], attended[~has_own])
    in_use = step.rows.context_ids >= 0
    torch.testing.assert_close(on_device.plan.lse.cpu()[in_use], lse[in_use].float(), rtol=1e-2, atol=1e-2)
