"""How much of the exact indexer's choice HISA keeps on real keys, by size and number of blocks, layer and depth.

    python -m bench.lightning real [--texts novel,code] [--context-len 4096] [--out FILE] [--plot FILE]

The demo model has no learned indexer, so its own heads serve as indexers: a KV head's keys, and the query heads of its
group as the indexer's heads, with equal weights, in FP8. The keys' mean, which softmax does not see, is subtracted: an
indexer counts only positive products, and the mean could make all products of a head negative, or all positive. HISA is
compared with the exact choice by the same scores. Needles are numbers among sentences of a novel, with a question for
each: of the number's rows that the exact choice has at the question's last token, HISA's choice is to have as many as
possible.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from bench.accuracy.attending.attend import Reading, attend
from bench.accuracy.attending.context import ContextLayer, RealContext, Step, read_context
from bench.accuracy.long import read_text
from bench.accuracy.ruler import TASKS
from bench.accuracy.tasks import make_prompts
from bench.accuracy.texts import find_text, sha256_of
from bench.lightning.measure import overlap
from bench.records import Case, Records
from bench.timing import gate, machine
from csattn.lightning import (
    BlockedKeys,
    HisaConfig,
    Operands,
    causal_lens,
    hisa_top_k,
    quantise_fp8,
    score_all,
    score_pages,
    top_k,
)
from csattn.lightning.hisa.reference import num_blocks_reference
from csattn.lightning.hisa.select import best_blocks
from csattn.models import LoadedModel, load_model

KEY = ("what", "text", "text_sha256", "context_len", "block_size", "share", "depth")
BLOCK_SIZES = (16, 32, 64, 128)
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2)  # candidate keys as a share of the context
SHOWN_SHARE = 1 / 4  # the one of SHARES in the picture and in the table of needles
NUM_QUERIES = 32  # the last queries of a context
CHOSEN = 1 / 32  # k, as a share of the context: 2048 of 64K
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
NEEDLES_LEN = 4096


def run_real(out: Path | None, texts: Sequence[str], context_len: int, seconds: float) -> Records:
    """Measure the cases that the file lacks; begin no text after that many seconds."""
    records = Records(out, {"bench": "lightning", "suite": "real", "machine": machine()}, KEY)
    deadline, loaded = time.monotonic() + seconds, load_model(device="cpu")
    for measure in (*((_compare_text, text, context_len) for text in texts), (_find_needles, "novel", NEEDLES_LEN)):
        if time.monotonic() > deadline:
            print("time is up; call again to go on")
            break
        measure[0](loaded, measure[1], measure[2], records)
    return records


def _settings(context_len: int) -> Iterator[tuple[dict[str, Any], HisaConfig]]:
    for block_size in BLOCK_SIZES:
        for share in SHARES:
            num_blocks = max(2, round(share * context_len / block_size))
            config = HisaConfig(block_size=block_size, num_blocks=num_blocks)
            yield {"block_size": block_size, "share": share, "num_blocks": num_blocks}, config


def _compare_text(loaded: LoadedModel, text: str, context_len: int, records: Records) -> None:
    ids, sha256 = read_text(text, loaded.tokenizer, context_len, 1)
    key = {"what": "iou", "text": text, "text_sha256": sha256, "context_len": context_len, "depth": None}
    if all(
        records.has(**key, **{n: setting[n] for n in ("block_size", "share")}) for setting, _ in _settings(context_len)
    ):
        return
    context = read_context(loaded, ids[:context_len], ids[context_len:])
    k = round(CHOSEN * context_len)
    lens = causal_lens(NUM_QUERIES, context_len, first_position=context_len - NUM_QUERIES)
    _require_definition(context, lens, k)
    found = np.array([_compare_layer(layer, lens, k) for layer in context.layers])  # [layer, head, setting, 2]
    for i, (setting, _) in enumerate(_settings(context_len)):
        iou, kept = np.moveaxis(found[:, :, i], -1, 0)
        means = {"iou_mean": iou.mean(), "iou_least_head": iou.min(), "score_kept_mean": kept.mean()}
        rounded = {name: round(float(value), 4) for name, value in means.items()}
        records.add({**key, **setting, "k": k, **rounded, "iou_by_layer": iou.mean(1).round(4).tolist()})


def _compare_layer(layer: ContextLayer, lens: Tensor, k: int) -> list[list[tuple[float, float]]]:
    """Return, by head and setting, IoU, and the chosen keys' scores as a share of the exact choice's."""
    found = []
    for operands in indexers(layer, layer.q[:, :, -len(lens) :]):
        scores, exact, choices = choose_all(operands, lens, k)
        best = scores.gather(1, exact.long()).sum(1)
        kept = [scores.gather(1, chosen.long()).sum(1) / best for chosen in choices]
        ious = [overlap(chosen, exact) for chosen in choices]
        found.append([(float(iou.mean()), float(share.mean())) for iou, share in zip(ious, kept, strict=True)])
    return found


def _find_needles(loaded: LoadedModel, text: str, context_len: int, records: Records) -> None:
    key = {"what": "needles", "text": text, "text_sha256": sha256_of(find_text(text)), "context_len": context_len}
    if all(
        records.has(**key, depth=depth, **{n: setting[n] for n in ("block_size", "share")})
        for depth in DEPTHS
        for setting, _ in _settings(context_len)
    ):
        return
    [haystack] = TASKS["multikey"].make(Random("needles"), DEPTHS, context_len)
    prompts = make_prompts(loaded, haystack, context_len)
    context = read_context(loaded, prompts[0].context, prompts[0].question)
    k, lens = round(CHOSEN * context_len), torch.tensor([context_len], dtype=torch.int32)
    for needle, prompt in zip(haystack.questions, prompts, strict=True):
        rows = _rows_of(
            loaded.tokenizer(needle.answers[0], add_special_tokens=False).input_ids, prompt.context.tolist()
        )
        asking = replace(context, following=np.append(prompt.question, prompt.question[-1:]))
        num_found, num_kept = 0, [0] * len(list(_settings(context_len)))
        for layer, q in zip(context.layers, _last_queries(asking), strict=True):
            for operands in indexers(layer, q):
                _, exact, choices = choose_all(operands, lens, k)
                wanted = set(exact[0].tolist()) & rows
                num_found += len(wanted)
                num_kept = [
                    kept + len(wanted & set(own[0].tolist())) for kept, own in zip(num_kept, choices, strict=True)
                ]
        for (setting, _), kept in zip(_settings(context_len), num_kept, strict=True):
            found = {"k": k, "rows_found_exactly": num_found, "rows_found": kept}
            records.add({**key, **setting, "depth": needle.depth, **found})


def indexers(layer: ContextLayer, q: Tensor) -> Iterator[Operands]:
    """Yield a layer's KV heads as indexers. q: [num_kv_heads, group_size, num_queries, head_dim]."""
    keys = layer.k - layer.k.mean(1, keepdim=True)
    for queries, rows in zip(q, keys, strict=True):
        (q8, q_scale), (k8, k_scale) = (
            quantise_fp8(x, block=x.shape[-1]) for x in (queries.transpose(0, 1).contiguous(), rows)
        )
        yield Operands(q8, k8, q_scale[..., 0].contiguous(), k_scale[:, 0].contiguous())


def choose_all(operands: Operands, lens: Tensor, k: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return all scores, the exact choice [num_queries, k], and HISA's for each setting, like `hisa_top_k`."""
    scores = score_all(operands, lens)
    chosen: list[Tensor] = []
    block_size, block_scores = 0, scores
    for _, config in _settings(len(operands.k)):
        if block_size != config.block_size:
            block_size = config.block_size
            blocked = BlockedKeys.of_operands(operands, block_size)
            seen = num_blocks_reference(lens, block_size)
            block_scores = score_pages(operands.q, operands.weights, blocked.block_keys, blocked.block_pages, seen)
        candidates, _ = best_blocks(block_scores.clone(), lens, config)
        chosen.append(top_k(_within(scores, candidates, block_size), k, lens))
    return scores, top_k(scores, k, lens), chosen


def _within(scores: Tensor, candidates: Tensor, block_size: int) -> Tensor:
    """Return the scores with -inf for keys outside a query's candidate blocks [num_queries, num_blocks]."""
    num_blocks = -(-scores.shape[1] // block_size)
    is_candidate = torch.zeros(len(scores), num_blocks + 1, dtype=torch.bool).scatter_(1, candidates.long() + 1, True)
    keys = is_candidate[:, 1:].repeat_interleave(block_size, 1)[:, : scores.shape[1]]
    return scores.masked_fill(~keys, -torch.inf)


def _require_definition(context: RealContext, lens: Tensor, k: int) -> None:
    """Raise GateError unless `choose_all` agrees with `hisa_top_k`."""
    operands = next(indexers(context.layers[-1], context.layers[-1].q[:, :, -len(lens) :]))
    for (_, config), own in zip(_settings(context.context_len), choose_all(operands, lens, k)[2], strict=True):
        blocked = BlockedKeys.of_operands(operands, config.block_size)
        shared = overlap(hisa_top_k(operands.q, operands.weights, blocked, lens, k, config), own)
        gate(float(shared.min()) > 0.98, f"HISA chooses otherwise with {config}: IoU {float(shared.min())}")


def _last_queries(context: RealContext) -> list[Tensor]:
    """Return the queries of the last token after the context, by layer: [num_kv_heads, group_size, 1, head_dim]."""
    found: list[Tensor] = []

    def attend_layer(layer_idx: int, step: Step) -> Tensor:
        found.append(step.q[:, :, -1:].clone())
        return attend(context.layers[layer_idx], step, None, Reading(0, 0, context.context_len, "none"))

    context.predict(attend_layer)
    return found


def _rows_of(needle: list[int], context: list[int]) -> set[int]:
    """Return the rows of the needle's tokens. Raises GateError unless the context has the needle once."""
    starts = [i for i in range(len(context) - len(needle) + 1) if context[i : i + len(needle)] == needle]
    gate(len(starts) == 1, f"the needle stands {len(starts)} times in its context; wanted once")
    return set(range(starts[0], starts[0] + len(needle)))


def real_tables(cases: Sequence[Case]) -> list[str]:
    """Return Markdown tables: IoU and the share of scores kept, by block size and share; and needles, by depth."""
    lines = ["| IoU (least layer); scores kept | " + " | ".join(f"1/{round(1 / s)} of the keys" for s in SHARES) + " |"]
    lines.append("|---|" + "---:|" * len(SHARES))
    for block_size in BLOCK_SIZES:
        cells = []
        for share in SHARES:
            own = _of(cases, "iou", block_size, share)
            layers = np.mean([case["iou_by_layer"] for case in own], axis=0)
            kept = np.mean([case["score_kept_mean"] for case in own])
            cells.append(f"{layers.mean():.2f} ({layers.min():.2f}); {kept:.2f}")
        lines.append(f"| blocks of {block_size} | {' | '.join(cells)} |")
    return [*lines, "", *_needle_table(cases)]


def _needle_table(cases: Sequence[Case]) -> list[str]:
    lines = ["| needles kept, at depth | " + " | ".join(map(str, DEPTHS)) + " |", "|---|" + "---:|" * len(DEPTHS)]
    for block_size in BLOCK_SIZES:
        by_depth = {case["depth"]: case for case in _of(cases, "needles", block_size, SHOWN_SHARE)}
        shares = [by_depth[depth]["rows_found"] / max(1, by_depth[depth]["rows_found_exactly"]) for depth in DEPTHS]
        lines.append(f"| blocks of {block_size} | {' | '.join(f'{share:.2f}' for share in shares)} |")
    return lines


def _of(cases: Sequence[Case], what: str, block_size: int, share: float) -> list[Case]:
    return [case for case in cases if (case["what"], case["block_size"], case["share"]) == (what, block_size, share)]


_COLOURS = ("#0b61a4", "#2a9d8f", "#d98c00", "#b3261e")


def draw_real(cases: Sequence[Case], path: Path) -> None:
    """Plot IoU by layer, with a line for each block size."""
    figure = Figure(figsize=(7.5, 4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for block_size, colour, marker in zip(BLOCK_SIZES, _COLOURS, "os^D", strict=True):
        layers = np.mean([case["iou_by_layer"] for case in _of(cases, "iou", block_size, SHOWN_SHARE)], axis=0)
        axes.plot(layers, marker=marker, color=colour, clip_on=False, markersize=5, label=f"blocks of {block_size}")
    axes.set(xlabel="layer", ylabel="IoU with the exact indexer's choice", ylim=(0, 1))
    axes.set_title(f"HISA on real keys, candidates are 1/{round(1 / SHOWN_SHARE)} of the context", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
