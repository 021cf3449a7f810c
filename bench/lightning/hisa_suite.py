"""The figure of HISA's paper (arXiv:2603.28458): HISA and DSA over 4K to 128K keys, for a chunk of 1024 queries.

DSA here is csattn's own: the dense score kernel and the exact selection. Both choose 2048 of the keys that each query
sees; the chunk is the end of the prefix. IoU compares the two choices, on structured keys, which keep one meaning over
a run as in text, and on noise, where a block's mean says almost nothing about its keys. With structured keys, the loss
is in blocks where one meaning ends and another begins: such a mean is a mixture, and the longer the prefix, the more
blocks of a single other meaning score as well. So HISA's candidates grow with the prefix (`HisaConfig.for_prefix`);
beyond 32K, the paper's two settings, 64 blocks and a quarter of all blocks, are measured too.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bench.lightning.measure import overlap
from bench.lightning.suite import Prepared, Trial
from csattn.lightning import (
    BlockedKeys,
    HisaConfig,
    Operands,
    causal_lens,
    choose_keys,
    hisa_top_k,
    quantise_fp8,
    score_all,
    score_pages,
    top_k,
    top_k_reference,
)
from csattn.lightning.hisa.select import choose_blocks
from csattn.lightning.prefill.stream import score_into
from csattn.lightning.score import hopper

K = 1024
NUM_QUERIES = 1024
PREFIXES = (4 * K, 8 * K, 16 * K, 32 * K, 64 * K, 128 * K)
WANTED = 4  # meanings that a structured query looks for
STRENGTH = 16.0  # norm of a meaning's vector; the noise added to it has norm 11
ROWS_COMPARED = 64


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a trial."""

    num_queries: int
    num_heads: int
    k: int
    prefixes: tuple[int, ...]
    fixed: HisaConfig | None = None  # None: the config for the prefix

    def configs_of(self, prefix: int) -> dict[str, HisaConfig]:
        """Return the settings that are measured at a prefix."""
        config = self.fixed or HisaConfig.for_prefix(prefix)
        configs = {"HISA": config, "HISA, last 2 blocks": replace(config, last_blocks=2)}
        if config.num_blocks > HisaConfig().num_blocks:
            quarter = prefix // config.block_size // 4
            configs |= {"HISA, 64 blocks": HisaConfig(), "HISA, a quarter": HisaConfig(num_blocks=quarter)}
        return configs


FULL = Sizes(NUM_QUERIES, 64, 2048, PREFIXES)
SMALL = Sizes(32, 4, 128, (1024, 2048), HisaConfig(block_size=32, num_blocks=12))


def trials(device: str) -> Iterator[Trial]:
    """Yield all trials of the suite."""
    sizes = SMALL if device == "cpu" else FULL
    for prefix in sizes.prefixes:
        for keys in ("structured", "noise"):
            configs = sizes.configs_of(prefix)
            for variant in ("DSA", "DSA, streamed", *configs, "block-sparse"):
                if keys == "structured" or variant in configs:
                    yield _trial(prefix, keys, variant, sizes, device)


def make_operands(kind: str, num_queries: int, num_keys: int, num_heads: int, k: int, device: str) -> Operands:
    """Make FP8 queries and keys with their scales.

    Structured: a meaning lasts for k / 2 keys, and a query's heads look for WANTED meanings, hence for 2 k keys in all.
    """
    generator = torch.Generator(device).manual_seed(2026)

    def noise(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=device)

    def choose(most: int, *sizes: int) -> Tensor:
        return torch.randint(most, sizes, generator=generator, device=device)

    queries, keys = noise(num_queries, num_heads, 128), noise(num_keys, 128)
    weights = noise(num_queries, num_heads)
    if kind == "structured":
        run = k // 2
        meanings = torch.nn.functional.normalize(noise(num_keys // run + 2, 128), dim=1) * STRENGTH
        wanted = choose(len(meanings), num_queries, WANTED).gather(1, choose(WANTED, num_queries, num_heads))
        queries += meanings[wanted]
        keys += meanings.repeat_interleave(run, 0)[run // 3 :][:num_keys]  # runs do not start at block boundaries
        weights = weights.abs()
    (q, q_scale), (k8, k_scale) = quantise_fp8(queries), quantise_fp8(keys)
    return Operands(q, k8, weights * q_scale[..., 0], k_scale[:, 0])


def _trial(prefix: int, keys: str, variant: str, sizes: Sizes, device: str) -> Trial:
    def prepare() -> Prepared:
        operands = make_operands(keys, sizes.num_queries, prefix, sizes.num_heads, sizes.k, device)
        host_lens = causal_lens(sizes.num_queries, prefix, first_position=prefix - sizes.num_queries)
        lens = host_lens.to(device)
        if variant == "DSA, streamed":
            return Prepared(list, [lambda: choose_keys(operands, sizes.k, host_lens)], graph=False)
        if variant == "DSA":
            return _dense(operands, sizes.k, lens, device)
        configs = sizes.configs_of(prefix)
        config = configs.get(variant, configs["HISA"])
        blocked = BlockedKeys.of_operands(operands, config.block_size)
        arguments = (operands.q, operands.weights, blocked, lens, sizes.k)
        exact = choose_keys(operands, sizes.k, host_lens)
        if variant == "block-sparse":
            config = HisaConfig(block_size=config.block_size, num_blocks=sizes.k // config.block_size)
            chosen = block_sparse_top_k(*arguments, config)
            return Prepared(list, [lambda: block_sparse_top_k(*arguments, config)], _iou(chosen, exact))
        chosen = hisa_top_k(*arguments, config)
        figures = _iou(chosen, exact)
        return Prepared(
            lambda: _faults(operands, blocked, lens, sizes.k, config), [lambda: hisa_top_k(*arguments, config)], figures
        )

    return Trial("hisa", f"{keys} keys, {sizes.num_queries} queries, k {sizes.k}", variant, f"prefix {prefix}", prepare)


def block_sparse_top_k(
    q: Tensor, weights: Tensor, blocked: BlockedKeys, kv_lens: Tensor, k: int, config: HisaConfig
) -> Tensor:
    """Choose all keys of the best blocks, k in all, ascending: the ablation without refinement.

    The arguments are those of `hisa_top_k`.
    """
    assert k == config.pool_len, f"k is {k}, candidates have {config.pool_len} keys"
    candidates, _ = choose_blocks(q, weights, blocked, kv_lens, config)
    positions = candidates[..., None] * config.block_size + torch.arange(config.block_size, device=q.device)
    seen = (candidates[..., None] >= 0) & (positions < kv_lens[:, None, None])
    positions = torch.where(seen, positions, torch.iinfo(torch.int32).max).flatten(1).sort(dim=1).values
    return torch.where(positions == torch.iinfo(torch.int32).max, -1, positions).to(torch.int32)


def _dense(operands: Operands, k: int, lens: Tensor, device: str) -> Prepared:
    """Prepare DSA at its fastest: the chunk's scores in memory, then one selection. It can be captured in a graph."""
    num_queries, num_keys = len(operands.q), len(operands.k)
    scores = torch.empty(num_queries, num_keys, device=device)

    def call() -> Tensor:
        score_into(scores, operands, range(num_keys), lens)
        return top_k(scores, k, lens)

    def faults() -> list[str]:
        got = call()[:ROWS_COMPARED]
        want = top_k_reference(scores[:ROWS_COMPARED], k, lens[:ROWS_COMPARED])
        return [] if torch.equal(got, want) else ["the choice is not that of the scores"]

    return Prepared(faults, [call])


def _faults(operands: Operands, blocked: BlockedKeys, lens: Tensor, k: int, config: HisaConfig) -> list[str]:
    """Compare HISA with DSA on the same scores, with lengths that the candidates cover, and with a repetition."""
    rows = slice(0, ROWS_COMPARED)
    operands = operands.of_queries(rows)
    own = (operands.q, operands.weights)
    short = lens[rows].clamp(max=config.pool_len)
    few = replace(blocked, pages=blocked.pages[rows], block_pages=blocked.block_pages[rows])
    if operands.q.is_cuda and not hopper.supports(operands):  # then the two score in kernels of their own
        scores = score_pages(*own, few.keys, few.pages, short)
    else:
        scores = score_all(operands, short)
    want = top_k_reference(scores, k, short)
    wrong = [] if torch.equal(hisa_top_k(*own, few, short, k, config), want) else ["differs from DSA on a short prefix"]
    first = hisa_top_k(*own, few, lens[rows], k, config)
    again = hisa_top_k(*own, few, lens[rows], k, config)
    return wrong + ([] if torch.equal(first, again) else ["a repetition differs"])


def _iou(chosen: Tensor, exact: Tensor) -> dict[str, Any]:
    shares = overlap(chosen, exact)
    return {"iou_mean": round(float(shares.mean()), 5), "iou_min": round(float(shares.min()), 5)}
