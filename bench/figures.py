"""Tables in the documents, made of result files.

python -m bench.figures           writes them between their marks
python -m bench.figures --check   exits with 1 where one is not what its result file gives
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STEPS = "decode-steps-h200.json"
QUALITY = "quality.json", "quality-cpu.json"  # the second is of the sketch as it is now, of fewer texts
EVERY_STEP, AHEAD = "every step", "one layer ahead"
Case = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    is_check, stale = parser.parse_args().check, []
    for (document, mark), table in TABLES.items():
        path = ROOT / document
        text = path.read_text()
        new = with_table(text, mark, table())
        if new == text:
            continue
        stale.append(f"{document}: {mark}")
        if not is_check:
            path.write_text(new)
    if is_check and stale:
        print(f"not what the result files give: {', '.join(stale)}; run python -m bench.figures", file=sys.stderr)
    return int(is_check and bool(stale))


def with_table(text: str, mark: str, lines: list[str]) -> str:
    """The document with these lines between <!-- mark --> and <!-- /mark -->. Raises ValueError where they are not."""
    pattern = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"there is no <!-- {mark} --> and <!-- /{mark} -->")
    return pattern.sub(lambda found: found[1] + "".join(line + "\n" for line in lines) + found[2], text)


@cache
def measured(name: str) -> list[Case]:
    """The cases of a result file."""
    return list(json.loads((ROOT / "bench" / "results" / name).read_text())["cases"])


def case(batch_size: int, context_len: int, placement: str, **more: Any) -> Case:
    """A case of whole steps; `default`, searched at every step, unless said."""
    wanted = {"variant": "default", "schedule": EVERY_STEP, "kv_codec": None, **more}
    wanted |= {"batch_size": batch_size, "context_len": context_len, "placement": placement}
    [found] = [case for case in measured(STEPS) if all(case.get(name) == value for name, value in wanted.items())]
    return dict(found)


def full(batch_size: int, context_len: int) -> Case:
    return case(batch_size, context_len, "device", variant="full", schedule="none")


def first_screen() -> list[str]:
    """The README's."""
    n = 131072
    at_once, ahead = kl_range("default"), f"{kl_range('default+ahead')} (chosen a layer ahead)"
    rows = [
        ("full attention", full(1, n), "0"),
        ("csattn, `device`: sketch and KV on the device", case(1, n, "device"), at_once),
        ("csattn, `hybrid`: KV in host memory", case(1, n, "hybrid"), "the same"),
        ("csattn, `host`: searched by 16 CPUs, too", case(1, n, "host", schedule=AHEAD), ahead),
    ]
    head = ["| | a step, ms | on the device, GB | KL to full attention |", "|---|---:|---:|---:|"]
    return head + [f"| {name} | {milliseconds(of):.1f} | {of['hbm_bytes'] / 1e9:.1f} | {kl} |" for name, of, kl in rows]


def kl_range(contender: str) -> str:
    """KL to full attention at 2 % on the real texts, each continued by itself: the newest of each."""
    cases = [c for name in QUALITY for c in measured(name) if c["contender"] == contender and c["keep"] == 0.02]
    of_texts = {(c["text"], c["context_len"]): c["kl"] for c in cases if "+" not in c["text"]}
    return f"{min(of_texts.values()):.4f} to {max(of_texts.values()):.4f}"


def steps() -> list[str]:
    """Whole steps, beside full attention of the same requests."""
    groups: list[tuple[str, tuple[int, int], list[tuple[str, dict[str, Any]]]]] = [
        (
            "one request, 128K",
            (1, 131072),
            [
                ("device", {}),
                ("device", {"schedule": AHEAD}),
                ("device", {"kv_codec": "q8_0"}),
                ("hybrid", {}),
                ("hybrid", {"schedule": AHEAD}),
                ("host", {"schedule": AHEAD}),
                ("host+8", {"schedule": AHEAD}),
            ],
        ),
        ("four requests with contexts of their own, 128K", (4, 131072), [("device", {}), ("hybrid", {})]),
        ("one request, 1M", (1, 1048576), [("hybrid", {})]),
        ("32 requests on one context of 64K", (32, 65536), [("device", {}), ("hybrid", {})]),
    ]
    lines = ["| | ms a step, p50 (p99) | GB on the device | × full attention |", "|---|---:|---:|---:|"]
    for what, (batch_size, context_len), cases in groups:
        beside = full(batch_size, context_len) if context_len < 1048576 else None
        if beside:
            lines.append(line(f"{what}: full attention", beside, beside))
        for placement, more in cases:
            name = ", ".join(
                [
                    "`" + placement + "`",
                    *(["a layer ahead"] if "schedule" in more else []),
                    *([more["kv_codec"]] if "kv_codec" in more else []),
                ]
            )
            lines.append(line(f"{what}: {name}", case(batch_size, context_len, placement, **more), beside))
    return lines


def line(name: str, of: Case, beside: Case | None) -> str:
    times = "" if beside is None else f"{beside['p50_us'] / of['p50_us']:.2f}"
    return f"| {name} | {milliseconds(of):.2f} ({of['p99_us'] / 1e3:.2f}) | {of['hbm_bytes'] / 1e9:.1f} | {times} |"


def milliseconds(of: Case) -> float:
    """Of a step, the median."""
    return float(of["p50_us"]) / 1e3


def capacity() -> list[str]:
    """What an operator plans with."""
    from bench.plan import table  # which takes cases from here

    return table()


TABLES: dict[tuple[str, str], Callable[[], list[str]]] = {
    ("README.md", "first-screen"): first_screen,
    ("bench/README.md", "steps"): steps,
    ("docs/operate.md", "plan"): capacity,
}

if __name__ == "__main__":
    raise SystemExit(main())
