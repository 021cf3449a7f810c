"""HISA chooses the best keys within the best blocks. If these are all blocks, it chooses what DSA does."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bench.lightning.hisa_suite import block_sparse_top_k
from bench.lightning.measure import overlap
from csattn.errors import ArrayError, ConfigError
from csattn.lightning import (
    BlockedKeys,
    HisaConfig,
    KeyPages,
    Operands,
    Order,
    PooledKeys,
    choose_keys,
    hisa_top_k,
    make_key_cache,
    quantise_fp8,
    score_all,
    score_keys,
    score_pages,
    top_k,
    top_k_reference,
)
from csattn.lightning.hisa import choice, triton_kernels
from csattn.lightning.hisa.pooling import pool_keys
from csattn.lightning.hisa.reference import best_blocks_reference, candidate_pages_reference
from csattn.lightning.paged.cache import page_views
from csattn.lightning.score import hopper
from tests.cuda_on_cpu.emulated import DEVICE, Emulator

CONFIG = HisaConfig(block_size=16, num_blocks=4)


def make_operands(num_queries: int, num_keys: int, dim: int = 32) -> Operands:
    q, q_scale = quantise_fp8(torch.randn(num_queries, 4, dim), block=dim)
    k, k_scale = quantise_fp8(torch.randn(num_keys, dim), block=dim)
    return Operands(q, k, torch.randn(num_queries, 4) * q_scale[..., 0], k_scale[:, 0])


def structured(num_queries: int, num_keys: int, dim: int = 32, run: int = 64) -> Operands:
    """Return keys that are similar in runs, as in text, and queries that match some of the runs."""
    topics = torch.nn.functional.normalize(torch.randn(-(-num_keys // run), dim), dim=1)
    keys = topics.repeat_interleave(run, 0)[:num_keys] * 4 + 0.3 * torch.randn(num_keys, dim)
    wanted = topics[torch.randint(len(topics), (num_queries, 4))]
    q, q_scale = quantise_fp8(wanted * 4 + 0.3 * torch.randn(num_queries, 4, dim), block=dim)
    k, k_scale = quantise_fp8(keys, block=dim)
    return Operands(q, k, torch.rand(num_queries, 4) * q_scale[..., 0], k_scale[:, 0])


def by_definition(operands: Operands, kv_lens: Tensor, k: int, config: HisaConfig) -> Tensor:
    """Return HISA's choice [num_queries, k] int32, best first, computed query by query in a loop."""
    assert operands.key_scale is not None
    values, scales = pool_keys(operands.k, operands.key_scale, config.block_size)
    chosen = []
    for row, kv_len in enumerate(kv_lens.tolist()):
        one = operands.of_queries(slice(row, row + 1))
        num_blocks = -(-kv_len // config.block_size)
        of_blocks = score_keys(Operands(one.q, values, one.weights, scales))[:, :num_blocks]
        of_blocks[:, : config.first_blocks] = torch.inf
        of_blocks[:, max(0, num_blocks - config.last_blocks) :] = torch.inf
        best = top_k_reference(of_blocks, config.num_blocks, torch.tensor([num_blocks]))[0]
        candidate = torch.isin(torch.arange(kv_len) // config.block_size, best)
        positions = candidate.nonzero()[:, 0]
        scores = score_keys(one)[:, positions]
        within = top_k_reference(scores, k, torch.tensor([len(positions)]))[0]
        chosen.append(torch.where(within >= 0, positions[within.clamp(min=0)], -1) if len(positions) else within)
    return torch.stack(chosen).to(torch.int32)


@pytest.mark.parametrize("num_keys", [5, 64, 200])
@pytest.mark.parametrize(("first_blocks", "last_blocks"), [(1, 2), (1, 1), (0, 1)])
def test_hisa_choice_equals_the_definition(num_keys: int, first_blocks: int, last_blocks: int) -> None:
    operands = make_operands(6, num_keys)
    kv_lens = torch.tensor([num_keys, 0, 1, num_keys // 2, min(num_keys, 17), num_keys - 1], dtype=torch.int32)
    config = replace(CONFIG, first_blocks=first_blocks, last_blocks=last_blocks)
    blocked = BlockedKeys.of_operands(operands, config.block_size)
    got = hisa_top_k(operands.q, operands.weights, blocked, kv_lens, 20, config)
    assert torch.equal(got, by_definition(operands, kv_lens, 20, config))
    ascending = hisa_top_k(operands.q, operands.weights, blocked, kv_lens, 20, config, order="position")
    want = torch.where(got < 0, 2**31 - 1, got).sort(dim=1).values
    assert torch.equal(ascending, torch.where(want == 2**31 - 1, -1, want))


def test_hisa_equals_dsa_if_all_blocks_are_candidates() -> None:
    operands = make_operands(9, 64)
    kv_lens = torch.tensor([64, 63, 48, 33, 16, 15, 2, 1, 0], dtype=torch.int32)
    blocked = BlockedKeys.of_operands(operands, CONFIG.block_size)
    got = hisa_top_k(operands.q, operands.weights, blocked, kv_lens, 24, CONFIG)
    assert torch.equal(got, choose_keys(operands, 24, kv_lens))


@pytest.mark.parametrize(("order", "block_size"), [("score", 128), ("position", 64)])
def test_hisa_on_a_device_equals_top_k_of_the_same_scores(order: Order, block_size: int) -> None:
    config = HisaConfig(block_size=block_size, num_blocks=1024 // block_size)
    q, q_scale = quantise_fp8(torch.randn(40, 64, 128, device=DEVICE))
    k, k_scale = quantise_fp8(torch.randn(5000, 128, device=DEVICE))
    operands = Operands(q, k, torch.randn(40, 64, device=DEVICE) * q_scale[..., 0], k_scale[:, 0])
    kv_lens = torch.arange(1024, 1024 - 40 * 25, -25, dtype=torch.int32, device=DEVICE)
    blocked = BlockedKeys.of_operands(operands, config.block_size)
    paged = replace(blocked, in_order=False)
    of_pages = score_pages(q, operands.weights, blocked.keys, blocked.pages, kv_lens)
    of_keys = score_all(operands, kv_lens) if hopper.supports(operands) else of_pages
    for own, scores in ((blocked, of_keys), (paged, of_pages)):
        for _ in range(3):
            got = hisa_top_k(q, operands.weights, own, kv_lens, 512, config, order=order)
            assert torch.equal(got, top_k(scores, 512, kv_lens, order=order))


def test_hisa_on_a_device_accepts_no_queries() -> None:
    (q, q_scale), (k, k_scale) = (quantise_fp8(torch.randn(*n, 128, device=DEVICE)) for n in ((0, 64), (300,)))
    operands = Operands(q, k, q_scale[..., 0].contiguous(), k_scale[:, 0].contiguous())
    blocked = BlockedKeys.of_operands(operands, 128)
    lens = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    assert hisa_top_k(q, operands.weights, blocked, lens, 16, HisaConfig(num_blocks=2)).shape == (0, 16)


def test_hisa_over_paged_keys_of_many_sequences_equals_the_definition() -> None:
    """HISA handles blocks of two pages, positions and physical slots, and pooled keys in pages of their own."""
    config = HisaConfig(block_size=128, num_blocks=3)
    kv_lens = [700, 300, 129]
    cache = make_key_cache(40)
    values, scales = page_views(cache)
    scales.fill_(torch.nan)
    tables = torch.randperm(39).view(3, 13)[:, :12].to(torch.int32)
    pooled = PooledKeys(3, 768, 128, 128, torch.device("cpu"))
    q, q_scale = quantise_fp8(torch.randn(3, 4, 128))
    weights = torch.randn(3, 4) * q_scale[..., 0]
    wanted = []
    for row, kv_len in enumerate(kv_lens):
        k, k_scale = quantise_fp8(torch.randn(kv_len, 128))
        token = torch.arange(kv_len)
        page = tables[row, token // 64].long()
        values.view(torch.uint8)[page, token % 64] = k.view(torch.uint8)
        scales[page, token % 64] = k_scale[:, 0]
        pooled.load(row, k, k_scale[:, 0])
        one = Operands(q[row : row + 1], k, weights[row : row + 1], k_scale[:, 0])
        wanted.append(by_definition(one, torch.tensor([kv_len]), 50, config))
    lens = torch.tensor(kv_lens, dtype=torch.int32)
    blocked = BlockedKeys(KeyPages.of_cache(cache), tables, pooled.keys, pooled.pages)
    want = torch.cat(wanted)
    assert torch.equal(hisa_top_k(q, weights, blocked, lens, 50, config), want)
    places = hisa_top_k(q, weights, blocked, lens, 50, config, physical=True)
    assert torch.equal(places, (tables.gather(1, (want // 64).long()) * 64 + want % 64).to(torch.int32))


@pytest.mark.parametrize("num_keys", [1, 15, 16, 49])
def test_block_keys_updated_token_by_token_equal_those_pooled_at_once(num_keys: int) -> None:
    k, scale = quantise_fp8(torch.randn(2, 50, 32) * torch.rand(2, 50, 1) * 100, block=32)
    kept = PooledKeys(2, 50, 16, 32, torch.device("cpu"))
    kept.load(0, k[0, :7], scale[0, :7, 0])
    kept.load(1, k[1, :7], scale[1, :7, 0])
    for token in range(7, num_keys):
        kept.append(k[:, token].contiguous(), scale[:, token, 0].contiguous())
    for row in range(2):
        upto = max(num_keys, 7)
        values, scales = pool_keys(k[row, :upto], scale[row, :upto, 0], 16)
        assert torch.equal(kept.keys.values[row, : len(values)].view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(kept.keys.scales[row, : len(scales)], scales)


def test_the_kernel_updates_block_keys_to_the_same_bits_as_the_definition() -> None:
    """Two states get the same keys, one from the kernel and one from the definition, until past their capacity."""
    k, scale = quantise_fp8(torch.randn(3, 40, 32) * torch.rand(3, 40, 1) * 100, block=32)
    k[1] = 0.0
    kept = [PooledKeys(3, 37, 16, 32, torch.device("cpu")) for _ in range(2)]
    state = [x.to(DEVICE) for x in (kept[0]._sums, kept[0]._lens, kept[0]._values, kept[0]._scales)]
    for token in range(40):
        key, its_scale = k[:, token].contiguous(), scale[:, token, 0].contiguous()
        triton_kernels.append_on_device(key.to(DEVICE), its_scale.to(DEVICE), 16, 37, *state)
        kept[1].append(key, its_scale)
    want = kept[1]._sums, kept[1]._lens, kept[1]._values.view(torch.uint8), kept[1]._scales
    state[2] = state[2].view(torch.uint8)
    assert all(torch.equal(got.cpu(), wanted) for got, wanted in zip(state, want, strict=True))


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")  # from Triton's interpreter (numpy)
def test_the_kernel_keeps_nan_and_infinite_block_keys() -> None:
    """A block with a NaN or infinite key ranks last, as the key does."""
    k, scale = torch.randn(3, 4, 32), torch.ones(3)
    k[0, 1, 5], k[1, 1, 5] = torch.nan, torch.inf
    kept = [PooledKeys(3, 37, 16, 32, torch.device("cpu")) for _ in range(2)]
    state = [x.to(DEVICE) for x in (kept[0]._sums, kept[0]._lens, kept[0]._values, kept[0]._scales)]
    for token in range(4):
        key = k[:, token].contiguous()
        triton_kernels.append_on_device(key.to(DEVICE), scale.to(DEVICE), 16, 37, *state)
        kept[1].append(key, scale)
        torch.testing.assert_close(state[3].cpu(), kept[1]._scales, rtol=0, atol=0, equal_nan=True)
        if DEVICE.type == "cuda":  # the interpreter does not convert NaN to NaN in FP8
            values, want = state[2].cpu().float(), kept[1]._values.float()
            torch.testing.assert_close(values, want, rtol=0, atol=0, equal_nan=True)


def test_a_key_beyond_capacity_changes_no_block_key() -> None:
    kept = PooledKeys(1, 16, 16, 32, torch.device("cpu"))
    k, scale = quantise_fp8(torch.randn(18, 32), block=32)
    kept.load(0, k[:16], scale[:16, 0])
    before = kept.keys.values.view(torch.uint8).clone()
    kept.append(k[16:17], scale[16:17, 0])
    assert torch.equal(kept.keys.values.view(torch.uint8), before)


@pytest.mark.parametrize("scores", ["random", "few values", "nan and inf", "of many blocks"])
@pytest.mark.parametrize(("first_blocks", "last_blocks"), [(1, 2), (0, 1), (2, 0)])
def test_the_kernels_choice_of_blocks_equals_the_definition(
    first_blocks: int, last_blocks: int, scores: str, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator.stand_in(monkeypatch, choice)
    kv_lens = torch.tensor([0, 9, 33, 160, 161, 280, 290, 9000], dtype=torch.int32)
    of_blocks = torch.randn(8, 300 if scores != "of many blocks" else choice.MANY_BLOCKS + 1)
    if scores == "few values":
        of_blocks = of_blocks.round() * 0.0 if first_blocks else of_blocks.round()
    if scores == "nan and inf":
        of_blocks[of_blocks > 0.5] = torch.nan
        of_blocks[of_blocks < -1.0] = -torch.inf
        of_blocks[:, 2:9] = torch.inf  # more than the number of candidates
    got = [torch.full(sizes, -7, dtype=torch.int32, device=DEVICE) for sizes in ((8, 5), (8,))]
    ends = first_blocks, last_blocks
    choice.choose_candidates(of_blocks.to(DEVICE, copy=True), kv_lens.to(DEVICE), 32, ends, *got)
    want = best_blocks_reference(of_blocks, kv_lens, 32, ends, 5)
    assert all(torch.equal(mine.cpu(), its) for mine, its in zip(got, want, strict=True))
    assert want[1].tolist()[:4] == [0, 9, 33, 160]
    for chosen, kv_len in zip(want[0].tolist(), kv_lens.tolist(), strict=True):
        num_blocks = -(-kv_len // 32)
        assert {*range(num_blocks)[:first_blocks], *range(num_blocks)[num_blocks - last_blocks :]} <= {*chosen}


def test_the_kernel_counts_more_than_65536_blocks_of_equal_score(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator.stand_in(monkeypatch, choice)
    kv_lens = torch.tensor([70000], dtype=torch.int32)
    got = [torch.full(sizes, -7, dtype=torch.int32, device=DEVICE) for sizes in ((1, 368), (1,))]
    choice.choose_candidates(torch.zeros(1, 70000, device=DEVICE), kv_lens.to(DEVICE), 1, (1, 1), *got)
    want = [*range(367), 69999]
    assert got[0].tolist() == [want] and got[1].tolist() == [368]


def test_the_kernels_pages_of_candidates_equal_the_definition() -> None:
    candidates = torch.tensor([[-1] * 5, [0, -1, -1, -1, -1], [0, 1, -1, -1, -1], [0, 2, 5, 7, 8]], dtype=torch.int32)
    kv_lens = torch.tensor([0, 9, 33, 280], dtype=torch.int32)
    pages = torch.randperm(40).view(4, 10)[:, :18].to(torch.int32).repeat(1, 2)
    own = torch.full((4, 10), -7, dtype=torch.int32, device=DEVICE)
    triton_kernels.pages_on_device(candidates.to(DEVICE), pages.to(DEVICE), kv_lens.to(DEVICE), 32, own)
    assert torch.equal(own.cpu(), candidate_pages_reference(candidates, pages, kv_lens, 16, 32))


def test_hisa_recalls_structured_keys_and_beats_block_sparse_selection() -> None:
    config, k = HisaConfig(block_size=32, num_blocks=12), 128
    kv_lens = torch.full((8,), 2048, dtype=torch.int32)
    mean = {}
    for name, operands in (("structured", structured(8, 2048)), ("random", make_operands(8, 2048))):
        exact = choose_keys(operands, k, kv_lens)
        blocked = BlockedKeys.of_operands(operands, config.block_size)
        chosen = hisa_top_k(operands.q, operands.weights, blocked, kv_lens, k, config)
        sparse = replace(config, num_blocks=k // config.block_size)
        by_blocks = block_sparse_top_k(operands.q, operands.weights, blocked, kv_lens, k, sparse)
        mean[name] = float(overlap(chosen, exact).mean())
        assert mean[name] > float(overlap(by_blocks, exact).mean()), "refinement is worth something"
    assert mean["structured"] > 0.95
    assert mean["random"] < 0.6


def test_block_sparse_selection_chooses_whole_blocks() -> None:
    operands = make_operands(2, 200)
    kv_lens = torch.tensor([200, 20], dtype=torch.int32)
    blocked = BlockedKeys.of_operands(operands, 16)
    got = block_sparse_top_k(operands.q, operands.weights, blocked, kv_lens, 64, CONFIG)
    assert got[1].tolist() == [*range(20), *[-1] * 44]
    starts = got[0, :48].view(3, 16)
    assert torch.equal(starts - starts[:, :1], torch.arange(16).expand(3, -1).to(torch.int32))
    assert got[0, -8:].tolist() == [-1] * 8, "the last block is forced, and has 8 keys"


def test_empty_sequences_choose_no_keys() -> None:
    operands, none = make_operands(2, 64), torch.zeros(2, 0, dtype=torch.int32)
    blocked = replace(BlockedKeys.of_operands(operands, 16), in_order=False, pages=none, block_pages=none)
    got = hisa_top_k(operands.q, operands.weights, blocked, torch.zeros(2, dtype=torch.int32), 8, CONFIG)
    assert (got == -1).all()


@pytest.mark.parametrize("row", [-1, 2])
def test_keys_of_a_row_outside_the_batch_are_refused(row: int) -> None:
    kept = PooledKeys(2, 50, 16, 32, torch.device("cpu"))
    with pytest.raises(ConfigError, match=f"row is {row}; wanted at"):
        kept.load(row, torch.zeros(3, 32), torch.ones(3))


def test_the_number_of_candidate_blocks_grows_with_the_prefix() -> None:
    assert HisaConfig.for_prefix(1) == HisaConfig.for_prefix(32768) == HisaConfig()
    assert [HisaConfig.for_prefix(n << 10).num_blocks for n in (33, 64, 128, 512)] == [72, 96, 128, 256]


def test_invalid_hisa_configs_and_arrays_are_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="power of two"):
        HisaConfig(block_size=100)
    with pytest.raises(ConfigError, match="raise num_blocks"):
        HisaConfig(num_blocks=2, first_blocks=1, last_blocks=2)
    operands = make_operands(1, 32)
    with pytest.raises(ArrayError, match=r"key_scale has shape \[31\]; wanted \[32\]"):
        BlockedKeys.of_operands(replace(operands, key_scale=torch.ones(31)), 16)
    blocked = BlockedKeys.of_operands(operands, 16)
    lens = torch.tensor([32], dtype=torch.int32)
    with pytest.raises(ConfigError, match="at most 64"):
        hisa_top_k(operands.q, operands.weights, blocked, lens, 65, CONFIG)
    with pytest.raises(ConfigError, match=r"block_size is 32, and the block keys are of 16 keys; make them by"):
        hisa_top_k(operands.q, operands.weights, blocked, lens, 8, replace(CONFIG, block_size=32))
    apart = replace(blocked, in_order=False)
    for pages in (torch.zeros(5, 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)):
        with pytest.raises(ArrayError, match=r"pages has shape .*; wanted \[1, max_pages\]"):
            hisa_top_k(operands.q, operands.weights, replace(apart, pages=pages), lens, 8, CONFIG)
    with pytest.raises(ConfigError, match="head_dim is 0; wanted at least 1"):
        PooledKeys(1, 4, 4, 0, torch.device("cpu"))
    with pytest.raises(ConfigError, match="do not divide into pages of 16"):
        hisa_top_k(operands.q, operands.weights, apart, lens, 8, HisaConfig(block_size=8, num_blocks=4))
