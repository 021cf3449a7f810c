"""How far each index moves a real model's predictions, and for how many bytes of index.

For every text: prefill a context, build one artifact per variant, teacher-force the text's next tokens with
sparse attention in every layer, and compare with full attention. Gate: reading everything gives KL < 1e-5.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.accuracy.texts import TEXTS, cut_text
from bench.timing import finish, gate, machine
from csattn.artifact import open_artifact
from csattn.config import IndexConfig, ListConfig, SearchConfig, SketchConfig, preset
from csattn.models import LoadedModel, load_model
from index_build.pipeline import build_artifact
from workers.evaluate import full_attention, measure

# text -> tokens of context, tokens that are predicted
LENGTHS = {"novel": (7680, 512), "speech": (6144, 256), "code": (6144, 256)}


# what is compared: the presets, and one change to them at a time
VARIANTS: dict[str, IndexConfig] = {
    "default": preset("default"),
    "fine codes only": SketchConfig(num_fine=4, num_coarse=0),
    "half the codes": SketchConfig(num_fine=1, num_coarse=1),
    "twice the fine codes": SketchConfig(num_fine=4, num_coarse=2),
    "short segments": SketchConfig(segment_len=2048),
    "lists": preset("lists"),
    "lists of N/2": ListConfig(list_len=0.5),
    "paper": preset("paper"),
}


def evaluate(loaded: LoadedModel, text: str, names: list[str]) -> Iterator[dict[str, Any]]:
    """One text, variant by variant: everything measured on it so far. Selectors without an index go with `default`."""
    context_len, eval_len = LENGTHS[text]
    cut = cut_text(TEXTS[text], loaded.tokenizer, context_len, eval_len)
    context, following = cut.context, cut.following
    so_far: dict[str, Any] = {
        "text": text,
        "file": TEXTS[text].path.name,
        "sha256": cut.sha256,
        "context_len": context_len,
        "eval_len": eval_len,
        "results": [],
    }
    search, baseline = SearchConfig(), None
    more = {  # beside `default`
        "default, looking ahead": ("csattn", replace(search, lookahead=1)),
        "default, the rest by moments": ("csattn", replace(search, rest="moments")),
        "default, no rest": ("csattn", replace(search, rest="none")),
        "exact, the rest by codes": ("exact", replace(search, rest="sketch")),
        "exact": ("exact", search),
        "window": ("window", search),
    }
    for name in names:
        with tempfile.TemporaryDirectory() as store:
            report = build_artifact(loaded, context, VARIANTS[name], Path(store))
            with open_artifact(report.path) as artifact:
                if baseline is None:
                    baseline = full_attention(loaded, artifact, following)
                    so_far["nll_full"] = round(baseline.nll, 5)
                    whole = measure(loaded, artifact, replace(search, keep=1.0), "csattn", following, baseline)
                    gate(whole.kl < 1e-5, f"reading everything should be full attention, KL is {whole.kl}")
                runs = {name: ("csattn", search), **(more if name == "default" else {})}
                for label, (selector, config) in runs.items():
                    quality = measure(loaded, artifact, config, selector, following, baseline)
                    so_far["results"].append({"name": label, **quality.to_json(), "build_s": report.seconds})
                    print(f"{text:8} {label:28} KL {quality.kl:.4f}", flush=True)
        yield so_far


def merge(texts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Figures of one text from several files in one place."""
    merged: dict[str, dict[str, Any]] = {}
    for text in texts:
        if text["text"] not in merged:
            merged[text["text"]] = text
        else:
            gate(merged[text["text"]]["sha256"] == text["sha256"], f"two different texts are called {text['text']}")
            seen = {r["name"] for r in merged[text["text"]]["results"]}
            merged[text["text"]]["results"] += [r for r in text["results"] if r["name"] not in seen]
    return list(merged.values())


def table(texts: list[dict[str, Any]]) -> str:
    """Markdown: KL of what was measured on every text, as figure and as a multiple of exact selection's."""
    lines = [
        "| | bytes per key | " + " | ".join(f"{t['text']}: KL | × exact | NLL gap | top-1" for t in texts) + " |",
        "|---|---:|" + "---:|---:|---:|---:|" * len(texts),
    ]
    by_name = [{r["name"]: r for r in t["results"]} for t in texts]
    for name, first in by_name[0].items():
        if not all(name in results for results in by_name):
            continue  # measured on some of the texts only
        cells = []
        for t, results in zip(texts, by_name, strict=True):
            r, exact = results[name], results.get("exact", {"kl": float("nan")})["kl"]
            gap = r["nll"] - t["nll_full"]
            cells.append(f"{r['kl']:.4f} | {r['kl'] / exact:.2f} | {gap:+.4f} | {r['top1_agreement']:.3f}")
        lines.append(f"| {name} | {first['index_bytes_per_key']:.0f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(texts: list[dict[str, Any]], keep: float, path: Path) -> None:
    """KL over bytes of index, a panel per text, with exact selection and window as lines."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(texts), figsize=(4.2 * len(texts), 4.6), sharey=True, squeeze=False)
    markers = "oPs^vDX<>*p"
    names = list(dict.fromkeys(r["name"] for t in texts for r in t["results"] if r["index_bytes_per_key"]))
    colours = plt.get_cmap("tab10")
    for axis, t in zip(axes[0], texts, strict=True):
        for r in t["results"]:
            if not r["index_bytes_per_key"]:
                style = {"exact": "-", "window": ":"}[r["name"]]
                axis.axhline(r["kl"], color="black", linestyle=style, linewidth=1, label=r["name"])
                continue
            i = names.index(r["name"])
            axis.plot(
                r["index_bytes_per_key"], r["kl"], markers[i % len(markers)], color=colours(i % 10), markersize=9,
                label=r["name"], markeredgecolor="white", zorder=len(names) - i,
            )  # fmt: skip
        axis.set(xscale="log", yscale="log", xlabel="bytes of index per key and KV head", title=t["text"])
        axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        ticks = [4**power for power in range(1, 8)]
        axis.set_xticks(ticks, list(map(str, ticks)))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("KL against full attention (nats)")
    handles = {}
    for axis in axes[0]:
        handles.update({label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)})
    figure.suptitle(f"{100 * keep:g} % of the KV fetched: what each index costs and loses")
    figure.legend(handles.values(), handles.keys(), loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110, bbox_inches="tight")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--texts", default=",".join(LENGTHS))
    parser.add_argument("--variants", default="")
    parser.add_argument("--model")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--show", type=Path, nargs="+", help="earlier figures, put together")


def run(arguments: argparse.Namespace) -> None:
    if arguments.show:
        files = [json.loads(file.read_text()) for file in arguments.show]
        result = {**files[0], "texts": merge([text for file in files for text in file["texts"]])}
    else:
        result = {"bench": "accuracy", "search": asdict(SearchConfig()), "machine": machine(), "texts": []}
        loaded = load_model(arguments.model)
        names = [n for n in arguments.variants.split(",") if n] or list(VARIANTS)
        for text in arguments.texts.split(","):
            result["texts"].append({})
            for so_far in evaluate(loaded, text, names):
                result["texts"][-1] = so_far
                if arguments.json:  # what has been measured outlives an interruption
                    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result["texts"]))
    if arguments.plot:
        plot(result["texts"], result["search"]["keep"], arguments.plot)
    finish(result, arguments.json)
