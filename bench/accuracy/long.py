"""Compares ways to keep a real long context small, csattn's and others', with full attention.

    python -m bench.accuracy long --texts novel,code --keep 0.02
    python -m bench.accuracy long --texts decimal,manual --context-len 32K --stretch 4 --device cuda --json FILE
    python -m bench.accuracy long --texts manual --context-len 64K --stretch 8 --record FILE --layers 13
    python -m bench.accuracy long --show FILE ... [--json FILE] [--plot FILE]     earlier figures, put together

For every text: full attention over the context and the tokens that follow, then the same tokens again, teacher-forced,
with every layer attending in another way, and the KL to full attention's predictions. A text `a+b` is the context a
followed by b, a question unlike its context. `--stretch` multiplies the model's positions (YaRN). Runs in torch on any
device; the sketch is built by `index_build` and searched by its definition. Gates: reading everything gives KL < 1e-5;
with `--gate`, KLs on the beginning of the first text are those of csattn's own artifact and session.
"""

import argparse
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.accuracy.attending.attend import Codes, Reading, attend
from bench.accuracy.attending.context import RealContext, Step, read_context
from bench.accuracy.attending.recording import record
from bench.accuracy.contenders import shares
from bench.accuracy.long_contenders import FULL_KV_BYTES, LongContender, contenders, find_contenders
from bench.accuracy.long_gate import require_product
from bench.accuracy.long_report import draw, table
from bench.accuracy.texts import TEXTS, find_text, named_texts, sha256_of, tokenize
from bench.decode.recording import save_recording
from bench.records import Case, Records, called, require_one, tables
from bench.timing import finish, gate, machine
from csattn.config import SearchConfig
from csattn.models import LoadedModel, load_model

# Raise it whenever the meaning of a measured figure changes.
VERSION = 4
KEY = ("version", "model", "stretch", "text", "text_sha256", "context_len", "eval_len", "contender", "keep")
COMPARED = "model", "eval_len"  # a table or plot is of one of each
ONE_KEEP = SearchConfig().keep
_LEAST_CONTEXT, _GATE_TOKENS = 1024, 48


def compare(
    loaded: LoadedModel, name: str, lengths: tuple[int, int], stretch: float, runs: Sequence[LongContender],
    keeps: Sequence[float], records: Records,
) -> None:  # fmt: skip
    """Measure the cases of one text that `records` lacks. lengths: tokens of the context, and tokens predicted."""
    ids, sha256 = read_text(name, loaded.tokenizer, *lengths)
    context_len = len(ids) - lengths[1] - 1
    key = {"version": VERSION, "model": called(loaded.name), "stretch": stretch, "text": name, "text_sha256": sha256}
    key |= {"context_len": context_len, "eval_len": lengths[1]}
    missing = {
        contender: [
            keep for keep in keeps_of(contender, keeps) if not records.has(**key, contender=contender.name, keep=keep)
        ]
        for contender in runs
    }
    if not any(missing.values()):
        return
    started = time.perf_counter()
    context = read_context(loaded, ids[:context_len], ids[context_len:])
    print(f"{name}: {context_len} + {lengths[1]} tokens read in {time.perf_counter() - started:.1f} s", flush=True)
    _require_full(context)
    key |= {"nll_full": round(context.nll(context.log_probs), 5), "python": platform.python_version()}
    key |= {"device": torch.cuda.get_device_name() if loaded.device.type == "cuda" else "cpu"}
    codes: list[Codes | None] = []
    makes: set[Any] = set()  # the `make` of the codes held: one, or none at first
    for contender, wanted in missing.items():
        if wanted and contender.make not in makes:
            codes.clear()  # frees memory for the next codes
            codes += [contender.codes(layer) for layer in context.layers]
            makes = {contender.make}
        for keep in wanted:
            found = measure(context, contender, keep, codes)
            exact = _kl_of(records, {**key, "contender": "exact", "keep": keep})
            found["times_exact"] = round(found["kl"] / exact, 4) if exact else None
            records.add({**key, "contender": contender.name, "group": contender.group, "keep": keep, **found})


def keeps_of(contender: LongContender, keeps: Sequence[float]) -> Sequence[float]:
    """Return the shares of rows at which a contender is measured; 0 if it does not choose a share."""
    if not contender.has_keep:
        return [0.0]
    return [keep for keep in keeps if keep == ONE_KEEP] if contender.one_keep else keeps


def measure(
    context: RealContext, contender: LongContender, keep: float, codes: Sequence[Codes | None]
) -> dict[str, Any]:
    """Measure a contender's predictions and its bytes."""
    reading = contender.reading(keep, context.context_len)

    def attend_layer(layer_idx: int, step: Step) -> Tensor:
        return attend(context.layers[layer_idx], step, codes[layer_idx], reading)

    log_probs = context.predict(attend_layer, contender.ahead)
    kl = context.kl(log_probs)
    same = (context.log_probs.argmax(-1) == log_probs.argmax(-1)).float().mean()
    found: dict[str, Any] = {"kl": float(kl.mean()), "kl_p99": float(kl.quantile(0.99)), "top1_agreement": float(same)}
    found |= {"nll": context.nll(log_probs), **_bytes(context, contender, reading, codes)}
    return {name: round(value, 7) for name, value in found.items()}


def _bytes(
    context: RealContext, contender: LongContender, reading: Reading, codes: Sequence[Codes | None]
) -> dict[str, float]:
    """Return bytes per key (with its value) and KV head: of codes, and of all data on the device and on the host.

    The device holds what stays there between steps. Without codes, it holds all keys, to be searched. Rows that are
    fetched are on the host, with 16 bits a number.
    """
    num_heads, context_len, head_dim = context.layers[0].k.shape
    row = FULL_KV_BYTES * head_dim
    first = codes[0]
    near = (reading.sink_len + reading.window_len) * row / context_len
    if first is None:
        if not reading.top_k:
            return {"code_bytes_per_key": 0.0, "device_bytes_per_key": near, "host_bytes_per_key": 0.0}
        return {"code_bytes_per_key": row / 2, "device_bytes_per_key": row / 2 + near, "host_bytes_per_key": float(row)}
    index_heads = context.layers[0].q.shape[1] if contender.per_query_head else 1  # of a KV head
    device = index_heads * first.device_bytes_per_key + first.fixed_bytes / (num_heads * context_len) + near
    if reading.rest == "moments":
        device += (2 + 2 * head_dim) * head_dim * 4 / context_len
    of_host = index_heads * (first.bytes_per_key - first.device_bytes_per_key)
    host, code_bytes = row + of_host if reading.top_k or of_host else 0, index_heads * first.bytes_per_key
    if first.evicts:
        host, device = 0, device + reading.top_k * row / context_len
    return {"code_bytes_per_key": code_bytes, "device_bytes_per_key": device, "host_bytes_per_key": host}


def read_text(name: str, tokenizer: Any, context_len: int, eval_len: int) -> tuple[NDArray[np.int32], str]:
    """Return the token ids of a context and the eval_len + 1 that follow, and the SHA-256 of their text or texts.

    The context is shorter than context_len if its text is.
    """
    parts = [find_text(part) for part in name.split("+")]
    gate(len(parts) <= 2, f"{name!r} is more than a context and what follows it; give one text, or two")
    context, following = tokenize(parts[0], tokenizer), tokenize(parts[-1], tokenizer)
    sha256 = "+".join(sha256_of(part) for part in parts)
    if len(parts) == 1:
        ids = context[: context_len + eval_len + 1]
    else:
        needed = eval_len + 1
        gate(len(following) >= needed, f"{parts[1].path} has {len(following)} tokens, and {needed} should follow")
        ids = np.concatenate([context[:context_len], following[:needed]])
    least = _LEAST_CONTEXT + eval_len + 1
    gate(
        len(ids) >= least,
        f"{len(ids)} tokens of {name} are no long context: at least {least} are needed; give a longer text, or a "
        "larger --context-len",
    )
    return ids, sha256


def _record(loaded: LoadedModel, arguments: argparse.Namespace) -> None:
    """Save real rows of the first text for `bench.decode`."""
    name = arguments.texts.split(",")[0]
    ids, sha256 = read_text(name, loaded.tokenizer, arguments.context_len, arguments.eval_len)
    context_len = len(ids) - arguments.eval_len - 1
    context = read_context(loaded, ids[:context_len], ids[context_len:])
    recording = record(context, arguments.layers, arguments.stretch, sha256)
    save_recording(recording, arguments.record)
    size = arguments.record.stat().st_size
    finish({"bench": "long", "recorded": str(arguments.record), "context_len": context_len, "file_bytes": size}, None)


def _compare_with_product(loaded: LoadedModel, name: str) -> dict[str, Any]:
    gate(loaded.device.type == "cpu", "--gate compares with the product's path on the CPU; add --device cpu")
    ids = read_text(name, loaded.tokenizer, _LEAST_CONTEXT, _GATE_TOKENS)[0]
    compared = require_product(loaded, ids[:_LEAST_CONTEXT], ids[_LEAST_CONTEXT:])
    for contender, (ours, product) in compared.items():
        print(f"{contender}: KL {ours:.7f}, the product's {product:.7f}", flush=True)
    return {"text": name, "context_len": _LEAST_CONTEXT, "eval_len": _GATE_TOKENS, "kl_and_product": compared}


def _require_full(context: RealContext) -> None:
    everything = Reading(context.context_len, 4, 16, "none")
    log_probs = context.predict(lambda layer_idx, step: attend(context.layers[layer_idx], step, None, everything))
    kl = float(context.kl(log_probs).mean())
    gate(abs(kl) < 1e-5, f"reading everything should be full attention, KL is {kl}")


def merge(files: Sequence[Sequence[Case]], records: Records) -> list[Case]:
    """Return every case once, in the order of first appearance: its newest version, from the last file that has it."""
    merged: dict[tuple[Any, ...], Case] = {}
    for case in (case for cases in files for case in cases):
        key = records.key_of({**case, "version": None})
        if key not in merged or merged[key]["version"] <= case["version"]:
            merged[key] = case
    return list(merged.values())


def _kl_of(records: Records, key: Case) -> float | None:
    wanted = records.key_of(key)
    return next((case["kl"] for case in records.cases if records.key_of(case) == wanted), None)


def token_count(text: str) -> int:
    """Parse a number of tokens, such as 7680 or 32K, for argparse."""
    return int(text[:-1]) * 1024 if text.endswith(("k", "K")) else int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--texts", default="novel,speech,code,dialogue,spanish", help=f"texts: {', '.join(TEXTS)}, odd, or files"
    )
    parser.add_argument(
        "--contenders", default="all", help="methods to compare, by names and groups: " + ", ".join(_groups())
    )
    parser.add_argument("--keep", type=shares, default="0.005,0.01,0.02,0.05")
    parser.add_argument(
        "--context-len",
        type=token_count,
        default="7680",
        help="tokens of context, such as 7680 or 32K; fewer if the text is shorter",
    )
    parser.add_argument("--eval-len", type=int, default=256)
    parser.add_argument("--stretch", type=float, default=1.0, help="factor by which YaRN extends the model's positions")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--gate", action="store_true", help="first compare with the product's own code path")
    parser.add_argument("--model")
    parser.add_argument("--json", type=Path, help="file for the figures; figures already in it are not measured again")
    parser.add_argument("--plot", type=Path)
    parser.add_argument(
        "--record", type=Path, help="only save real rows of the first text to this file (.npz), for bench.decode"
    )
    parser.add_argument("--layers", type=_numbers, default="3,13,24", help="layers that --record saves")
    parser.add_argument("--show", type=Path, nargs="+", help="only show what these files hold together")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _groups() -> list[str]:
    return sorted({contender.group for contender in contenders()})


def run(arguments: argparse.Namespace) -> None:
    loaded = (
        None
        if arguments.show
        else load_model(arguments.model, "float32", device=arguments.device, stretch=arguments.stretch)
    )
    header = {"bench": "long", "search": asdict(SearchConfig()), "torch": torch.__version__}
    fixed_fields = () if loaded is None else ("search",)
    records = Records(arguments.json, {**header, "machine": machine()}, KEY, fixed_fields)
    if loaded is None:
        shown = [json.loads(file.read_text()) for file in arguments.show]
        for file, content in zip(arguments.show, shown, strict=True):
            gate(content.get("bench") == "long", f"{file} has no figures of `long`; leave it out")
        records.content["cases"] = merge([content["cases"] for content in shown], records)
        records.content |= {"gate": next((content["gate"] for content in shown if "gate" in content), None)}
    else:
        runs = find_contenders(arguments.contenders)
        if arguments.record:
            return _record(loaded, arguments)
        if arguments.gate:
            records.content["gate"] = _compare_with_product(loaded, arguments.texts.split(",")[0])
        for name in named_texts(arguments.texts):
            lengths = arguments.context_len, arguments.eval_len
            compare(loaded, name, lengths, arguments.stretch, runs, arguments.keep, records)
    newest = merge([records.cases], records)
    print(tables(newest, COMPARED, table))
    if arguments.plot:
        require_one(newest, COMPARED)
        draw(newest, arguments.plot)
    finish(records.content, arguments.json)
