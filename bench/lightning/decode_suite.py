"""Decoding with DSA on one device: the FlashInfer contest's workloads, and steps at long contexts, whole and in parts.

Also prefill: attention of many queries, each over its own chosen rows, in the sizes of FlashMLA's tests.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.lightning.decode_workloads import ATTENTION_PAGES, ATTENTION_TOKENS, INDEXER_PAGES, INDEXER_WORKLOADS
from bench.lightning.suite import Prepared, Trial
from csattn.lightning import (
    PAGE_SIZE,
    DsaDecoder,
    DsaShape,
    HisaConfig,
    KeyPages,
    Operands,
    dsa_sparse_attention,
    dsa_topk_indexer,
    make_key_cache,
    quantise_fp8,
    read_keys,
    score_keys,
    score_pages,
    sparse_mla,
    sparse_mla_reference,
    top_k,
    top_k_reference,
    write_keys,
)

K = 1024
TOP_K = 2048
SCALE = 0.13523378  # the softmax scale captured from the model
INDEX_HEADS = 64
CONTEXTS = (8 * K, 32 * K, 64 * K, 128 * K)
BATCHES = (1, 8)
HEADS = (16, 64, 128)
PREFILL_QUERIES = 4096
PREFILL_ROWS = (8 * K, 32 * K, 128 * K)
SCORE_TOLERANCE = 4e-3  # relative to the largest score
OUT_TOLERANCE = 1e-2
L2_BYTES = 60 << 20
NUM_SETS = 16  # sets of inputs that a graph's calls cycle through, so that they do not all stay in the L2 cache


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of one call of the indexer: a batch whose pages lie anywhere in the cache."""

    q: Tensor
    weights: Tensor
    cache: Tensor
    seq_lens: Tensor
    block_table: Tensor


def trials(device: str) -> Iterator[Trial]:
    """Yield all trials of the suite; on a CPU, small ones."""
    small = device == "cpu"
    for work in INDEXER_WORKLOADS[:3] if small else INDEXER_WORKLOADS:
        yield _indexer_trial(f"workload {work.number}", work.seq_lens, 256 if small else INDEXER_PAGES, device)
    for num_tokens in ATTENTION_TOKENS[:1] if small else ATTENTION_TOKENS:
        for top_k_ in (TOP_K, 100):
            yield _attention_trial(num_tokens, top_k_, 64 if small else ATTENTION_PAGES, device)
    for num_heads in HEADS[:1] if small else HEADS[1:]:
        for num_rows in (1024,) if small else PREFILL_ROWS:
            yield _prefill_trial(2 if small else PREFILL_QUERIES, num_heads, num_rows, device)
    for context in (4096,) if small else CONTEXTS:
        for batch_size in (1,) if small else BATCHES:
            for part in ("score", "choose"):
                yield _part_trial(part, context, batch_size, 16, device)
            for num_heads in HEADS[:1] if small else HEADS:
                yield _part_trial("attend", context, batch_size, num_heads, device)
                yield _part_trial("step", context, batch_size, num_heads, device)
            if context > 8 * K or small:
                yield _part_trial("step with HISA", context, batch_size, 16, device)


def make_inputs(seq_lens: list[int], num_pages: int, device: str, seed: int = 0) -> Inputs:
    """Make inputs of noise, with each sequence's pages scattered over the cache."""
    generator = torch.Generator(device).manual_seed(seed)
    rows, max_pages = len(seq_lens), -(-max(seq_lens) // PAGE_SIZE)

    def noise(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=device)

    cache = make_key_cache(max(num_pages, rows * max_pages), device)
    for first in range(0, len(cache), K):
        pages = torch.arange(first, min(first + K, len(cache)), device=device)
        slots = (pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=device)).flatten()
        write_keys(cache, noise(len(slots), 128), slots)
    table = torch.randperm(len(cache), generator=generator, device=device)[: rows * max_pages]
    q, scale = quantise_fp8(noise(rows, INDEX_HEADS, 128))
    weights = noise(rows, INDEX_HEADS) * scale[..., 0] * (INDEX_HEADS * 128) ** -0.5
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    return Inputs(q, weights, cache, lens, table.view(rows, max_pages).to(torch.int32))


def choice_faults(inputs: Inputs, k: int) -> list[str]:
    """Compare scores with the definition's, and repeated choices with the reference's choice by the same scores."""
    keys = KeyPages.of_cache(inputs.cache)
    scores = score_pages(inputs.q, inputs.weights, keys, inputs.block_table, inputs.seq_lens)
    wrong = []
    for row, kv_len in enumerate(inputs.seq_lens.tolist()):
        k8, scale = read_keys(inputs.cache, inputs.block_table[row], kv_len)
        rows = slice(row, row + 1)
        want = score_keys(Operands(inputs.q[rows], k8, inputs.weights[rows], scale))[0]
        error = float((scores[row, :kv_len] - want).abs().max() / want.abs().max())
        wrong += [f"scores of row {row} are off by {error:.1e}"] if error > SCORE_TOLERANCE else []
    best = top_k_reference(scores, k, inputs.seq_lens)
    best = torch.where(best < 0, 2**31 - 1, best).sort(dim=1).values
    at = torch.where(best == 2**31 - 1, 0, best).long()
    placed = inputs.block_table.gather(1, at // PAGE_SIZE) * PAGE_SIZE + at % PAGE_SIZE
    expected = torch.where(best == 2**31 - 1, -1, placed).to(torch.int32)
    for _ in range(3):
        got = dsa_topk_indexer(*_arguments(inputs), num_chosen=k)
        wrong += [] if torch.equal(got, expected) else ["the choice is not that of the scores"]
    return wrong


def _arguments(inputs: Inputs) -> tuple[Tensor, ...]:
    return inputs.q, inputs.cache, inputs.weights, inputs.seq_lens, inputs.block_table


def _indexer_trial(name: str, seq_lens: list[int], num_pages: int, device: str) -> Trial:
    def prepare() -> Prepared:
        inputs = make_inputs(seq_lens, num_pages, device)
        out = torch.empty(len(seq_lens), TOP_K, dtype=torch.int32, device=device)
        scores = torch.empty(len(seq_lens), inputs.block_table.shape[1] * PAGE_SIZE, device=device)
        calls = []
        for table in _other_tables(inputs, 1 if device == "cpu" else NUM_SETS):
            arguments = _arguments(replace(inputs, block_table=table))
            calls.append(partial(dsa_topk_indexer, *arguments, scores=scores, out=out))
        figures = {"batch_size": len(seq_lens), "longest": max(seq_lens), "all_chosen": max(seq_lens) <= TOP_K}
        return Prepared(lambda: choice_faults(inputs, TOP_K), calls, figures)

    return Trial("decode", "contest indexer", "csattn", name, prepare)


def _other_tables(inputs: Inputs, number: int) -> list[Tensor]:
    """Return block tables with other pages, so that a call does not find the previous call's pages in the L2 cache."""
    tables = [torch.randperm(len(inputs.cache), device=inputs.q.device) for _ in range(number)]
    size = inputs.block_table.numel()
    return [table[:size].view(inputs.block_table.shape).to(torch.int32) for table in tables]


def make_attention(num_tokens: int, num_heads: int, num_pages: int, num_chosen: int, device: str) -> tuple[Tensor, ...]:
    """Make q_nope, q_pe, paged ckv and kpe, and ascending indices."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q = torch.randn(num_tokens, num_heads, 576, device=device).to(dtype)
    rows = torch.randn(num_pages, PAGE_SIZE, 576, device=device).to(dtype)
    parts = q[..., :512], q[..., 512:], rows[..., :512], rows[..., 512:]
    return *(part.contiguous() for part in parts), choose_rows(num_tokens, num_chosen, num_pages, device)


def choose_rows(num_tokens: int, num_chosen: int, num_pages: int, device: str) -> Tensor:
    """Choose num_chosen random rows for each token: [num_tokens, TOP_K] int32, ascending, -1 padded."""
    indices = torch.full((num_tokens, TOP_K), -1, dtype=torch.int32, device=device)
    for row in range(num_tokens):
        chosen = torch.randperm(num_pages * PAGE_SIZE, device=device)[:num_chosen]
        indices[row, : len(chosen)] = chosen.sort().values.to(torch.int32)
    return indices


def _prefill_trial(num_queries: int, num_heads: int, num_rows: int, device: str) -> Trial:
    def prepare() -> Prepared:
        made = make_attention(num_queries, num_heads, num_rows // PAGE_SIZE, TOP_K, device)
        q_nope, q_pe, ckv, kpe, indices = made[0], made[1], made[2].flatten(0, 1), made[3].flatten(0, 1), made[4]

        def faults() -> list[str]:
            return attention_faults(q_nope, q_pe, ckv, kpe, indices)

        return Prepared(faults, [lambda: sparse_mla(q_nope, q_pe, ckv, kpe, indices, SCALE)])

    case = f"{num_queries} queries, {num_heads} heads, {TOP_K} of {num_rows} rows"
    flops = 2 * num_queries * num_heads * TOP_K * (576 + 512)
    return Trial("decode", "prefill attention", "csattn", case, prepare, num_flops=flops)


def _attention_trial(num_tokens: int, num_chosen: int, num_pages: int, device: str) -> Trial:
    def prepare() -> Prepared:
        q_nope, q_pe, ckv, kpe, indices = make_attention(num_tokens, 16, num_pages, num_chosen, device)

        def faults() -> list[str]:
            rows = ckv.flatten(0, 1), kpe.flatten(0, 1)
            return attention_faults(q_nope, q_pe, *rows, indices)

        others = [indices]
        for _ in range(0 if device == "cpu" else NUM_SETS - 1):
            others.append(choose_rows(num_tokens, num_chosen, num_pages, device))
        calls = [partial(dsa_sparse_attention, q_nope, q_pe, ckv, kpe, some, SCALE) for some in others]
        return Prepared(faults, calls)

    case = f"{num_tokens} tokens, {num_chosen} of {TOP_K} indices"
    moved = num_tokens * num_chosen * 576 * 2
    return Trial("decode", "contest attention", "csattn", case, prepare, moved_bytes=moved)


def attention_faults(q_nope: Tensor, q_pe: Tensor, ckv: Tensor, kpe: Tensor, indices: Tensor) -> list[str]:
    """Compare attention with a repetition and, for the first queries, with the definition, which needs much memory."""
    out, lse = sparse_mla(q_nope, q_pe, ckv, kpe, indices, SCALE)
    again, _ = sparse_mla(q_nope, q_pe, ckv, kpe, indices, SCALE)
    few = slice(0, 16)
    want, want_lse = sparse_mla_reference(q_nope[few], q_pe[few], ckv, kpe, indices[few], SCALE)
    error = float((out[few].float() - want.float()).abs().max() / want.float().abs().max())
    of_lse = float((lse[few] - want_lse).nan_to_num().abs().max())
    wrong = [] if torch.equal(out, again) else ["a repetition differs"]
    return wrong + (
        [f"output is off by {error:.1e}, lse by {of_lse:.1e}"] if max(error, of_lse) > OUT_TOLERANCE else []
    )


def _part_trial(part: str, context: int, batch_size: int, num_heads: int, device: str) -> Trial:
    moved = {"score": 132 * context, "choose": 4 * context, "attend": TOP_K * 576 * 2}
    total = batch_size * moved.get(part, 132 * context + TOP_K * 576 * 2)

    def prepare() -> Prepared:
        num_sets = 1 if device == "cpu" else min(NUM_SETS, max(1, -(-4 * L2_BYTES // total)))
        with_hisa = part.endswith("HISA")
        steps = [Step.make(context, batch_size, num_heads, with_hisa, device, seed) for seed in range(num_sets)]
        return Prepared(lambda: steps[0].faults(with_choice=not with_hisa), [partial(step.run, part) for step in steps])

    case = f"context {context}, batch {batch_size}, {num_heads} heads"
    return Trial("decode", "long context", part, case, prepare, moved_bytes=0 if part.endswith("HISA") else total)


@dataclass(frozen=True, slots=True)
class Step:
    """One decode step and its parts, with all their inputs."""

    inputs: Inputs
    decoder: DsaDecoder
    rows: Tensor  # [num_pages, 64, 576]
    scores: Tensor  # of the index keys

    @classmethod
    def make(cls, context: int, batch_size: int, num_heads: int, with_hisa: bool, device: str, seed: int) -> "Step":
        """Make the inputs, and run one step."""
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        inputs = make_inputs([context] * batch_size, 0, device, seed)
        decoder, rows = _make_decoder(inputs, context, num_heads, dtype, with_hisa, device)
        keys = KeyPages.of_cache(inputs.cache)
        step = cls(inputs, decoder, rows, score_pages(inputs.q, inputs.weights, keys, *_places(inputs)))
        step.run("step")
        return step

    def run(self, part: str) -> None:
        """Enqueue a part, or the whole step."""
        inputs, decoder, (ckv, kpe) = self.inputs, self.decoder, self._parts()
        if part == "score":
            keys = KeyPages.of_cache(inputs.cache)
            score_pages(inputs.q, inputs.weights, keys, *_places(inputs), out=self.scores)
        elif part == "choose":
            paged: dict[str, Any] = {"pages": inputs.block_table, "page_size": PAGE_SIZE}
            top_k(self.scores, TOP_K, inputs.seq_lens, order="position", out=decoder.indices, **paged)
        elif part == "attend":
            rows = ckv.flatten(0, 1), kpe.flatten(0, 1)
            results: dict[str, Any] = {"out": decoder.out, "lse": decoder.lse}
            sparse_mla(decoder.q_nope, decoder.q_pe, *rows, decoder.indices, SCALE, **results)
        else:
            decoder.step(inputs.cache, ckv, kpe)

    def faults(self, with_choice: bool) -> list[str]:
        """Return the faults of attention to the chosen rows and, if wanted, of the choice."""
        ckv, kpe = self._parts()
        queries = self.decoder.q_nope, self.decoder.q_pe
        wrong = attention_faults(*queries, ckv.flatten(0, 1), kpe.flatten(0, 1), self.decoder.indices)
        return wrong + (choice_faults(self.inputs, TOP_K) if with_choice else [])

    def _parts(self) -> tuple[Tensor, Tensor]:
        return self.rows[..., :512], self.rows[..., 512:]


def _places(inputs: Inputs) -> tuple[Tensor, Tensor]:
    return inputs.block_table, inputs.seq_lens


def _make_decoder(
    inputs: Inputs, context: int, num_heads: int, dtype: torch.dtype, with_hisa: bool, device: str
) -> tuple[DsaDecoder, Tensor]:
    """Make a decoder with its inputs in place, and latent rows [num_pages, 64, 576]."""
    shape = DsaShape(
        batch_size=len(inputs.q),
        max_len=context,
        num_heads=num_heads,
        softmax_scale=SCALE,
        dtype=dtype,
        hisa=HisaConfig(num_blocks=min(64, context // 128)) if with_hisa else None,
    )
    decoder = DsaDecoder(shape, torch.device(device))
    decoder.q_index.copy_(inputs.q)
    decoder.index_weights.copy_(inputs.weights)
    decoder.q_nope.normal_()
    decoder.q_pe.normal_()
    decoder.seq_lens.copy_(inputs.seq_lens)
    decoder.block_table.copy_(inputs.block_table)
    if decoder.block_keys is not None:
        for row in range(len(inputs.q)):
            decoder.block_keys.load(row, *read_keys(inputs.cache, inputs.block_table[row], context))
    return decoder, torch.randn(len(inputs.cache), PAGE_SIZE, 576, device=device).to(dtype)
