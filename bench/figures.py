"""Makes the tables of the documents from the result files.

python -m bench.figures           writes them between their marks
python -m bench.figures --check   exits with 1 if a table differs from what its result file gives
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

from bench.accuracy.long_report import table as long_table
from bench.length_figures import as_fast_as, kl_lengths, lengths, published, share_range, shares
from bench.quality_figures import (
    QUALITY,
    kl_range,
    larger_range,
    lm_eval,
    needles,
    quality,
    quality_coded,
    quality_gemma,
    quality_larger,
    quality_means,
    quality_odd,
    rest_mass,
    ruler,
    selectors,
)
from bench.records import measured
from bench.search_figures import search, search_log
from bench.step_figures import (
    beside_llama_cpp,
    case,
    draft_speeds,
    drafts,
    extract_speed,
    few_bits,
    full,
    latents,
    layer,
    milliseconds,
    models,
    rounding_kl,
    shared,
    split,
    steps,
)

ROOT = Path(__file__).parents[1]


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
    """Put lines between the document's <!-- mark --> and <!-- /mark -->. Raises ValueError if these are missing."""
    pattern = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"there is no <!-- {mark} --> and <!-- /{mark} -->")
    return pattern.sub(lambda found: found[1] + "".join(line + "\n" for line in lines) + found[2], text)


def first_screen() -> list[str]:
    """Return the README's first table and text: where csattn wins, and where it loses."""
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
        "The timed model has random weights; its KV cache holds recorded rows and noisy copies of them. Quality was "
        "measured with a small model, SmolLM2-135M, on [real texts of 6K to 116K tokens](docs/quality.md). At 2 %, "
        f"csattn's KL to full attention is {kl_range('default')} nats of the next token. Exact Top-K, which drops the "
        f"other rows, has {kl_range('exact')}. With [Qwen2.5-Coder-1.5B](docs/quality.md#larger-models), at 6K to 32K, "
        f"csattn has {larger_range('default')} and exact Top-K {larger_range('exact')}.",
        f"For the KL that csattn has at 2 % of the rows, Quest has to read about {share_range('quest')} of them, SparQ "
        f"(in the better of its two variants) {share_range('sparq')}, and PQCache {share_range('pqcache')}, depending "
        "on text and length ([other methods](docs/compare.md#in-time-at-every-length)).",
        "",
        "With the same shape, and a context of a million tokens (137 GB of KV, in host memory), csattn decodes "
        f"{1e3 / milliseconds(million):.0f} tokens per second.",
        "",
        on_a_cpu(),
        "",
        *ruler(),
    ]
    return lines


def on_a_cpu() -> str:
    longest = max(of["context_len"] for of in measured("llama-cpp.json"))
    ms = {of["by"]: of["step_p50_ms"] for of in measured("llama-cpp.json") if of["context_len"] == longest}
    kl = rounding_kl()
    return (
        f"On two CPU cores, with Qwen2.5-Coder-1.5B and a context of {longest // 1024}K, a token takes "
        f"{ms['fp8']:.0f} ms with weights rounded to FP8 (KL {kl['fp8']:.3f}) and {ms['int4']:.0f} with 4 bits "
        f"({kl['int4']:.2f}); llama.cpp (Q4_K_M) takes {ms['llama.cpp']:.0f} "
        "([more](docs/compare.md#llamacpp-on-a-cpu)). Tokens that an answer repeats from the document are guessed, and "
        f"verified together: the same answers, [{draft_speeds()}](docs/use.md#answers-that-repeat-their-context) as "
        f"fast, and {extract_speed()} in JSON of a schema (SmolLM2-135M)."
    )


def quality_log() -> list[str]:
    """Return the log's table of all KL figures."""
    return long_table(measured(QUALITY)).splitlines()


def builds() -> list[str]:
    head = "| tokens | prefill alone, s | with the index | written, too | GB/s | index, of a 16-bit KV |"
    lines = [head, "|---:|---:|---:|---:|---:|---:|"]
    seen = set[int]()
    for of in measured("build-h200.json"):
        seconds = " | ".join(f"{of[name]:.2f}" for name in ("prefill_s", "with_index_s", "written_s"))
        rate = of["artifact_bytes"] / of["written_s"] / 1e9
        length = f"{of['context_len']:,}{', once more' if of['context_len'] in seen else ''}"
        seen.add(of["context_len"])
        lines.append(f"| {length} | {seconds} | {rate:.2f} | {of['index_over_16_bit_kv']:.1%} |")
    one, two = measured("build-gpus-h200.json")
    rates = " and ".join(f"{(16 - of['num_gpus']) / of['between_s']:.2f}" for of in (one, two))
    lines += [
        "",
        f"16 contexts of 65,536 tokens, 16 layers of that shape, on Ray (`python -m bench.build_gpus`): "
        f"{one['seconds']:.1f} s on one H200, {two['seconds']:.1f} s on two, of which {two['first_s']:.0f} s go by "
        f"until the first is built; when each has built one, {rates} contexts a second follow.",
    ]
    return lines


def capacity() -> list[str]:
    """Return the operator's table for planning capacity."""
    from bench.plan import table

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


def compressed_layer() -> list[str]:
    from bench.lightning.layer import layer_table

    on_a_gpu, on_a_cpu = (layer_table(measured(f"compressed-layer{of}.json")) for of in ("-h200", ""))
    return ["One H200, bfloat16:", "", *on_a_gpu, "", "Two cores and 24 GB, float32:", "", *on_a_cpu]


TABLES: dict[tuple[str, str], Callable[[], list[str]]] = {
    ("README.md", "first-screen"): first_screen,
    ("bench/README.md", "quality"): quality_means,
    ("bench/README.md", "steps"): steps,
    ("bench/README.md", "published"): published,
    ("bench/README.md", "as-fast-as"): as_fast_as,
    ("bench/README.md", "shared"): shared,
    ("bench/README.md", "models"): models,
    ("bench/README.md", "layer"): layer,
    ("bench/README.md", "latents"): latents,
    ("bench/README.md", "faults"): faults,
    ("docs/gpu.md", "split"): split,
    ("docs/quality.md", "kl"): quality,
    ("docs/quality.md", "kl-larger"): quality_larger,
    ("docs/quality.md", "kl-gemma"): quality_gemma,
    ("docs/quality.md", "kl-odd"): quality_odd,
    ("docs/quality.md", "kl-coded"): quality_coded,
    ("docs/quality.md", "lm-eval"): lm_eval,
    ("docs/quality.md", "needles"): needles,
    ("docs/quality.md", "rest"): rest_mass,
    ("docs/quality.md", "why"): why,
    ("docs/compare.md", "selectors"): selectors,
    ("docs/compare.md", "lengths"): lengths,
    ("docs/compare.md", "kl-lengths"): kl_lengths,
    ("docs/compare.md", "shares"): shares,
    ("bench/README.md", "hisa"): hisa,
    ("bench/README.md", "compressed-layer"): compressed_layer,
    ("bench/log.md", "quality"): quality_log,
    ("bench/log.md", "builds"): builds,
    ("bench/log.md", "search"): search_log,
    ("docs/compare.md", "llama-cpp"): beside_llama_cpp,
    ("docs/use.md", "search"): search,
    ("docs/use.md", "few-bits"): few_bits,
    ("docs/use.md", "drafts"): drafts,
    ("docs/operate.md", "plan"): capacity,
}

if __name__ == "__main__":
    raise SystemExit(main())
