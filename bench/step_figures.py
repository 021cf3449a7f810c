"""Tables of time: whole steps, layers, and what they take of a device's memory."""

from typing import Any

from bench.quality_figures import on_texts
from bench.records import Case, measured, only

STEPS = "decode-steps-h200.json"
MODELS, LAYER, LATENTS = "models-h200.json", "layer-h200.json", "latents-h200.json"
SHAPES = {  # of MODELS: a name, and what is searched of it
    "qwen3-30b-a3b": "Qwen3-30B-A3B: 48 layers, 128 experts",
    "gpt-oss-20b": "gpt-oss-20b: 12 of 24 layers, the others see 128 rows",
    "gemma-3-27b": "Gemma 3 27B: 10 of 62 layers, the others see 1024 rows",
    "qwen3.5-27b": "Qwen3.5-27B: 16 of 64 layers, the others are linear",
}
PUBLISHED, SCHEDULES = "decode-published-h200.json", "schedules.json"
LENGTHS, SHARED = "lengths-h100.json", "shared-h100.json"
EQUAL = "equal-kl.json"
AS_GOOD = {"quest": 0.55, "sparq": 0.25, "pqcache": 0.25}  # shares of the rows at which KL is `default`'s at 2 %
# a row's name, its case, and of which contender and share kept its KL is
WAYS: tuple[tuple[str, dict[str, Any], tuple[str, float] | None], ...] = (
    ("full attention", {"variant": "full"}, None),
    ("full attention over KV in q4_0", {"variant": "all", "kv_codec": "q4_0"}, ("q4_0", 0.0)),
    ("**`default`, `device`**", {"variant": "default", "placement": "device"}, ("default", 0.02)),
    ("**`default`, `hybrid`**", {"variant": "default", "placement": "hybrid"}, ("default", 0.02)),
    ("`lists`, `hybrid`", {"variant": "lists"}, ("lists", 0.02)),
    ("`paper`, `hybrid`", {"variant": "paper"}, ("paper", 0.02)),
    *(
        (name, {"variant": variant, "keep": 0.02, "placement": placement}, (variant, 0.02))
        for name, variant, placement in (
            ("Quest", "quest", "device"),
            ("SparQ", "sparq", "device"),
            ("PQCache", "pqcache", "device"),
            ("PQCache, `hybrid`", "pqcache", "hybrid"),
            ("H2O", "h2o", "device"),
        )
    ),
    ("MagicPIG, at least", {"variant": "magicpig"}, ("magicpig", 0.02)),
    ("sinks and window alone", {"variant": "window"}, ("window", 0.02)),
    *(
        (
            f"{name} of {100 * AS_GOOD[variant]:g} %",
            {"variant": variant, "keep": AS_GOOD[variant], "placement": placement},
            (variant, AS_GOOD[variant]),
        )
        for name, variant, placement in (
            ("Quest", "quest", "device"),
            ("SparQ", "sparq", "device"),
            ("PQCache", "pqcache", "device"),
            ("PQCache, `hybrid`,", "pqcache", "hybrid"),
        )
    ),
)
NUM_LAYERS = 32  # of LENGTHS' shape
EVERY_STEP, AHEAD = "every step", "one layer ahead"


def case(batch_size: int, context_len: int, placement: str, **more: Any) -> Case:
    """A case of whole steps; `default`, searched at every step, unless said."""
    wanted = {"variant": "default", "schedule": EVERY_STEP, "kv_codec": None, **more}
    wanted |= {"batch_size": batch_size, "context_len": context_len, "placement": placement}
    return dict(only(STEPS, **wanted))


def full(batch_size: int, context_len: int) -> Case:
    return case(batch_size, context_len, "device", variant="full", schedule="none")


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
    last = f"{sizes[-1] // 1024}K"
    head = ["KL, novel", *(f"{size // 1024}K" for size in sizes), f"{last}, if it chose as fast", f"GB, {last}"]
    lines = ["| ms a step: one request; four | " + " | ".join(head) + " |", "|---|" + "---:|" * len(head)]
    for name, of, quality in WAYS:
        rows = [of_length(size, **of) for size in sizes]
        if of["variant"] == "h2o":  # it needs what it keeps, and the benchmark has it load all
            rows = [[{"p50_us": step["p50_us"]} for step in row if "p50_us" in step] for row in rows]
        cells = ["; ".join(f"{milliseconds(step):.1f}" if "p50_us" in step else "–" for step in row) for row in rows]
        memory = "; ".join(f"{step['hbm_bytes'] / 1e9:.0f}" for step in rows[-1] if "hbm_bytes" in step)
        if any("refused" in step for step in rows[-1]):
            memory = "; ".join([memory, "–"]) if memory else "–"
        cells += [as_fast(rows[-1][0]), memory]
        lines.append(f"| {name} | {kl_on_novel(quality)} | {' | '.join(cells)} |")
    return lines


def as_fast(step: Case) -> str:
    """A step of another method, with the time that `default` takes to choose once there are scores."""
    select = step.get("parts_us", {}).get("select")
    if select is None or step["variant"] in ("default", "lists", "paper"):
        return ""
    [of, *_] = of_length(step["context_len"], variant="default", placement="device", batch_size=step["batch_size"])
    longer_us = NUM_LAYERS * max(0.0, select - of["parts_us"]["select"])
    return f"{(step['p50_us'] - longer_us) / 1e3:.1f}"


def of_length(context_len: int, **wanted: Any) -> list[Case]:
    """Of one request and of four, as far as these were measured; without a time, where they do not fit."""
    cases = [of for of in measured(LENGTHS) if of["context_len"] == context_len]
    cases = [of for of in cases if all(of.get(name) == value for name, value in wanted.items())]
    return sorted(cases, key=lambda of: int(of["batch_size"]))


def kl_on_novel(of: tuple[str, float] | None) -> str:
    """of: contender and share kept; None: full attention."""
    if of is None:
        return "0"
    contender, keep = of
    if contender == "q4_0":  # which chooses nothing
        return f"{on_texts(contender, keep)['novel', 7680]['kl']:.4f}"
    return f"{only(EQUAL, text='novel', contender=contender, keep=keep)['kl']:.4f}"


def equal() -> list[str]:
    """KL on three texts where other methods read what makes them as good as `default` on one of them."""
    texts = {"novel": "the novel", "code": "Python", "spanish": "Spanish"}
    lines = ["| KL, 7680 tokens of | " + " | ".join(texts.values()) + " |", "|---|" + "---:|" * len(texts)]
    names = {"default": "**`default`**", "quest": "Quest", "sparq": "SparQ", "pqcache": "PQCache"}
    for contender, keep in {"default": 0.02, **AS_GOOD}.items():
        cells = [f"{only(EQUAL, text=text, contender=contender, keep=keep)['kl']:.4f}" for text in texts]
        lines.append(f"| {names[contender]}, {100 * keep:g} % | {' | '.join(cells)} |")
    return lines


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
