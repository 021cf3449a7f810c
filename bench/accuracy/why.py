"""Why the published method loses quality: `default` is reached from it by one change at a time.

    python -m bench.accuracy why [--texts novel,speech] [--ways "path;C = 64"] [--keep 0.02] [--seconds 280] --json FILE
    python -m bench.accuracy why --show --json FILE [--plot FILE]

For every text: full attention over the context, then the tokens that follow, teacher-forced, with every layer choosing
rows in one way. Measured are KL to full attention's predictions, recall of each query head's exact Top-K, and the
attention mass of the rows read. Codebooks are FAISS's. For full attention's queries and keys, it also measures recall
and mass over the share kept, the subspaces' shares and the spectra. Cases that the file has are not measured again.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.accuracy.attending.attend import Codes, Reading, attend
from bench.accuracy.attending.context import ContextLayer, RealContext, Step, read_context, split_heads
from bench.accuracy.attending.heads import describe_heads
from bench.accuracy.attending.lists import ListCodes, make_layer_codebooks
from bench.accuracy.attending.sketches import SketchCodes, build_sketch
from bench.accuracy.contenders import shares
from bench.accuracy.long import read_text
from bench.accuracy.texts import TEXTS
from bench.accuracy.ways import CURVES, Way, find_ways
from bench.accuracy.why_report import draw, table
from bench.records import Records, require_one, tables
from bench.timing import finish, gate, machine
from csattn.config import ListConfig, SearchConfig, SketchConfig
from csattn.models import LoadedModel, load_model

VERSION = 1
KEY = ("version", "model", "text", "text_sha256", "context_len", "eval_len", "way", "keep")
COMPARED = "version", "model", "eval_len"  # a table or plot is of one of each
KEEPS = (0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002)  # the shares kept of the curves
HEADS, OVER_KEEP = "the heads themselves", "all"  # in a case's key, in place of a way's name and of a share kept


def compare(
    loaded: LoadedModel, text: str, lengths: tuple[int, int], ways: Sequence[Way], keeps: Sequence[float],
    records: Records, deadline: float,
) -> bool:  # fmt: skip
    """Measure the cases of one text that `records` lacks. Returns False if the deadline passed first.

    lengths: tokens of the context, and tokens predicted.
    """
    ids, sha256 = read_text(text, loaded.tokenizer, *lengths)
    context_len = len(ids) - lengths[1] - 1
    key: dict[str, Any] = {"version": VERSION, "model": loaded.name, "text": text, "text_sha256": sha256}
    key |= {"context_len": context_len, "eval_len": lengths[1]}
    wanted: list[tuple[Way, Any]] = [
        (way, keep) for way in ways for keep in (*keeps, *([OVER_KEEP] if way.name in CURVES else []))
    ]
    missing = [(way, keep) for way, keep in wanted if not records.has(**key, way=way.name, keep=keep)]
    has_heads = records.has(**key, way=HEADS, keep=None)
    if has_heads and not missing:
        return True
    if time.monotonic() > deadline:
        return False
    context = read_context(loaded, ids[:context_len], ids[context_len:])
    _require_full(context)
    if not has_heads:
        records.add({**key, "way": HEADS, "keep": None, **_heads(context)})
    codebooks: list[Tensor] = []
    made: Way | None = None
    codes: list[Codes | None] = []
    for way, keep in missing:
        if time.monotonic() > deadline:
            return False
        if way.codebooks is not None and (made is None or made.codebooks != way.codebooks):
            assert isinstance(way.index, ListConfig)
            codebooks = [make_layer_codebooks(_seen_by(way, layer), way.index) for layer in context.layers]
        if made is None or made.index != way.index:
            codes = [_codes(way, layer, codebooks[i : i + 1]) for i, layer in enumerate(context.layers)]
        made = way
        found = _curve(context, way, codes) if keep == OVER_KEEP else measure(context, way, keep, codes)
        records.add({**key, "way": way.name, "keep": keep, **found})
    return True


def measure(context: RealContext, way: Way, keep: float, codes: Sequence[Codes | None]) -> dict[str, float]:
    """Measure the predictions when every layer chooses rows in that way, and the choice itself."""
    reading = way.reading(SearchConfig(keep=keep).top_k(context.context_len))
    choices: list[Tensor] = []

    def attend_layer(layer_idx: int, step: Step) -> Tensor:
        out, chosen = _attend(context.layers[layer_idx], step, codes[layer_idx], reading)
        choices.append(judge(context.layers[layer_idx], step, chosen, reading, [reading.top_k])[0])
        return out

    log_probs, reference = context.predict(attend_layer), context.log_probs
    kl = context.kl(log_probs)
    recall, mass, rows = torch.stack(choices).mean(0).tolist()
    same = (reference.argmax(-1) == log_probs.argmax(-1)).float().mean()
    found = {"kl": float(kl.mean()), "recall": recall, "mass": mass, "top1_agreement": float(same)}
    found |= {"nll_gap": context.nll(log_probs) - context.nll(reference), "rows_per_kv_head": rows}
    return {name: round(value, 6) for name, value in found.items()}


def _curve(context: RealContext, way: Way, codes: Sequence[Codes | None]) -> dict[str, list[float]]:
    """Return recall and mass for each of `KEEPS`, choosing rows for the queries of full attention."""
    top_ks = [SearchConfig(keep=keep).top_k(context.context_len) for keep in KEEPS]
    reading, choices = way.reading(max(top_ks)), []

    def attend_layer(layer_idx: int, step: Step) -> Tensor:
        layer = context.layers[layer_idx]
        _, chosen = _attend(layer, step, codes[layer_idx], reading)
        choices.append(judge(layer, step, chosen, reading, top_ks))
        return attend(layer, step, None, _everything(context))

    context.predict(attend_layer)
    recall, mass, _ = torch.stack(choices).mean(0).T.tolist()
    return {"keeps": list(KEEPS), "recall": [round(x, 5) for x in recall], "mass": [round(x, 5) for x in mass]}


def judge(layer: ContextLayer, step: Step, chosen: Tensor, reading: Reading, top_ks: Sequence[int]) -> Tensor:
    """Return means [len(top_ks), 3] of recall, mass, and the rows fetched per KV head as a share of the context.

    chosen: [num_kv_heads or num_q_heads, num_tokens, K], the best first. Recall is of the exact Top-K of each query
    head. Rows that several heads of a group have chosen are fetched once.
    """
    num_heads, group_size, num_tokens, _ = step.q.shape
    near, seen = reading.near(layer.context_len, step.k.shape[1], torch.arange(num_tokens, device=step.q.device))
    logits = layer.softmax_scale * torch.cat([step.q @ layer.k[:, None].mT, step.q @ step.k[:, None].mT], dim=3)
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    best = logits.masked_fill(~seen | near, -torch.inf).topk(max(top_ks), dim=-1).indices
    found = []
    for top_k in top_ks:
        is_chosen = torch.zeros(*chosen.shape[:2], logits.shape[3], dtype=torch.bool, device=logits.device)
        is_chosen = is_chosen.scatter_(2, chosen[..., :top_k], True).unflatten(0, (num_heads, -1))
        is_read = (is_chosen | near).expand(-1, group_size, -1, -1)
        recall = is_read.gather(3, best[..., :top_k]).float().mean()
        mass = (weights * is_read).sum(-1).mean()
        fetched = (is_chosen & ~near).any(1).sum(-1).float().mean() / layer.context_len
        found.append(torch.stack([recall, mass, fetched]))
    return torch.stack(found)


def _attend(layer: ContextLayer, step: Step, codes: Codes | None, reading: Reading) -> tuple[Tensor, Tensor]:
    """Return the attention output, shaped like step.q, and the chosen rows."""
    chosen: list[Tensor] = []
    out = attend(layer, step, codes, reading, chosen.append)
    return out, torch.cat(chosen, dim=1)


def _seen_by(way: Way, layer: ContextLayer) -> ContextLayer:
    return split_heads(layer) if way.per_query_head else layer


def _codes(way: Way, layer: ContextLayer, codebooks: Sequence[Tensor]) -> Codes | None:
    if isinstance(way.index, SketchConfig):
        return SketchCodes(build_sketch(layer, way.index), layer)
    return None if way.index is None else ListCodes(_seen_by(way, layer), way.index, codebooks[0])


def _heads(context: RealContext) -> dict[str, Any]:
    """Return the statistics of `describe_heads`, averaged over all heads of all layers."""
    described: list[dict[str, Tensor]] = []

    def attend_layer(layer_idx: int, step: Step) -> Tensor:
        layer = context.layers[layer_idx]
        described.append(describe_heads(layer, step.q, SearchConfig().top_k(layer.context_len)))
        return attend(layer, step, None, _everything(context))

    context.predict(attend_layer)
    means = {name: torch.stack([layer[name] for layer in described]).mean(0) for name in described[0]}
    return {name: [round(x, 6) for x in mean.flatten().tolist()] for name, mean in means.items()}


def _everything(context: RealContext) -> Reading:
    return Reading(0, 0, context.context_len, "none")


def _require_full(context: RealContext) -> None:
    log_probs = context.predict(lambda idx, step: attend(context.layers[idx], step, None, _everything(context)))
    kl = float(context.kl(log_probs).mean())
    gate(abs(kl) < 1e-5, f"reading everything should be full attention, KL is {kl}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--texts", default="novel,speech,code,spanish", help=f"texts: {', '.join(TEXTS)}, or files")
    parser.add_argument(
        "--ways", default="all", help="ways to choose rows, by names and groups (exact, letter, path), separated by ';'"
    )
    parser.add_argument("--keep", type=shares, default=str(SearchConfig().keep))
    parser.add_argument("--context-len", type=int, default=4096)
    parser.add_argument("--eval-len", type=int, default=96)
    parser.add_argument("--seconds", type=float, default=1e9, help="time after which no further measurement begins")
    parser.add_argument("--model")
    parser.add_argument("--json", type=Path, help="file for the figures; figures already in it are not measured again")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--show", action="store_true", help="only show what --json holds; measure nothing")


def run(arguments: argparse.Namespace) -> None:
    deadline = time.monotonic() + arguments.seconds
    found, lengths = find_ways(arguments.ways), (arguments.context_len, arguments.eval_len)
    header = {"bench": "why", "torch": torch.__version__, "machine": machine()}
    records = Records(arguments.json, header, KEY)
    if not arguments.show:
        loaded = load_model(arguments.model, "float32")
        for text in arguments.texts.split(","):
            if not compare(loaded, text, lengths, found, arguments.keep, records, deadline):
                print("time is up; call again to go on")
                break
    print(tables(records.cases, (*COMPARED, "context_len"), table))
    if arguments.plot:
        require_one(records.cases, COMPARED)
        draw(records.cases, arguments.plot)
    finish(records.content, arguments.json)
