"""Runs all measurements of a model on this machine by one command.

    python -m bench.all --out DIR [--model DIR] [--placement device|hybrid|host] [--only quality,load] [--quick]

Each part is a command of its own, which checks its results before it measures. Its figures go to DIR/PART.json. What
it prints, or that it failed, goes to DIR/report.md. If a part fails, the others still run. When called again, it runs
only the parts that are missing, and refuses a DIR with parts of other options. With a GPU, quality is measured on the
GPU too.

quality    KL to full attention on real texts of 6K to 8K tokens, with exact Top-K and full attention over low-bit KV
long       the same at 32K; a model with fewer positions is stretched (YaRN)
selectors  other published methods over the same contexts
tasks      passkeys, keys, chains and common words, hidden at all depths
growing    a long question and a long answer: KL at the end, and a step's time
codecs     KV in fewer bytes
rounding   weights in FP8 and 4 bits
build      the cost of the index compared with its prefill
load, load-full
           a service under conversations about documents: tokens a second, time to the first token; the same with full
           attention
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import torch

from bench.timing import GateError
from csattn.errors import CsattnError
from csattn.models.loader import read_config
from workers.engine.gpu.memory import PLACEMENTS

_LONG = 32768


def parts(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return each part's command, without --json."""
    few, device = options.quick, "cpu" if options.placement == "cpu" else "cuda"
    positions = read_config(options.model).max_position_embeddings
    long_len = "2048" if few else str(_LONG - 512)  # leaves positions for the tokens that follow
    stretch = 1.0 if few else max(1.0, _LONG / positions)
    on_device = ["--device", device, *(["--dtype", "bfloat16"] if device == "cuda" else [])]
    gate = ["--gate"] if device == "cpu" else []  # compares with csattn's own path, which runs on the CPU
    texts, near = ("speech", "1024") if few else ("novel,speech,code,spanish,dialogue", "7680")
    judged = ["--eval-len", "32" if few else "256"]
    of_model = ["--model", options.model] if options.model else []
    long = ["accuracy", "long", "--device", device, *of_model, *judged]
    load = [
        *("load", "--store", str(options.out / "store"), "--named"),
        *(("--contexts", "2", "--sessions", "4", "--turns", "2") if few else ("--contexts", "4", "--sessions", "24")),
    ]
    serve = ["--", "--local", *of_model, "--set", f"engine.placement={options.placement}"]
    return {
        "quality": [*long, "--texts", texts, "--contenders", "ours,low-bit", "--context-len", near, *gate],
        "long": [
            *(*long, "--texts", "decimal", "--contenders", "exact,default,default+ahead", "--stretch", f"{stretch:g}"),
            *("--context-len", long_len),
        ],
        "selectors": [
            *("accuracy", "selectors", *of_model, "--texts", texts, "--context-len", near, *judged),
            *("--selectors", "default,quest" if few else "all"),
        ],
        "tasks": [
            *("accuracy", "tasks", *of_model, *on_device, "--selectors", "default,exact"),
            *("--lengths", "1024" if few else "4096,8192"),
            *(("--tasks", "passkey", "--depths", "2") if few else ()),
        ],
        "growing": [
            *("growing", *of_model, "--placement", options.placement, "--device", device),
            *(("--context-len", "1500", "--own-len", "1400", *judged) if few else ()),
        ],
        "codecs": ["codecs", *of_model, "--texts", texts.split(",")[0]],
        "rounding": ["rounding", *of_model, *(("--len", "640", "--texts", "speech") if few else ())],
        "build": ["build", *of_model, "--device", device, "--contexts", "1023" if few else "8191"],
        "load": [*load, *serve],
        "load-full": [*load, "--selector", "full", *serve],
    }


def shown_command(name: str, command: list[str], out: Path) -> str:
    """Return a part's command line, which begins its section of the report."""
    at = command.index("--") if "--" in command else len(command)
    words = [*command[:at], "--json", str(out / f"{name}.json"), *command[at:]]
    return shlex.join(["python", "-m", f"bench.{words[0]}", *words[1:]])


def run(name: str, command: list[str], out: Path) -> str:
    """Run a part and return its section of the report: its output without JSON. Raises GateError if it fails."""
    path, shown = out / f"{name}.json", shown_command(name, command, out)
    print(f"{name}: {shown}", file=sys.stderr, flush=True)
    started = time.monotonic()
    with (out / f"{name}.log").open("w") as log:
        done = subprocess.run([sys.executable, *shlex.split(shown)[1:]], stdout=subprocess.PIPE, stderr=log, text=True)
    if done.returncode:
        raise GateError(f"{name} ended with {done.returncode}; {out / name}.log says why")
    print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("{")]
    if not any(lines):  # it printed nothing but JSON
        figures = {k: v for k, v in json.loads(path.read_text()).items() if isinstance(v, int | float | str)}
        lines = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in figures.items())]
    return "\n".join([f"## {name}", "", f"    {shown}", "", *lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model directory, .gguf file or hub id [default: the installed SmolLM2-135M]")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--placement", choices=("cpu", *PLACEMENTS), default="hybrid" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--only", default="", help="parts to run, comma-separated [default: all]")
    parser.add_argument(
        "--quick", action="store_true", help="take minutes instead of hours, with figures that are not worth keeping"
    )
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        all_parts = parts(options)
        wanted = [name for name in options.only.split(",") if name] or list(all_parts)
        if unknown := [name for name in wanted if name not in all_parts]:
            parser.error(f"there is no part {', '.join(unknown)}; choose of {', '.join(all_parts)}")
        for name, command in all_parts.items():
            section = options.out / f"{name}.md"
            if section.exists() and shown_command(name, command, options.out) not in section.read_text():
                parser.error(f"{section} has figures of another command; give its options, or another --out")
        failures: dict[str, str] = {}
        for name in wanted:
            section = options.out / f"{name}.md"
            if not section.exists():
                try:
                    section.write_text(run(name, all_parts[name], options.out))
                except GateError as error:
                    failures[name] = str(error)
                    print(f"error: {error}", file=sys.stderr, flush=True)
            sections = [f"# {options.model or 'SmolLM2-135M'}\n"]
            for part in all_parts:
                if (path := options.out / f"{part}.md").exists():
                    sections.append(path.read_text())
                elif part in failures:
                    sections.append(f"## {part}\n\nFailed: {failures[part]}\n")
            (options.out / "report.md").write_text("\n".join(sections))
    except CsattnError as error:
        sys.exit(f"error: {error}")
    if failures:
        sys.exit(f"error: {len(failures)} of {len(wanted)} parts failed: " + "; ".join(failures.values()))
    print(options.out / "report.md")


if __name__ == "__main__":
    main()
