"""Compares every selector with full attention, on texts of different kinds and at several shares kept.

For every text: prefill a context, teacher-force the tokens that follow with sparse attention in every layer, and
compare with full attention. Gate: reading everything gives KL < 1e-5. Cases that the JSON file already has are not
measured again, and contexts are built once and kept in the store, so a long run can be interrupted and continued.
"""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.accuracy.contenders import Contender, find_contenders, shares
from bench.accuracy.contexts import Context
from bench.accuracy.texts import TEXTS, cut_text, find_text
from bench.records import Case, Records, tables
from bench.selector_cases import VERSION
from bench.timing import finish, gate, machine
from csattn.config import SearchConfig
from csattn.models import LoadedModel, load_model
from workers.evaluate import Baseline, full_attention, measure

KEY = ("version", "model", "text_sha256", "context_len", "eval_len", "contender", "keep")
STORE = Path("build/bench-accuracy")


def compare(
    loaded: LoadedModel,
    name: str,
    lengths: tuple[int, int],  # in tokens: of the context, and of the prediction
    contenders: list[Contender],
    keeps: list[float],
    store: Path,
    records: Records,
) -> None:
    """Measure the cases of one text that `records` lacks."""
    context_len, eval_len = lengths
    text = find_text(name)
    cut = cut_text(text, loaded.tokenizer, context_len, eval_len)
    key = {"version": VERSION, "model": loaded.fingerprint, "text_sha256": cut.sha256}
    key |= {"context_len": context_len, "eval_len": eval_len}
    missing = [
        (contender, keep)
        for contender in contenders
        for keep in keeps
        if not records.has(**key, contender=contender.name, keep=keep)
    ]
    if not missing:
        return
    with Context(loaded, cut.context, store) as context:
        baseline = _gated_baseline(loaded, context, cut.following)
        for contender, keep in missing:
            quality = measure(
                loaded,
                context.artifact(contender.preset),
                contender.search(keep),
                contender.selector,
                cut.following,
                baseline,
            )
            found = {**quality.to_json(), "nll_full": round(baseline.nll, 6)}
            found["load_average"] = machine()["load_average"]  # times measured on a busy machine mean little
            records.add({**key, "text": name, "contender": contender.name, "keep": keep, **found})


def _gated_baseline(loaded: LoadedModel, context: Context, following: Any) -> Baseline:
    artifact = context.artifact("default")
    baseline = full_attention(loaded, artifact, following)
    whole = measure(loaded, artifact, SearchConfig(keep=1.0), "csattn", following, baseline)
    gate(whole.kl < 1e-5, f"reading everything should be full attention, KL is {whole.kl}")
    return baseline


def table(cases: list[Case]) -> str:
    """Return Markdown tables, one for each keep and text, with the smallest KL first."""
    lines: list[str] = []
    for keep in sorted({case["keep"] for case in cases}, reverse=True):
        for text in dict.fromkeys(case["text"] for case in cases):
            rows = [case for case in cases if (case["keep"], case["text"]) == (keep, text)]
            if rows:
                lines += ["", *_block(f"keep {100 * keep:g} %, {text}", sorted(rows, key=lambda case: case["kl"]))]
    return "\n".join(lines[1:])


def _block(title: str, rows: list[Case]) -> list[str]:
    columns = "KL | NLL gap | top-1 | recall | mass | error | moved MB | search MB | rest MB | search ms | index B/key"
    return [
        f"| {title} | {columns} |",
        "|---|" + "---:|" * (columns.count("|") + 1),
        *(
            f"| {r['contender']} | {r['kl']:.4f} | {r['nll'] - r['nll_full']:+.4f} | {r['top1_agreement']:.3f} | "
            f"{r['recall_at_k']:.3f} | {r['attention_mass']:.3f} | {r['output_error']:.3f} | "
            f"{r['moved_bytes_per_step'] / 1e6:.2f} | {r['search_bytes_per_step'] / 1e6:.2f} | "
            f"{r['rest_bytes_per_step'] / 1e6:.2f} | "
            f"{r['search_ms_per_step']:.1f} | {r['index_bytes_per_key']:.0f} |"
            for r in rows
        ),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--texts", default="novel,code,dialogue,spanish", help=f"texts: {', '.join(TEXTS)}, or files")
    parser.add_argument(
        "--selectors", default="all", help="selectors and presets, such as default+rest=none or lists, or all"
    )
    parser.add_argument("--keep", type=shares, default="0.05,0.02")
    parser.add_argument("--context-len", type=int, default=7680)
    parser.add_argument("--eval-len", type=int, default=256)
    parser.add_argument("--model")
    parser.add_argument("--store", type=Path, default=STORE, help="store that keeps the contexts")
    parser.add_argument("--json", type=Path, help="file for the figures; figures already in it are not measured again")


def run(arguments: argparse.Namespace) -> None:
    contenders = find_contenders(arguments.selectors)
    loaded = load_model(arguments.model, "float32")
    search = {name: value for name, value in asdict(SearchConfig()).items() if name != "keep"}  # each case has its own
    header = {"bench": "selectors", "model": loaded.name, "search": search, "machine": machine()}
    records = Records(arguments.json, header, KEY, fixed_fields=("search",))
    for name in arguments.texts.split(","):
        lengths = arguments.context_len, arguments.eval_len
        compare(loaded, name, lengths, contenders, arguments.keep, arguments.store, records)
    cases = [case for case in records.cases if case["version"] == VERSION]
    print(tables(cases, ("model", "context_len", "eval_len"), table))
    finish(records.content, arguments.json)
