"""Tables of the time of whole steps and of layers, and of their memory on a device."""

import json
from typing import Any

from bench.records import RESULTS, Case, measured, only

STEPS = "decode-steps-h200.json"
MODELS, LAYER, LATENTS = ("models-h200.json", "hybrids-h200.json"), "layer-h200.json", "latents-h200.json"
COMPRESSED = "compressed-steps-h200.json"
OF_LATENTS = {"all": "`device`, all latents", "compressed": "`device`, DeepSeek-V4-Flash's widths"}
SHAPES = {  # shape in one of MODELS: the row's title, with the layers that are searched
    "qwen3-30b-a3b": "Qwen3-30B-A3B: 48 layers, 128 experts",
    "gpt-oss-20b": "gpt-oss-20b: 12 of 24 layers, the others see 128 rows",
    "gemma-3-27b": "Gemma 3 27B: 10 of 62 layers, the others see 1024 rows",
    "qwen3.5-27b": "Qwen3.5-27B: 16 of 64 layers, the others are linear",
    "granite-4-h-small": "Granite 4.0 H Small: 4 of 40 layers, the others are state spaces; 72 experts",
    "nemotron-3-nano-30b": "Nemotron 3 Nano: 6 of 52 layers, the others are state spaces and 128 experts",
    "nemotron-nano-2-9b": "Nemotron Nano 9B v2: 4 of 56 layers, the others are state spaces and MLPs",
}
SHARED = "shared-h200.json"
SPLIT = {  # title: number of requests, and result files, the one with figures of one GPU last
    "8B, one request": (1, ("split-2-h200.json", "split-4-h200.json")),
    "8B, four requests on contexts of their own": (4, ("split-4-h200.json",)),
    "70B, one request": (1, ("split-4-70b-h200.json",)),
}
DRAFTS = {  # result file: model, dtype or format of weights; on what
    "drafts.json": "SmolLM2-135M, float32 | two CPU cores",
    "drafts-1.5b-bfloat16.json": "Qwen2.5-Coder-1.5B, bfloat16 | two CPU cores",
    "drafts-1.5b-int4.json": "Qwen2.5-Coder-1.5B, int4 | two CPU cores",
    "drafts-device-h200.json": "SmolLM2-135M, bfloat16 | H200, `device`",
    "drafts-hybrid-h200.json": "SmolLM2-135M, bfloat16 | H200, `hybrid`",
    "drafts-8b-device-h200.json": "Llama-3.1-8B's shape, 32K | H200, `device`",
    "drafts-8b-hybrid-h200.json": "Llama-3.1-8B's shape, 32K | H200, `hybrid`",
}
EXTRACTED = {"extract.json": "two CPU cores", "extract-device-h200.json": "H200, `device`"}
EVERY_STEP, AHEAD = "every step", "one layer ahead"


def case(batch_size: int, context_len: int, placement: str, **more: Any) -> Case:
    """Return a case of whole steps. By default: variant `default`, searched at every step."""
    wanted = {"variant": "default", "schedule": EVERY_STEP, "kv_codec": None, **more}
    wanted |= {"batch_size": batch_size, "context_len": context_len, "placement": placement}
    return dict(only(STEPS, **wanted))


def full(batch_size: int, context_len: int) -> Case:
    return case(batch_size, context_len, "device", variant="full", schedule="none")


def steps() -> list[str]:
    """Return a table of whole steps, compared with full attention of the same requests."""
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
        baseline = full(batch_size, context_len) if context_len < 1048576 else None
        if baseline:
            lines.append(line(f"{what}: full attention", baseline, baseline))
        for placement, more in cases:
            name = ", ".join(
                [
                    "`" + placement + "`",
                    *(["a layer ahead"] if "schedule" in more else []),
                    *([more["kv_codec"]] if "kv_codec" in more else []),
                ]
            )
            lines.append(line(f"{what}: {name}", case(batch_size, context_len, placement, **more), baseline))
    return lines


def line(name: str, of: Case, baseline: Case | None) -> str:
    times = "" if baseline is None else f"{baseline['p50_us'] / of['p50_us']:.2f}"
    return f"| {name} | {milliseconds(of):.2f} ({of['p99_us'] / 1e3:.2f}) | {of['hbm_bytes'] / 1e9:.1f} | {times} |"


def milliseconds(of: Case) -> float:
    """Return the median time of a step."""
    return float(of["p50_us"]) / 1e3


def models() -> list[str]:
    """Return a table of whole steps of other shapes, with full attention."""
    head = "| ms a step (GB on the device) | requests | full attention | `device` | of what bytes allow | `hybrid` |"
    lines = [head, "|---|---:|---:|---:|---:|---:|"]
    for shape, name in SHAPES.items():
        [file] = [file for file in MODELS if any(of["shape"] == shape for of in measured(file))]
        sizes = sorted({(of["context_len"], of["batch_size"]) for of in measured(file) if of["shape"] == shape})
        for context_len, batch_size in sizes:
            of = {"shape": shape, "context_len": context_len, "batch_size": batch_size}
            whole = only(file, **of, variant="full")
            device, hybrid = (only(file, **of, variant="default", placement=where) for where in ("device", "hybrid"))
            share = f"{device['of_roofline']:.0%}".replace("%", " %") if "of_roofline" in device else ""
            cells = [str(batch_size), step_cell(whole), step_cell(device), share, step_cell(hybrid)]
            lines.append(f"| {name}; {context_len // 1024}K | {' | '.join(cells)} |")
    return lines


def step_cell(of: Case) -> str:
    return "does not fit" if "refused" in of else f"{milliseconds(of):.2f} ({of['hbm_bytes'] / 1e9:.0f})"


def layer() -> list[str]:
    """Return a table of one layer's search and attention, compared with full attention."""
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
    """Return a table of steps of models that attend to latents or compressed rows, and the parts of a layer."""
    parts = ("score", "choose", "gather", "attend", "other")
    named = ["ms a step: as fed, all rows in slots", "GB on the device", *(f"µs a layer: {parts[0]}", *parts[1:])]
    lines = ["| 128K of context | " + " | ".join(named) + " |", "|---|" + "---:|" * len(named)]
    for of in (*measured(LATENTS), *measured(COMPRESSED)):
        what = OF_LATENTS.get(of["latents"], f"`{of['placement']}`")
        requests = "one request" if of["batch_size"] == 1 else f"{of['batch_size']} requests"
        times = f"{of['fed_p50_us'] / 1e3:.2f}, {of['again_p50_us'] / 1e3:.2f}"
        cells = [times, f"{of['hbm_bytes'] / 1e9:.1f}", *(f"{of['parts_us'].get(part, 0):.0f}" for part in parts)]
        lines.append(f"| {requests}, {what} | {' | '.join(cells)} |")
    return lines


def shared() -> list[str]:
    """Return a table of steps of many requests on one context."""
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


def split() -> list[str]:
    """Return a table of steps on several GPUs and on one, with memory and share of the bound for four GPUs."""
    named = "one GPU", "two", "four", "four: × as fast", "GB on each of four", "of what bytes and sums allow"
    lines = ["| ms a step | " + " | ".join(named) + " |", "|---|" + "---:|" * len(named)]
    for what, (batch_size, files) in SPLIT.items():
        cases = [c for name in files for c in measured(name) if c["batch_size"] == batch_size]
        for placement in ("device", "hybrid", "host"):
            of = {c["num_devices"]: c for c in cases if c["placement"] == placement}
            if not of:
                continue
            cells = [f"{milliseconds(of[number]):.2f}" if number in of else "–" for number in (1, 2, 4)]
            has_both = 1 in of and 4 in of
            cells += [f"{milliseconds(of[1]) / milliseconds(of[4]):.2f}" if has_both else "–"]
            of_four = [f"{of[4]['hbm_bytes'] / 1e9:.1f}", f"{100 * of[4]['of_bound']:.0f} %"] if 4 in of else ["–", "–"]
            lines.append(f"| {what}, `{placement}` | {' | '.join([*cells, *of_four])} |")
    return lines


def few_bits() -> list[str]:
    """Return a table of steps of a 1.5B model on two CPU cores, by the format of its weights."""
    sizes = 2, 4, 8, 16
    lines = [
        f"| ms a step | weights, GB | 1 request | {' | '.join(map(str, sizes))} | 64 tokens of a question |",
        "|---|" + "---:|" * (len(sizes) + 3),
    ]
    for name in ("bfloat16", "fp8", "int4"):
        result = json.loads((RESULTS / f"serve-step-1.5b-{name}.json").read_text())
        steps, weights = result["steps"], result["weights_bytes"] / 1e9
        decode = {step["rows"]: step["p50_ms"] for step in steps if step["requests"] == step["rows"]}
        [question] = [step["p50_ms"] for step in steps if step["rows"] == 64 and not step["all_ask"]]
        times = " | ".join(f"{decode[size]:.0f}" for size in (1, *sizes))
        lines.append(f"| {name} | {weights:.1f} | {times} | {question:.0f} |")
    return lines


def drafts() -> list[str]:
    """Return a table of answers with drafts and without."""
    lines = [
        "| | | answers, tokens | tokens a step | × as fast | least, most for an answer |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name, title in DRAFTS.items():
        result = json.loads((RESULTS / name).read_text())
        most = _most(result)
        of = [case for case in result["cases"] if str(case["draft_tokens"]) == most]
        times = [case["x"] for case in of]
        whole = f"{len(of)}, {sum(case['tokens'] for case in of):,}"
        figures = f"{result['tokens_a_step'][most]:.2f} | {result['x'][most]:.2f}"
        lines.append(f"| {title} | {whole} | {figures} | {min(times):.2f}, {max(times):.2f} |")
    return [*lines, *(_extracted(name, title) for name, title in EXTRACTED.items())]


def _most(result: Case) -> str:
    """Return the greatest length of drafts that was measured."""
    return max(result["x"], key=int)


def extract_speed() -> str:
    """Return how many times as fast answers in JSON of a schema are with drafts."""
    return f"{json.loads((RESULTS / 'extract.json').read_text())['x']:.1f} ×"


def _extracted(name: str, title: str) -> str:
    """Return a row of answers in JSON of a schema."""
    result = json.loads((RESULTS / name).read_text())
    times = [case["seconds"] / case["seconds_with_drafts"] for case in result["cases"]]
    whole = f"{len(times)}, {result['tokens']:,}"
    figures = f"{result['tokens_a_step']:.2f} | {result['x']:.2f} | {min(times):.2f}, {max(times):.2f}"
    return f"| SmolLM2-135M, float32, JSON of a schema | {title}, the service | {whole} | {figures} |"


def draft_speeds() -> str:
    """Return how many times as fast answers are with drafts on a CPU, from the least model to the best."""
    on_cpu = [name for name, title in DRAFTS.items() if title.endswith("CPU cores")]
    results = [json.loads((RESULTS / name).read_text()) for name in on_cpu]
    times = [result["x"][_most(result)] for result in results]
    return f"{min(times):.1f} to {max(times):.1f} ×"


def beside_llama_cpp() -> list[str]:
    """Return a table of prefill and decoding on a CPU by llama.cpp and by csattn."""
    lines = ["| tokens of context | | prefill, s | ms a token | MB stored |", "|---:|---|---:|---:|---:|"]
    for of in measured("llama-cpp.json"):
        name = f"llama.cpp, {of['weights']}" if of["by"] == "llama.cpp" else f"csattn, {of['by']}, {of['keep']:.0%}"
        figures = f"{of['prefill_s']:.0f} | {of['step_p50_ms']:.0f} | {of['stored_bytes'] / 1e6:.0f}"
        lines.append(f"| {of['context_len']:,} | {name} | {figures} |")
    kl = rounding_kl()
    kl_text = f"KL {kl['fp8']:.3f} in `fp8`, {kl['int4']:.3f} in `int4` (Python, `python -m bench.rounding`)"
    return [*lines, "", f"Rounding changes the predictions of the file's model: {kl_text}."]


def rounding_kl() -> dict[str, float]:
    """Return the KL of rounding the 1.5B model's weights, by format."""
    return {of["weights"]: of["kl"] for of in measured("rounding-1.5b.json")}
