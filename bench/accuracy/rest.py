"""How well codes estimate the attention mass of the rest: its log-sum-exp by codes, compared with the exact one."""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.accuracy.attending.attend import Reading, attend
from bench.accuracy.attending.context import ContextLayer, Step, read_context
from bench.accuracy.attending.sketches import SketchCodes, build_sketch
from bench.accuracy.long import read_text
from bench.accuracy.texts import TEXTS
from bench.records import Records
from bench.timing import finish, gate, machine
from csattn.config import SearchConfig, SketchConfig
from csattn.models import LoadedModel, load_model
from csattn.sketch import SketchIndex, reference

KEY = "model", "text", "text_sha256", "context_len", "eval_len", "keep"


def compare(loaded: LoadedModel, text: str, lengths: tuple[int, int], search: SearchConfig) -> dict[str, Any]:
    """Return statistics of `mass_errors` over tokens, layers and query heads. lengths: of context and prediction."""
    ids, sha256 = read_text(text, loaded.tokenizer, *lengths)
    context_len, errors = len(ids) - lengths[1] - 1, list[Tensor]()
    context = read_context(loaded, ids[:context_len], ids[context_len:])
    reading = Reading(search.top_k(context_len), search.sink_len, search.window_len, "codes")

    def attend_layer(layer_idx: int, step: Step) -> Tensor:
        layer = context.layers[layer_idx]
        errors.append(mass_errors(layer, step, build_sketch(layer, SketchConfig()), reading).flatten())
        return attend(layer, step, None, Reading(0, 0, context_len, "none"))

    context.predict(attend_layer)
    found = torch.cat(errors)
    stats = {"mean": float(found.mean()), "median": float(found.median()), "below": float((found < 0).float().mean())}
    key = {"model": loaded.name, "text": text, "text_sha256": sha256, "context_len": context_len}
    sizes = {"eval_len": lengths[1], "keep": search.keep, "num_queries": len(found)}
    return key | sizes | {name: round(value, 4) for name, value in stats.items()}


def mass_errors(layer: ContextLayer, step: Step, index: SketchIndex, reading: Reading) -> Tensor:
    """Return the rest's log-sum-exp by codes minus the exact one, in nats: [num_kv_heads, group_size, num_tokens].

    Raises GateError if the first token's differs from the sketch's definition.
    """
    codes, chosen = SketchCodes(index, layer), list[Tensor]()
    attend(layer, step, codes, reading, chosen.append)
    near, _ = reading.near(layer.context_len, step.k.shape[1], torch.arange(step.q.shape[2], device=step.q.device))
    is_rest = (~near[:, : layer.context_len]).repeat(len(layer.k), 1, 1).scatter(2, torch.cat(chosen, dim=1), False)
    estimated = layer.softmax_scale * codes.logits(step.q.flatten(1, 2)).unflatten(1, step.q.shape[1:3])
    exact = layer.softmax_scale * step.q @ layer.k[:, None].mT
    estimated_mass, mass = (x.masked_fill(~is_rest[:, None], -torch.inf).logsumexp(-1) for x in (estimated, exact))
    first = step.q[:, :, 0].flatten(0, 1).cpu().numpy(), index, is_rest[:, 0].cpu().numpy(), layer.softmax_scale
    defined = torch.from_numpy(reference.attend_rest(*first)[1]).to(estimated)
    off = float((estimated_mass[:, :, 0].flatten() - defined).abs().max())
    gate(off < 1e-3, f"the rest's mass should be that of the sketch's definition, it is off by {off} nats")
    return estimated_mass - mass


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--texts", default="novel,speech,spanish", help=f"texts: {', '.join(TEXTS)}, or files")
    parser.add_argument("--context-len", type=int, default=4096)
    parser.add_argument("--eval-len", type=int, default=96)
    parser.add_argument("--model")
    parser.add_argument("--json", type=Path, help="file for the figures")


def run(arguments: argparse.Namespace) -> None:
    records = Records(arguments.json, {"bench": "rest", "machine": machine()}, KEY)
    loaded, lengths = load_model(arguments.model, "float32"), (arguments.context_len, arguments.eval_len)
    for text in arguments.texts.split(","):
        records.add(compare(loaded, text, lengths, SearchConfig()))
    finish(records.content, arguments.json)
