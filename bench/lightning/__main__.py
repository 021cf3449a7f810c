"""Compares learned indexers with StreamIndex's published method, table by table.

    python -m bench.lightning check                                    the gate: exit status 1 if a choice is wrong
    python -m bench.lightning tables --out FILE [--tables 2,3] [--max-tokens 1048576] [--seconds 540]
    python -m bench.lightning show   FILE [--markdown FILE]
    python -m bench.lightning topk|decode|hisa [--out FILE] [--seconds 150]
    python -m bench.lightning layer [--max-tokens 1048576] [--out FILE] [--seconds 150]
    python -m bench.lightning real [--texts novel,code] [--context-len 4096] [--out FILE] [--plot FILE] [--seconds 150]

`tables` measures the rows that its file lacks, quick ones first, and begins none after --seconds. So do the suites
`topk` (exact selection), `decode` (steps of DSA, workloads of the FlashInfer contest) and `hisa` (the figure of HISA's
paper), which compare each result with its definition before they time it. `layer` compares a whole layer of DeepSeek-V4
with transformers'. `real` measures HISA's choice on a real model's keys.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from bench.lightning import decode_suite, hisa_suite, topk_suite
from bench.lightning.cases import KEY, cases_of
from bench.lightning.hisa_real import draw_real, real_tables, run_real
from bench.lightning.inputs import Shape, forget_inputs
from bench.lightning.report import as_markdown
from bench.lightning.suite import run_suite
from bench.lightning.suite_report import suites_as_markdown
from bench.records import Records
from bench.timing import finish

SUITES = {"topk": topk_suite.trials, "decode": decode_suite.trials, "hisa": hisa_suite.trials}


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="check that choices are exact")
    tables = commands.add_parser("tables", help="measure StreamIndex's tables, row for row")
    tables.add_argument("--out", type=Path, required=True)
    tables.add_argument("--tables", type=lambda text: {int(name) for name in text.split(",")}, default=set(range(2, 8)))
    tables.add_argument("--max-tokens", type=int, default=1 << 20)
    tables.add_argument("--seconds", type=float, default=540)
    show = commands.add_parser("show", help="show a result file as Markdown")
    show.add_argument("file", type=Path)
    show.add_argument("--markdown", type=Path)
    for name in SUITES:
        suite = commands.add_parser(name, help=f"the suite of bench/lightning/{name}_suite.py")
        suite.add_argument("--out", type=Path)
        suite.add_argument("--seconds", type=float, default=150)
    layer = commands.add_parser("layer", help="measure compressed attention, from hidden states to output")
    layer.add_argument("--max-tokens", type=int, default=1 << 20)
    layer.add_argument("--out", type=Path)
    layer.add_argument("--seconds", type=float, default=150)
    real = commands.add_parser("real", help="evaluate HISA's choice on a real model's keys, on the CPU")
    real.add_argument("--texts", default="novel,code")
    real.add_argument("--context-len", type=int, default=4096)
    real.add_argument("--out", type=Path)
    real.add_argument("--plot", type=Path)
    real.add_argument("--seconds", type=float, default=150)
    chosen = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if chosen.command in SUITES:
        run_suite(SUITES[chosen.command](device), chosen.out, _machine(device), chosen.seconds, device)
    elif chosen.command == "layer":
        from bench.lightning.layer import run_layers

        run_layers(chosen.out, _machine(device), chosen.max_tokens, chosen.seconds, device)
    elif chosen.command == "real":
        records = run_real(chosen.out, chosen.texts.split(","), chosen.context_len, chosen.seconds)
        print("\n".join(real_tables(records.cases)))
        if chosen.plot:
            draw_real(records.cases, chosen.plot)
        finish(records.content, None)
    elif chosen.command == "check":
        _check(device)
    elif chosen.command == "tables":
        run_tables(chosen.out, chosen.tables, chosen.max_tokens, chosen.seconds, device)
    else:
        _show(chosen)


def _check(device: str) -> None:
    from bench.lightning.check import check

    on_gpu = device == "cuda"
    faults = check(device, *((1500, 6001, 1 << 15) if on_gpu else (70, 301, 1024)), Shape(dim=4096 if on_gpu else 64))
    if faults:
        raise SystemExit(f"{len(faults)} faults:\n" + "\n".join(faults))
    print("all choices are exact")


def run_tables(
    out: Path, tables: set[int], max_tokens: int, seconds: float, device: str, shape: Shape | None = None
) -> None:
    """Measure the cases that the file lacks, and add them to it."""
    from bench.lightning.run_case import run_case

    records = Records(out, {"bench": "lightning", "machine": _machine(device)}, KEY)
    deadline, tokens = time.monotonic() + seconds, 0
    for case in cases_of(tables, max_tokens):
        if records.has(**case.key):
            continue
        if time.monotonic() > deadline:
            print(f"time is up before {case}; call again to go on")
            break
        if case.num_tokens != tokens:
            forget_inputs()
            tokens = case.num_tokens
        records.add({**case.key, **run_case(case, device, shape)})
    finish(records.content, None)  # the file already has every case and this run's header


def _machine(device: str) -> dict[str, Any]:
    if device == "cpu":
        from bench.timing import machine

        return machine()
    from bench.decode.gpu_timing import device_machine

    return device_machine()


def _show(chosen: argparse.Namespace) -> None:
    content = json.loads(chosen.file.read_text())
    of_suites = any("suite" in case for case in content["cases"])
    text = suites_as_markdown(content) if of_suites else as_markdown(content)
    print(text)
    if chosen.markdown:
        chosen.markdown.write_text(text + "\n")


if __name__ == "__main__":
    main()
