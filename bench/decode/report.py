"""Results of the decode benchmark as Markdown tables."""

from typing import Any

from bench.decode.roofline import best_ratio
from bench.decode.variants import INDEXES
from bench.records import Case
from bench.shapes import shape_named

NAMES = {
    "full": "full attention",
    "all": "full attention, by the engine",
    "streamed": "full attention, KV streamed from the host",
    "window": "sinks, window and tail only",
    "default": "csattn",
    "lists": "csattn, lists",
    "paper": "as published",
    "quest": "Quest",
    "sparq": "SparQ",
    "pqcache": "PQCache",
    "h2o": "H2O",
    "magicpig": "MagicPIG, 150 tables",
    "magicpig-300": "MagicPIG, 300 tables",
}


def tables(content: dict[str, Any]) -> str:
    """Return a description of the run and a table for each kind of case and each shape."""
    cases, parts = content["cases"], []
    titles = {
        "op": "One layer's attention, µs",
        "shared op": "One layer's attention for requests that share one context, µs",
        "e2e": "Whole steps",
        "shared": "Whole steps of requests that share one context",
    }
    shapes = list(dict.fromkeys(case.get("shape") for case in cases))
    for kind, title in titles.items():
        for shape in shapes:
            if shown := [case for case in cases if (case["kind"], case.get("shape")) == (kind, shape)]:
                table = op_table(shown) if kind.endswith("op") else end_to_end_table(shown, content)
                parts += ["", f"### {title}" + (f": {shape}" if len(shapes) > 1 else ""), "", table]
    return "\n".join([describe(content), *parts])


def describe(content: dict[str, Any]) -> str:
    """Describe the machine and the recording in sentences."""
    machine, ceilings, rows = content["machine"], content["ceilings"], ""
    if recording := content.get("recording"):
        rows = f" {recording['context_len']} recorded rows, behind noisy copies of them where a context is longer."
    return (
        f"{machine['gpu']} (driver {machine['driver']}, CUDA {machine['cuda']}), {machine['cpus']} cores of "
        f"{machine['cpu']}, torch {machine['torch']}, triton {machine['triton']}. Measured ceilings: device read "
        f"{ceilings['read_gbps'] / 1e3:.2f} TB/s, device copy {ceilings['copy_gbps'] / 1e3:.2f} TB/s, "
        f"host to device {ceilings['h2d_gbps']:.1f} GB/s. Shape {content['shape']}, bfloat16.{rows}"
    )


def op_table(cases: list[Case]) -> str:
    """Return a table with a line per context length, batch size and variant, and the ratio to full attention."""
    lines = [
        "| context | batch | | p50 | p99 | × full | search | select | rest | attend | GB moved | of roofline | with |",
        "|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for case in sorted(cases, key=_order):
        start = f"| {length(case['context_len'])} | {case['batch_size']} | {label(case)} |"
        if "refused" in case:
            lines.append(f"{start} — | | | | | | | | | {case['refused']} |")
            continue
        parts = case.get("parts_us", {})
        lines.append(
            f"{start} {case['p50_us']:.1f} | {case['p99_us']:.1f} | {_ratio(case, cases)} | "
            f"{_us(parts.get('search'))} | {_us(parts.get('select'))} | {_us(parts.get('rest'))} | "
            f"{_us(parts.get('attend'))} | "
            f"{case['moved_bytes'] / 1e9:.3f} | {case['of_roofline']:.2f} | {case.get('backend', '')} |"
        )
    return "\n".join(lines)


def end_to_end_table(cases: list[Case], content: dict[str, Any]) -> str:
    """Return a table with a line per context length, batch size, placement and variant."""
    lines = [
        "| context | batch | placement | | TPOT p50, ms | p99 | tokens/s | × full | of best | attention, µs a layer | "
        "search | select | rest | gather | attend | link MB a step | cache hits | HBM, GB |",
        "|---:|---:|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for case in sorted(cases, key=_order):
        start = f"| {length(case['context_len'])} | {case['batch_size']} | {case['placement']} | {label(case)} |"
        if "refused" in case:
            lines.append(f"{start} {case['refused']} |" + " |" * 13)
            continue
        parts = case.get("parts_us", {})
        link, hits = case.get("link_bytes"), case.get("hit_rate")
        lines.append(
            f"{start} {case['p50_us'] / 1e3:.2f} | {case['p99_us'] / 1e3:.2f} | {case['tokens_per_s']:.0f} | "
            f"{_ratio(case, cases)} | {_share_of_best(case, cases, content)} | {_us(case.get('attention_us'))} | "
            f"{_us(parts.get('search', case.get('cpu_search_us')))} | {_us(parts.get('select'))} | "
            f"{_us(parts.get('rest'))} | {_us(parts.get('gather'))} | {_us(parts.get('attend'))} | "
            f"{'' if link is None else f'{link / 1e6:.1f}'} | {'' if hits is None else f'{hits:.3f}'} | "
            f"{case['hbm_bytes'] / 1e9:.1f} |"
        )
    return "\n".join(lines)


def label(case: Case) -> str:
    variant, _, rest = str(case["variant"]).partition("+")
    name = NAMES.get(variant, variant) + (f", rest {rest}" if rest else "")
    name += f", {100 * case['keep']:g} %" if case.get("keep") not in (None, 0.02) else ""
    name += f", weights in {case['weights']}" if case.get("weights") else ""
    name += f", KV in {case['kv_codec']}" if case.get("kv_codec") else ""
    name += f", slots for {100 * case['slots']:g} %" if case.get("slots") else ""
    name += ", as Ampere" if case.get("as_ampere") else ""
    return name if case["schedule"] in ("none", "every step") else f"{name}, {case['schedule']}"


def length(context_len: int) -> str:
    return f"{context_len >> 20}M" if context_len >= 1 << 20 else f"{context_len >> 10}K"


def full_case(case: Case, cases: list[Case]) -> Case | None:
    """Return the case of full attention that a case is compared with, or None if it was not measured."""
    names = "kind", "shape", "context_len", "batch_size", "weights", "as_ampere"
    for other in cases:
        same = all(other.get(name) == case.get(name) for name in names)
        if same and other["variant"] == "full" and "p50_us" in other:
            return other
    return None


def speedup(case: Case, cases: list[Case]) -> float | None:
    full = full_case(case, cases)
    return None if full is None else float(full["p50_us"] / case["p50_us"])


def best_speedup(case: Case, content: dict[str, Any]) -> float | None:
    """Return the speedup over full attention that the roofline allows a whole step of a case.

    None for a variant without an index, a shared context, or weights or KV in fewer than 16 bits.
    """
    in_fewer_bits = case.get("weights") or case.get("kv_codec")
    if case["variant"] not in INDEXES or case["kind"].startswith("shared") or in_fewer_bits:
        return None
    config = INDEXES[case["variant"]]
    shape = shape_named(case.get("shape") or content["shape"])
    return best_ratio(shape, config, case["context_len"], case["batch_size"], case.get("keep", content["keep"]))


def _share_of_best(case: Case, cases: list[Case], content: dict[str, Any]) -> str:
    ratio, best = speedup(case, cases), best_speedup(case, content)
    return "" if ratio is None or best is None or case["placement"] != "device" else f"{ratio / best:.2f} of {best:.2f}"


def _ratio(case: Case, cases: list[Case]) -> str:
    ratio = speedup(case, cases)
    return "" if ratio is None or case["variant"] == "full" else f"{ratio:.2f}"


def _order(case: Case) -> tuple[Any, ...]:
    names, placements = list(NAMES), ["device", "hybrid", "host"]
    variant, placement = case["variant"], case["placement"]
    return (
        case["context_len"],
        case["batch_size"],
        names.index(variant) if variant in names else len(names),
        placements.index(placement) if placement in placements else len(placements),
        case["schedule"] != "every step",
        case["schedule"],
    )


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
