"""Tables in the documents, made of result files.

python -m bench.figures           writes them between their marks
python -m bench.figures --check   exits with 1 where one is not what its result file gives
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STEPS = "decode-steps-h200.json"
MODELS, LAYER, LATENTS = "models-h200.json", "layer-h200.json", "latents-h200.json"
SHAPES = {  # of MODELS: a name, and what is searched of it
    "qwen3-30b-a3b": "Qwen3-30B-A3B: 48 layers, 128 experts",
    "gpt-oss-20b": "gpt-oss-20b: 12 of 24 layers, the others see 128 rows",
    "gemma-3-27b": "Gemma 3 27B: 10 of 62 layers, the others see 1024 rows",
    "qwen3.5-27b": "Qwen3.5-27B: 16 of 64 layers, the others are linear",
}
PUBLISHED, SCHEDULES = "decode-published-h200.json", "schedules.json"
QUALITY = "quality.json", "quality-cpu.json"  # the second is of the sketch as it is now, of fewer texts
TEXTS = {
    ("novel", 7680): "novel, 8K", ("speech", 6441): "speech, 6K", ("code", 7680): "Python, 8K",
    ("spanish", 7680): "Spanish, 8K", ("dialogue", 7680): "dialogue, 8K", ("decimal", 32768): "Python, 32K",
    ("decimal", 60752): "Python, 59K", ("manual", 119256): "manual, 116K",
}  # fmt: skip
CONTENDERS = (  # a row's name, the contender, its bytes a key on the device, the share of rows (0: all)
    ("exact Top-K, reads every key", "exact", "128", 0.02),
    ("**csattn, `default`**", "default", "**16 + 2**", 0.02),
    ("csattn, chosen a layer ahead", "default+ahead", "16 + 2", 0.02),
    ("csattn, `default` at 5 % (× exact's at 5 %)", "default", "16 + 2", 0.05),
    ("csattn, `lists` (corrected Top-L lists)", "lists", "1536", 0.02),
    ("all rows, KIVI's 4 bits", "KIVI, 4 bits", "80", 0.0),
    ("all rows, TurboQuant's 4 bits", "TurboQuant, 4 bits", "68", 0.0),
    ("all rows, llama.cpp's q4_0", "q4_0", "72", 0.0),
)
MEANS = (
    ("exact Top-K, the others dropped", "128", ("exact",)),
    ("**`default`**", "18", ("default",)),
    ("`default`, chosen a layer ahead", "18", ("default+ahead",)),
    ("`default`, the rest by moments; dropped", "18", ("default+rest=moments", "default+rest=none")),
    (
        "a sketch of 8; 12; 24 bytes a key",
        "9; 14; 27",
        tuple(f"sketch of {n} words" for n in ("2 + 0", "2 + 1", "4 + 2")),
    ),
    ("`lists`", "1538", ("lists",)),
)
SELECTORS = {  # contenders of `bench.accuracy selectors`: names
    "exact": "exact Top-K, the others dropped",
    "default": "**csattn, `default`**",
    "pqcache": "PQCache",
    "lists": "csattn, `lists`",
    "magicpig": "MagicPIG, K = 10, L = 150",
    "sparq": "SparQ",
    "quest": "Quest",
    "h2o": "H2O",
    "window": "StreamingLLM: sinks and window alone",
}
LM_EVAL = (
    "`python -m bench.lm_eval` has [lm-eval](https://github.com/EleutherAI/lm-evaluation-harness), unmodified, ask the "
    "service RULER's questions, each selection the same ones. The demo model is small and fails",
    "some of them whatever it attends to: what tells is the difference from full attention, in brackets. "
    "What has to be counted over the whole context (cwe, fwe) is lost first where rows are dropped.",
)
LENGTHS, SHARED = "lengths-h100.json", "shared-h100.json"
WAYS = (  # a row's name, its case, the contender whose KL it has
    ("full attention", {"variant": "full"}, None),
    ("full attention over KV in q4_0", {"variant": "all", "kv_codec": "q4_0"}, "q4_0"),
    ("**`default`, `device`**", {"variant": "default", "placement": "device"}, "default"),
    ("**`default`, `hybrid`**", {"variant": "default", "placement": "hybrid"}, "default"),
    ("`lists`, `hybrid`", {"variant": "lists"}, "lists"),
    ("sinks and window alone", {"variant": "window"}, "window"),
)
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
    return dict(only(STEPS, **wanted))


def full(batch_size: int, context_len: int) -> Case:
    return case(batch_size, context_len, "device", variant="full", schedule="none")


def first_screen() -> list[str]:
    """The README's: where it wins, and where it loses."""
    rows = [
        ("one request, 128K", 1, 131072),
        ("four requests with contexts of their own, 128K", 4, 131072),
        ("32 requests on one context, 64K", 32, 65536),
    ]
    head = "| ms a step (GB on the device) | full attention | csattn, all on the device | csattn, KV in host memory |"
    lines = [head, "|---|---:|---:|---:|"]
    for name, batch_size, context_len in rows:
        of = [full(batch_size, context_len), *(case(batch_size, context_len, where) for where in ("device", "hybrid"))]
        cells = [f"{milliseconds(step):.1f} ({step['hbm_bytes'] / 1e9:.0f})" for step in of]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    million = case(1, 1048576, "hybrid")
    lines += [
        "",
        f"KL to full attention, in nats of the next token: {kl_range('default')} on [eight real "
        f"texts](docs/quality.md), where exact Top-K with the others dropped has {kl_range('exact')}.",
        f"A context of a million tokens, 137 GB of KV, decodes at {1e3 / milliseconds(million):.0f} tokens a second.",
    ]
    return lines


def kl_range(contender: str) -> str:
    """KL to full attention at 2 % on the real texts."""
    values = [case["kl"] for case in on_texts(contender).values()]
    return f"{min(values):.4f} to {max(values):.4f}"


def on_texts(contender: str, keep: float = 0.02) -> dict[tuple[str, int], Case]:
    """Of each real text, continued by itself, and length: the newest."""
    cases = [c for name in QUALITY for c in measured(name) if c["contender"] == contender and c["keep"] == keep]
    return {(c["text"], c["context_len"]): c for c in cases if "+" not in c["text"]}


def quality() -> list[str]:
    """KL by text, beside exact Top-K's, and of full attention over KV in few bits."""
    texts = [text for text in TEXTS if text in on_texts("default")]
    head = "| KL at 2 % (× exact) | bytes a key on the device | " + " | ".join(TEXTS[text] for text in texts) + " |"
    lines = [head, "|---|---:|" + "---:|" * len(texts)]
    for name, contender, num_bytes, keep in CONTENDERS:
        cases = on_texts(contender, keep)
        cells = [kl_cell(cases.get(text), is_bold="**" in name) for text in texts]
        lines.append(f"| {name} | {num_bytes} | {' | '.join(cells)} |")
    return lines


def kl_cell(of: Case | None, is_bold: bool) -> str:
    if of is None:
        return "–"
    times = "" if of["times_exact"] is None or not of["keep"] else f" ({ratio(of['times_exact'])})"
    cell = f"**{of['kl']:.4f}{times}**" if is_bold else f"{of['kl']:.4f}{times}"
    # before version 3, rows that codes tell badly were not marked
    return f"{cell} †" if of["contender"].startswith("default") and of["version"] < 3 else cell


def ratio(value: float) -> str:
    return f"{value:.2f}" if value < 1 else f"{value:.1f}"


def quality_means() -> list[str]:
    """Geometric means over the texts that each was measured on."""
    lines = [
        "| at 2 % of the rows | bytes a key on the device | × the KL of exact Top-K, geometric mean |",
        "|---|---:|---:|",
    ]
    for name, num_bytes, contenders in MEANS:
        of = "; ".join(geometric_mean([c["times_exact"] for c in on_texts(c).values()]) for c in contenders)
        lines.append(f"| {name} | {num_bytes} | {'**' + of + '**' if '**' in name else of} |")
    return lines


def geometric_mean(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "1"  # exact itself
    return ratio(statistics.geometric_mean(known))


def lm_eval() -> list[str]:
    """Scores by task and length, and by how much they differ from full attention's; empty before any were measured."""
    cases = [c for path in sorted((ROOT / "bench" / "results").glob("lm-eval-*.json")) for c in measured(path.name)]
    if not cases:
        return []
    most: dict[tuple[str, int], int] = {}  # samples: where two runs have a task, those of the larger one
    for case in cases:
        of = case["task"], case["length"]
        most[of] = max(most.get(of, 0), case["samples"])
    cases = [case for case in cases if case["samples"] == most[case["task"], case["length"]]]
    names = list(dict.fromkeys(case["variant"] for case in cases))
    lines = [*LM_EVAL, "", "| score | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for of in sorted(most, key=lambda of: of[1]):
        row = {case["variant"]: case for case in cases if (case["task"], case["length"]) == of}
        cells = [score_cell(row[name]) if name in row else "–" for name in names]
        lines.append(f"| {of[0]}, {of[1] // 1024}K, {most[of]} samples | {' | '.join(cells)} |")
    return lines


def score_cell(of: Case) -> str:
    """A score with its standard error; in brackets, full attention's taken off, sample by sample, with its own."""
    if of["variant"] == "full attention":
        return f"{of['score']:.2f} ± {of['stderr']:.2f}"
    return f"{of['score']:.2f} ({of['difference']:+.2f} ± {of['difference_stderr']:.2f})"


def selectors() -> list[str]:
    """KL of other ways to choose rows, and what they hold and read: means over the texts, of KL the geometric ones."""
    lines = [
        "| | KL at 2 % (× exact) | KL at 5 % (× exact) | bytes a key and KV head to choose by "
        "| MB a token reads to choose | and fetches, at 2 % |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for contender, name in SELECTORS.items():
        kls = [f"{selectors_kl(contender, keep):.4f} ({selectors_times(contender, keep)})" for keep in (0.02, 0.05)]
        of = [c for c in measured("selectors.json") if c["contender"] == contender and c["keep"] == 0.02]
        index, *read = (
            statistics.fmean(c[field] for c in of)
            for field in ("index_bytes_per_key", "search_bytes_per_step", "moved_bytes_per_step")
        )
        cells = [*kls, f"{index:.0f}", *(f"{num_bytes / 1e6:.1f}" for num_bytes in read)]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def selectors_kl(contender: str, keep: float) -> float:
    cases = [c for c in measured("selectors.json") if c["contender"] == contender and c["keep"] == keep]
    return statistics.geometric_mean(c["kl"] for c in cases)


def selectors_times(contender: str, keep: float) -> str:
    return ratio(selectors_kl(contender, keep) / selectors_kl("exact", keep))


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


def models() -> list[str]:
    """Whole steps of other shapes, beside full attention."""
    head = "| ms a step (GB on the device) | requests | full attention | `device` | of what bytes allow | `hybrid` |"
    lines = [head, "|---|---:|---:|---:|---:|---:|"]
    for shape, name in SHAPES.items():
        sizes = sorted({(of["context_len"], of["batch_size"]) for of in measured(MODELS) if of["shape"] == shape})
        for context_len, batch_size in sizes:
            of = {"shape": shape, "context_len": context_len, "batch_size": batch_size}
            whole = only(MODELS, **of, variant="full")
            device, hybrid = (only(MODELS, **of, variant="default", placement=where) for where in ("device", "hybrid"))
            share = f"{device['of_roofline']:.0%}".replace("%", " %") if "of_roofline" in device else ""
            cells = [str(batch_size), step_cell(whole), step_cell(device), share, step_cell(hybrid)]
            lines.append(f"| {name}; {context_len // 1024}K | {' | '.join(cells)} |")
    return lines


def step_cell(of: Case) -> str:
    return "does not fit" if "refused" in of else f"{milliseconds(of):.2f} ({of['hbm_bytes'] / 1e9:.0f})"


def layer() -> list[str]:
    """One layer's search and attention, beside full attention."""
    lines = ["| one layer, µs | full attention | `default` | × |", "|---|---:|---:|---:|"]
    for of in (case for case in measured(LAYER) if case["variant"] == "default"):
        whole = only(LAYER, variant="full", **{name: of[name] for name in ("kind", "context_len", "batch_size")})
        length, batch_size = of["context_len"] // 1024, of["batch_size"]
        contexts = "on one context" if of["kind"].startswith("shared") else "with contexts of their own"
        requests = "one request" if batch_size == 1 else f"{batch_size} requests {contexts}"
        times = whole["p50_us"] / of["p50_us"]
        lines.append(f"| {requests}, {length}K | {whole['p50_us']:.0f} | {of['p50_us']:.0f} | {times:.2f} |")
    return lines


def latents() -> list[str]:
    """Steps of a model that keeps latents, and the parts of a layer."""
    parts = ("score", "choose", "gather", "attend", "other")
    named = ["ms a step: as fed, all rows in slots", "GB on the device", *(f"µs a layer: {parts[0]}", *parts[1:])]
    lines = ["| 128K of context | " + " | ".join(named) + " |", "|---|" + "---:|" * len(named)]
    for of in measured(LATENTS):
        what = f"`{of['placement']}`" if of["latents"] == "chosen" else "`device`, all latents"
        requests = "one request" if of["batch_size"] == 1 else f"{of['batch_size']} requests"
        times = f"{of['fed_p50_us'] / 1e3:.2f}, {of['again_p50_us'] / 1e3:.2f}"
        cells = [times, f"{of['hbm_bytes'] / 1e9:.1f}", *(f"{of['parts_us'].get(part, 0):.0f}" for part in parts)]
        lines.append(f"| {requests}, {what} | {' | '.join(cells)} |")
    return lines


def published() -> list[str]:
    """The published system's schedules at each length, `default` and full attention beside them."""
    lengths = sorted({case["context_len"] for case in measured(PUBLISHED)})
    texts = list(dict.fromkeys(case["text"] for case in measured(SCHEDULES)))
    head = [f"{context_len // 1024}K" for context_len in lengths]
    head = ["ms a token, mean", *(f"KL, {text}" for text in texts), *head, f"GB on the device, {head[-1]}"]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    full_steps = [
        ("full attention, all on the device", "full", "device", None, "none"),
        ("full attention, KV streamed from the host", "streamed", "host", None, "none"),
    ]
    ours = [
        (f"`{variant}`, `{placement}`, {name}", variant, placement, keep, schedule)
        for variant, placement in (("lists", "host"), ("lists", "hybrid"), ("default", "host"), ("default", "hybrid"))
        for name, keep, schedule in (
            ("2 %", 0.02, AHEAD),
            ("15 % at every 4th token", 0.15, f"{AHEAD}, at every 4th token"),
            ("20 % at every 8th", 0.2, f"{AHEAD}, at every 8th token"),
        )
    ]
    for name, variant, placement, keep, schedule in full_steps + ours:
        of = {"variant": variant, "placement": placement, "keep": keep, "schedule": schedule}
        cases = [only(PUBLISHED, context_len=context_len, **of) for context_len in lengths]
        kls = [f"{only(SCHEDULES, text=text, preset=variant, keep=keep)['kl']:.4f}" if keep else "" for text in texts]
        cells = [*kls, *(f"{of['mean_us'] / 1e3:.1f}" for of in cases), f"{cases[-1]['hbm_bytes'] / 1e9:.1f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def lengths() -> list[str]:
    """Steps of one and of four requests at each length, each way beside its KL."""
    sizes = sorted({of["context_len"] for of in measured(LENGTHS)})
    head = ["KL, novel", *(f"{size // 1024}K" for size in sizes), f"GB, {sizes[-1] // 1024}K"]
    lines = ["| ms a step: one request; four | " + " | ".join(head) + " |", "|---|" + "---:|" * len(head)]
    for name, of, contender in WAYS:
        rows = [of_length(size, **of) for size in sizes]
        cells = ["; ".join(f"{milliseconds(step):.1f}" if "p50_us" in step else "–" for step in row) for row in rows]
        memory = "; ".join(f"{step['hbm_bytes'] / 1e9:.0f}" if "p50_us" in step else "–" for step in rows[-1])
        lines.append(f"| {name} | {kl_on_novel(contender)} | {' | '.join(cells)} | {memory} |")
    return lines


def of_length(context_len: int, **wanted: Any) -> list[Case]:
    """Of one request and of four, as far as these were measured; without a time, where they do not fit."""
    cases = [of for of in measured(LENGTHS) if of["context_len"] == context_len]
    cases = [of for of in cases if all(of.get(name) == value for name, value in wanted.items())]
    return sorted(cases, key=lambda of: int(of["batch_size"]))


def kl_on_novel(contender: str | None) -> str:
    if contender is None:
        return "0"
    if contender != "window":
        return f"{on_texts(contender, 0.0 if contender == 'q4_0' else 0.02)['novel', 7680]['kl']:.4f}"
    of = [c for c in measured("selectors.json") if c["contender"] == contender and c["text"] == "novel"]
    return f"{of[0]['kl']:.4f}"


def shared() -> list[str]:
    """Steps of many requests on one context."""
    lines = [
        "| ms a step | requests on it | torch, all rows | csattn, all rows | csattn, 2 % |",
        "|---|---:|---:|---:|---:|",
    ]
    for of in (of for of in measured(SHARED) if of["variant"] == "full"):
        like = {name: of[name] for name in ("context_len", "batch_size")}
        steps = [milliseconds(only(SHARED, variant=variant, **like)) for variant in ("full", "all", "default")]
        cells = [f"{step:.2f}" for step in steps]
        lines.append(f"| a context of {of['context_len'] // 1024}K | {of['batch_size']} | {' | '.join(cells)} |")
    return lines


def builds() -> list[str]:
    head = "| tokens | prefill alone, s | with the index | written, too | GB/s | index, of a 16-bit KV |"
    lines = [head, "|---:|---:|---:|---:|---:|---:|"]
    seen = set[int]()
    for of in measured("build-h100.json"):
        seconds = " | ".join(f"{of[name]:.2f}" for name in ("prefill_s", "with_index_s", "written_s"))
        rate = of["artifact_bytes"] / of["written_s"] / 1e9
        length = f"{of['context_len']:,}{', once more' if of['context_len'] in seen else ''}"
        seen.add(of["context_len"])
        lines.append(f"| {length} | {seconds} | {rate:.2f} | {of['index_over_16_bit_kv']:.1%} |")
    one, two = measured("build-gpus-h100.json")
    rates = " and ".join(f"{(16 - of['num_gpus']) / of['between_s']:.2f}" for of in (one, two))
    lines += [
        "",
        f"16 contexts of 65,536 tokens, 16 layers of that shape, on Ray (`python -m bench.build_gpus`): "
        f"{one['seconds']:.1f} s on one H100, {two['seconds']:.1f} s on two, of which {two['first_s']:.0f} s go by "
        f"until the first is built; when each has built one, {rates} contexts a second follow.",
    ]
    return lines


def only(name: str, **wanted: Any) -> Case:
    """The one case of a result file that has all these."""
    [found] = [of for of in measured(name) if all(of.get(field) == value for field, value in wanted.items())]
    return found


def capacity() -> list[str]:
    """What an operator plans with."""
    from bench.plan import table  # which takes cases from here

    return table()


def faults() -> list[str]:
    from bench.fault_table import table

    return table()


def why() -> list[str]:
    from bench.accuracy.why_report import changes_table

    return changes_table(measured("why.json"), 0.02)


def hisa() -> list[str]:
    from bench.lightning.hisa_real import real_tables

    return real_tables(measured("hisa-real.json"))


TABLES: dict[tuple[str, str], Callable[[], list[str]]] = {
    ("README.md", "first-screen"): first_screen,
    ("bench/README.md", "quality"): quality_means,
    ("bench/README.md", "steps"): steps,
    ("bench/README.md", "published"): published,
    ("bench/README.md", "shared"): shared,
    ("bench/README.md", "models"): models,
    ("bench/README.md", "layer"): layer,
    ("bench/README.md", "latents"): latents,
    ("bench/README.md", "faults"): faults,
    ("docs/quality.md", "kl"): quality,
    ("docs/quality.md", "lm-eval"): lm_eval,
    ("docs/quality.md", "why"): why,
    ("docs/compare.md", "selectors"): selectors,
    ("docs/compare.md", "lengths"): lengths,
    ("bench/README.md", "hisa"): hisa,
    ("bench/log.md", "builds"): builds,
    ("docs/operate.md", "plan"): capacity,
}

if __name__ == "__main__":
    raise SystemExit(main())
