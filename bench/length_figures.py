"""Tables of whole steps at every length, of KL at every length, and of what others must read to be as good."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bench.decode.sampled import TABLES
from bench.plan import MODEL
from bench.quality_figures import TEXTS
from bench.records import Case, measured, only
from bench.shapes import shape_named
from bench.step_figures import AHEAD, EVERY_STEP
from workers.capacity import context_bytes, spec_of

STEPS, KLS, SCHEDULES = "lengths-h200.json", "kl-h200.json", "schedules.json"
AS_GOOD_KLS = "kl-as-good.json"
LISTS = "lists-h200.json"  # a later run, with its own times of full attention
PUBLISHED = {  # schedules: share kept -> name in cases, name in tables
    0.02: (AHEAD, "2 %"),
    0.15: (f"{AHEAD}, at every 4th token", "15 % at every 4th token"),
    0.2: (f"{AHEAD}, at every 8th token", "20 % at every 8th"),
}
# published speed-ups over other methods, at 8K to 128K: CSAttention (arXiv:2604.08584), Fig. 3
AS_FAST_AS = {
    "pqcache": ("PQCache, rows from the host", (2.95, 4.35, 5.60, 9.40, 8.26)),
    "magicpig-300": ("MagicPIG", (1.51, 2.14, 3.41, 3.98, 7.85)),
    "h2o": ("H2O", (0.88, 0.97, 1.13, 1.16, 1.33)),
    "full": ("full attention, all on the GPU", (1.16, 1.22, 1.81, 3.31, 4.24)),
}
OTHERS = {"quest": "Quest", "sparq": "SparQ", "pqcache": "PQCache"}  # methods that choose a share of the rows
NO_MEAN = "sparq, no mean value"  # the form whose steps were timed
# shares at which their steps were also timed: at these they are as good as `default` on the novel (AS_GOOD_KLS)
AS_GOOD = {"quest": 0.52, "sparq": 0.2, "pqcache": 0.23}
SHAPE = "llama-3.1-8b"
Contender = tuple[str, float]  # a name and a share kept


@dataclass(frozen=True, slots=True)
class Way:
    """A row of the table of times. steps(context_len): cases with one request and with four, as far as measured."""

    name: str
    steps: Callable[[int], list[Case]]
    kl: Contender | None  # None: full attention


def of_length(context_len: int, file: str = STEPS, **wanted: Any) -> list[Case]:
    """Return the cases of one request and of four at that length; those that do not fit have no time."""
    wanted["context_len"] = context_len
    cases = [of for of in measured(file) if all(of.get(name) == value for name, value in wanted.items())]
    return sorted(cases, key=lambda of: int(of["batch_size"]))


def file_of(variant: str) -> str:
    """Return the file with the variant's steps."""
    return LISTS if variant in ("lists", "paper") else STEPS


def _ways() -> list[Way]:
    def way(name: str, kl: Contender | None, **wanted: Any) -> Way:
        return Way(name, lambda size: of_length(size, **wanted), kl)

    def ours(name: str, variant: str, placement: str, schedule: str = EVERY_STEP) -> Way:
        of = {"variant": variant, "placement": placement, "schedule": schedule, "keep": 0.02}
        contender = variant if schedule == EVERY_STEP else f"{variant}+ahead"
        return way(f"{name}, `{placement}`", (contender, 0.02), file=file_of(variant), **of)

    def other(name: str, variant: str, placement: str, keep: float = 0.02) -> Way:
        contender = NO_MEAN if variant == "sparq" else variant
        return way(name, (contender, keep), variant=variant, placement=placement, keep=keep)

    return [
        way("full attention", None, variant="full"),
        way("full attention, KV streamed from the host", None, variant="streamed"),
        way("full attention over KIVI's 4 bits", ("KIVI, 4 bits", 0.0), variant="kivi-4"),
        way("full attention over KIVI's 2 bits", ("KIVI, 2 bits", 0.0), variant="kivi-2"),
        way("full attention over TurboQuant's 3.5 bits", ("TurboQuant, 3.5 bits", 0.0), variant="turboquant-3.5"),
        way("full attention over KV in q4_0", ("q4_0", 0.0), variant="q4_0"),
        ours("**`default`**", "default", "device"),
        ours("**`default`**", "default", "hybrid"),
        ours("`default`, a layer ahead", "default", "host", AHEAD),
        ours("`lists`", "lists", "device"),
        ours("`lists`", "lists", "hybrid"),
        ours("`paper`", "paper", "hybrid"),
        *(other(name, variant, "device") for variant, name in OTHERS.items()),
        other("PQCache, `hybrid`", "pqcache", "hybrid"),
        Way("H2O", kept_alone, ("h2o", 0.02)),
        way("MagicPIG, 150 tables", ("magicpig", 0.0), variant="magicpig"),
        way("MagicPIG, 300 tables", ("magicpig-300", 0.0), variant="magicpig-300"),
        way("sinks and window alone", ("window", 0.0), variant="window"),
        *(other(f"{name} of {100 * AS_GOOD[of]:g} %", of, "device", AS_GOOD[of]) for of, name in OTHERS.items()),
        other(f"PQCache of {100 * AS_GOOD['pqcache']:g} %, `hybrid`", "pqcache", "hybrid", AS_GOOD["pqcache"]),
    ]


def kept_alone(context_len: int) -> list[Case]:
    """Return H2O's steps without their device memory: they hold all rows, but the method needs only those it keeps."""
    return [{**of, "hbm_bytes": None} for of in of_length(context_len, variant="h2o")]


def lengths() -> list[str]:
    """Return a table of steps with one and with four requests at each length, and each method's KL."""
    sizes = sorted({of["context_len"] for of in measured(STEPS)})
    last = f"{sizes[-1] // 1024}K"
    head = ["KL, novel", *(f"{size // 1024}K" for size in sizes), f"{last}, if it chose as fast"]
    head += [f"GB on the device, {last}", f"on the host, {last}", f"MB over the link, {last}"]
    lines = ["| ms a step: one request; four | " + " | ".join(head) + " |", "|---|" + "---:|" * len(head)]
    for way in _ways():
        rows = [way.steps(size) for size in sizes]
        rows[-1] = [{**of, "host_bytes": host_bytes(of)} for of in rows[-1]]
        cells = [*(each(of, "p50_us", 1e3, 1) for of in rows), as_fast(rows[-1])]
        cells += [each(rows[-1], field, 1e9, 0) for field in ("hbm_bytes", "host_bytes")]
        cells.append(each(rows[-1], "link_bytes", 1e6, 0))
        lines.append(f"| {way.name} | {kl_cell(way.kl)} | {' | '.join(cells)} |")
    return lines


def host_bytes(of: Case) -> int | None:
    """Return the bytes of contexts in host memory: rows, and the index that the CPU searches.

    None: there are none, or the case does not fit.
    """
    if of.get("placement", "device") == "device" or "refused" in of:
        return None
    shape, context_len = shape_named(SHAPE), of["context_len"]
    of_context = shape.num_layers * 2 * shape.heads.kv_width * context_len * 2
    if (tables := TABLES.get(of["variant"])) is not None:  # each bucket's start, and row numbers of its keys
        of_head = 4 * tables.number * (context_len + 2**tables.num_bits + 1)
        of_context += shape.num_layers * shape.heads.num_kv_heads * of_head
    elif of["placement"] == "host" and of["variant"] == "default":
        of_context += context_bytes(spec_of(MODEL, context_len))[1]
    return int(of["batch_size"] * of_context)


def each(steps: list[Case], field: str, unit: float, digits: int) -> str:
    """Return a cell with the figure of one request and of four; "–" where it is missing."""
    if any("refused" in of for of in steps) or any(of.get(field) is not None for of in steps):
        return "; ".join("–" if of.get(field) is None else f"{of[field] / unit:.{digits}f}" for of in steps)
    return ""


def as_fast(steps: list[Case]) -> str:
    """Return one request's step time by another method, if its selection took only as long as `default`'s."""
    of = steps[0] if steps else {}
    select = of.get("parts_us", {}).get("select")
    if select is None or of["variant"] in ("default", "lists", "paper"):
        return ""
    [ours, *_] = of_length(of["context_len"], variant="default", placement="device", schedule=EVERY_STEP)
    longer_us = shape_named(SHAPE).num_layers * max(0.0, select - ours["parts_us"]["select"])
    return f"{(of['p50_us'] - longer_us) / 1e3:.1f}"


def kl_cell(of: Contender | None, text: str = "novel", context_len: int = 7680) -> str:
    if of is None:
        return "0"
    wanted = {"text": text, "context_len": context_len, "contender": of[0], "keep": of[1]}
    return f"{only(AS_GOOD_KLS if of[1] in AS_GOOD.values() else KLS, **wanted)['kl']:.4f}"


def settings() -> list[tuple[str, int]]:
    """Return texts and lengths, the shortest first within a text."""
    order = [text for text, _ in TEXTS]
    found = {(case["text"], case["context_len"]) for case in measured(KLS)}
    return sorted(found, key=lambda of: (order.index(of[0]), of[1]))


def kl_lengths() -> list[str]:
    """Return a table of each method's KL at the lengths of the longest texts."""
    shown = [of for of in settings() if of[0] in ("manual", "decimal")]
    lines = ["| KL | " + " | ".join(_called(of) for of in shown) + " |", "|---|" + "---:|" * len(shown)]
    named: list[tuple[str, Contender]] = [
        ("exact Top-K, the others dropped", ("exact", 0.02)),
        ("full attention over TurboQuant's 4 bits", ("TurboQuant, 4 bits", 0.0)),
        ("SparQ, with its mean value", ("sparq", 0.02)),
        ("PQCache, 16 bytes a key", ("pqcache, 16 bytes", 0.02)),
        ("PQCache, 16 bytes a key, and the rest by moments", ("pqcache, 16 bytes+rest=moments", 0.02)),
        *((way.name, way.kl) for way in _ways() if way.kl is not None),
    ]
    seen: set[Contender] = set()
    for name, of in named:
        if of in seen or of[1] not in (0.0, 0.02):
            continue
        seen.add(of)
        plain = name.removesuffix(", `device`").removesuffix(", `hybrid`").removesuffix(", `host`")
        lines.append(f"| {plain} | " + " | ".join(kl_cell(of, *setting) for setting in shown) + " |")
    return lines


def shares() -> list[str]:
    """Return a table of the approximate share at which a method is as good as `default` at 2 %, by text and length."""
    lines = [
        "| rows read to be as good as `default` at 2 % | " + " | ".join(OTHERS.values()) + " |",
        "|---|---:|---:|---:|",
    ]
    for setting in settings():
        cells = [share_text(share_needed(contender, *setting), contender) for contender in OTHERS]
        lines.append(f"| {_called(setting)} | {' | '.join(cells)} |")
    return lines


def share_range(contender: str) -> str:
    """Return the range of the shares that it needs over all texts and lengths, as text."""
    needed = [share_needed(contender, *setting) for setting in settings()]
    enough = [share for share in needed if share is not None]
    if len(enough) < len(needed):
        return f"{share_text(min(enough), contender)} to {share_text(None, contender)}"
    return f"{100 * min(enough):.0f} to {share_text(max(enough), contender)}"


def share_needed(contender: str, text: str, context_len: int) -> float | None:
    """Return about the least share that is as good as `default` at 2 %; None: no measured one is.

    log KL is interpolated linearly between measured shares.
    """
    of_text = [of for of in measured(KLS) if (of["text"], of["context_len"]) == (text, context_len)]
    [wanted] = [of["kl"] for of in of_text if (of["contender"], of["keep"]) == ("default", 0.02)]
    forms = (contender, NO_MEAN) if contender == "sparq" else (contender,)
    found = [share_at(wanted, [(of["keep"], of["kl"]) for of in of_text if of["contender"] == form]) for form in forms]
    return min((share for share in found if share is not None), default=None)


def share_at(wanted: float, tried: list[tuple[float, float]]) -> float | None:
    """Return the share at which KL first falls to `wanted`; None if it never does. tried: shares and their KL."""
    for (before, high), (share, low) in pairwise([(0.0, math.inf), *sorted(tried)]):
        if low <= wanted:
            way = math.log(high / wanted) / math.log(high / max(low, 1e-7)) if math.isfinite(high) else 1.0
            return before + way * (share - before)
    return None


def share_text(share: float | None, contender: str) -> str:
    if share is None:
        most = max(of["keep"] for of in measured(KLS) if of["contender"] == contender)
        return f"more than {100 * most:g} %"
    return f"{100 * share:.0f} %"


def _called(setting: tuple[str, int]) -> str:
    text, context_len = setting
    names = {"code": "Python", "decimal": "Python, decimal", "spanish": "Spanish"}
    return f"{names.get(text, text)}, {round(context_len / 1024)}K"


def published() -> list[str]:
    """Return a table of the published system's schedules at each length, with `default` and full attention."""
    sizes = sorted({case["context_len"] for case in measured(STEPS)})
    texts = list(dict.fromkeys(case["text"] for case in measured(SCHEDULES)))
    head = [f"{size // 1024}K" for size in sizes]
    head = ["ms a token, mean", *(f"KL, {text}" for text in texts), *head, f"GB on the device, {head[-1]}"]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]

    def line(name: str, cases: list[Case], kls: list[str], best_us: list[float]) -> str:
        times = [f"{of['mean_us'] / 1e3:.1f}" for of in cases]
        shown = [
            f"**{time}**" if of["mean_us"] == best else time
            for time, of, best in zip(times, cases, best_us, strict=True)
        ]
        return "| " + " | ".join([name, *kls, *shown, f"{cases[-1]['hbm_bytes'] / 1e9:.1f}"]) + " |"

    for name, variant in (("all on the device", "full"), ("KV streamed from the host", "streamed")):
        cases = [of_length(size, variant=variant)[0] for size in sizes]
        lines.append(line(f"full attention, {name}", cases, [""] * len(texts), [0.0] * len(sizes)))
    places = ("lists", "host"), ("lists", "hybrid"), ("lists", "device"), ("default", "host"), ("default", "hybrid")
    for variant, placement in places:
        of = {"variant": variant, "placement": placement}
        by_keep = {
            keep: [of_length(size, file_of(variant), **of, keep=keep, schedule=schedule)[0] for size in sizes]
            for keep, (schedule, _) in PUBLISHED.items()
        }
        best_us = [min(case["mean_us"] for case in of_size) for of_size in zip(*by_keep.values(), strict=True)]
        for keep, cases in by_keep.items():
            kls = [f"{only(SCHEDULES, text=text, preset=variant, keep=keep)['kl']:.4f}" for text in texts]
            lines.append(line(f"`{variant}`, `{placement}`, {PUBLISHED[keep][1]}", cases, kls, best_us))
    return lines


def as_fast_as() -> list[str]:
    """Return a table of speed-ups over other methods: as published, and measured here, with the best schedules."""
    sizes = sorted({of["context_len"] for of in measured(STEPS)})
    head = [f"{size // 1024}K" for size in sizes]
    lines = ["| times as fast as | by | " + " | ".join(head) + " |", "|---|---|" + "---:|" * len(head)]
    for variant, (name, ratios) in AS_FAST_AS.items():
        lines.append(f"| {name} | the source | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |")
        of_host = {"placement": "hybrid", "keep": 0.02} if variant == "pqcache" else {}
        places = [("lists", "host"), ("lists", "hybrid"), ("default", "hybrid")]
        if variant == "full":
            places = [("lists", "device"), ("default", "device")]
        for preset, placement in places:
            file = file_of(preset)
            own = file if variant == "full" else STEPS  # full attention was timed in both runs
            theirs = [of_length(size, own, variant=variant, **of_host)[0]["mean_us"] for size in sizes]
            ours = [best_us(size, file, preset, placement) for size in sizes]
            cells = [f"{them / us:.2f}" for them, us in zip(theirs, ours, strict=True)]
            lines.append(f"| | `{preset}`, `{placement}` | {' | '.join(cells)} |")
    return lines


def best_us(context_len: int, file: str, preset: str, placement: str) -> float:
    """Return a token's mean time with the fastest of the measured schedules."""
    cases = of_length(context_len, file, variant=preset, placement=placement, batch_size=1)
    return min(of["mean_us"] for of in cases if "refused" not in of)
