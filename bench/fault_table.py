"""A table of faults, how often each was tried, and wrong answers, from the result files of the fault benchmarks.

`make faults` runs the benchmarks that need no GPU, and makes the table again. The results of a GPU's service come from
three simultaneous runs of `bench.faults --kills 10`, while a trace (`bench.load`) was running.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")
ARTIFACTS = {  # faults of an artifact's files: title -> name in bench.fuzz
    "bytes flipped": "flip bytes", "values forged": "forge values", "runs of bytes overwritten": "fill bytes",
    "a file cut off": "cut", "a file too long": "lengthen", "files swapped, or another's": "swap",
    "a file gone": "remove",
    "a pipe, a directory or a link in its place": "replace", "a file too many": "add",
    "the manifest edited": "edit manifest",
}  # fmt: skip
CLIENTS = {  # faults of clients: title -> names in bench.hostile
    "values of other types, anywhere in a body": ("wrong types", "wrong somewhere", "bad context"),
    "values beyond all bounds": ("beyond all bounds",),
    "JSON broken, too deep, too wide; numbers without end": ("broken json", "deep json", "wide json", "long number"),
    "Unicode that is none": ("odd unicode",),
    "bodies too large, whole or in chunks": ("oversize", "oversize in chunks"),
    "lengths that lie, chunks that are none, smuggling": ("lies about length", "odd chunks", "smuggling"),
    "no HTTP, odd addresses, other kinds of body": ("no http", "odd address", "wrong kind of body"),
    "headers too large": ("large header", "huge header"),
    "keys that are none": ("bad key",),
    "clients that leave: in the body, in the answer, in a stream": (
        "hangs up in the body", "hangs up in the answer", "cuts a stream",
    ),
    "many requests in one write": ("pipelined",),
}  # fmt: skip


def table() -> list[str]:
    fuzz, hostile = kept("fuzz"), kept("hostile")
    kills, turns, tenants = (kept(f"turns-{name}") for name in ("kills", "conversation", "tenants"))
    require_none(fuzz["faults"], hostile["num_faults"], kills["wrong_tokens"], kills["damaged_files"])
    require_none(turns["wrong_answers"], tenants["wrong_answers"], tenants["foreign_words"])
    rows = [
        (f"an artifact: {name}", fuzz["by_kind"][kind], "refused, or an answer") for name, kind in ARTIFACTS.items()
    ]
    rows += [(f"a client: {name}", *replies(hostile, kinds)) for name, kinds in CLIENTS.items()]
    rows += [(f"a GPU's service: {name} killed in the middle of answers", *of) for name, of in gpu_kills().items()]
    rows += [
        ("the service killed at random", kills["kills"], f"{kills['whole_answers']} answers, all right"),
        ("the service killed between turns", turns["turns"] - 1, "each turn found what was written"),
        ("tenants with the same text", tenants["requests"], "no word of another's"),
    ]
    return [
        "| fault | tries | what came | wrong |",
        "|---|---:|---|---:|",
        *(f"| {a} | {b} | {c} | 0 |" for a, b, c in rows),
        "",
        *unverified(fuzz["outcomes"]),
    ]


def replies(hostile: dict[str, Any], kinds: tuple[str, ...]) -> tuple[int, str]:
    """Return how many tries of these kinds there were, and a text that says how many of them had a reply."""
    counts = sum((Counter(hostile["by_kind"][kind]) for kind in kinds), Counter())
    num_left = counts["left"] + counts["closed"]
    parts = [f"{counts.total() - num_left} replies with a status"] * (counts.total() > num_left)
    parts += [f"{num_left} clients left before one"] * bool(num_left)
    return counts.total(), "; ".join(parts)


def gpu_kills() -> dict[str, tuple[int, str]]:
    """Return, by kind of process, the number of kills and a text with the outcomes of the running streams."""
    content, rows = json.loads((RESULTS / "faults-h200.json").read_text()), {}
    runs = content if isinstance(content, list) else [content]  # of several runs, or as `bench.faults --json` writes it
    for name in ("search worker", "attention worker", "ingress replica"):
        streams = sum((outcomes(run[name]) for run in runs), Counter())
        answered, num_errors, ended = (streams.pop(outcome, 0) for outcome in ("answered", "told", "ended before"))
        require_none(*streams.values())
        parts = [f"{answered} answers, all right"] * bool(answered) + [f"{num_errors} error events"] * bool(num_errors)
        parts += [f"{ended} answers had ended before"] * bool(ended)
        rows[name] = sum(run[name]["kills"] for run in runs), "; ".join(parts)
    return rows


def outcomes(of_target: dict[str, Any]) -> Counter[str]:
    """Count the streams of one target by outcome.

    Older result files count streams that ended before the kill as answered. If the last one ended before it, all did.
    """
    streams, after_s = Counter(of_target["streams"]), of_target["answered_after_s"]
    if after_s is not None and after_s["max"] < 0:
        streams["ended before"] += streams.pop("answered")
    return streams


def unverified(outcomes: dict[str, int]) -> list[str]:
    """Return a remark on artifacts opened unverified: no fault, but readers should know it."""
    damaged = sum(count for name, count in outcomes.items() if name.startswith("damaged"))
    other = sum(count for name, count in outcomes.items() if name.startswith("damaged") and "other when not" in name)
    return [
        f"Of {damaged} damaged artifacts, verifying refused all that would have given another answer. Opened "
        f"unverified, {other} gave another answer, because sizes and headers do not show a changed byte of KV. "
        "That is how `csattn generate` and a service open what was built or registered. A forged artifact answers as "
        "its forger wanted; it ends no process.",
    ]


def require_none(*faults: int) -> None:
    """Raise ValueError unless all counts are 0, as the table's last column says."""
    if any(faults):
        raise ValueError(f"a result file tells of faults ({faults}); mend them, and measure again with `make faults`")


def kept(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"{name}.json").read_text()))
