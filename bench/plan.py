"""What it takes to serve many long contexts, computed from steps that were measured on one H200.

python -m bench.plan [--contexts 1000] [--tokens 1048576] [--requests-per-minute 10000] [--answer-tokens 200]
                     [--gpus-per-host 8] [--host-memory-gb 2048] [--disk-gb-per-s 10] [--kv q8_0] [--json FILE]

Llama-3.1-8B's shape, `hybrid`, 2 %, bfloat16. A step of b requests is assumed to take base + b * own; both come from
two measured batch sizes. For other lengths, own is interpolated between two measured lengths.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from bench.step_figures import case
from bench.timing import GateError, finish, gate, options_parser
from csattn.artifact import ModelGeometry
from offload.codecs.formats import KvFormat
from workers.capacity import context_bytes, spec_of

MODEL = ModelGeometry(
    num_layers=32,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=4096,
    vocab_size=128256,
    max_positions=1 << 21,
)
PARAMETERS = 8.03e9
KV_FORMATS = {"bfloat16": None, "q8_0": KvFormat.parse("q8_0")}
GPU_BYTES, WEIGHT_BYTES = 139 << 30, 2 * PARAMETERS
PRODUCTS_PER_S = 395e12  # multiply-adds per second in bfloat16, as measured
SHORT, LONG = 131072, 1048576


@dataclass(frozen=True, slots=True)
class Wanted:
    """The load to be served, and the hardware."""

    contexts: int = 1000
    tokens: int = LONG  # of a context
    requests_per_minute: float = 10_000
    answer_tokens: int = 200
    gpus_per_host: int = 8
    host_memory_gb: float = 2048
    disk_gb_per_s: float = 10
    kv: str = "bfloat16"


def plan(wanted: Wanted) -> dict[str, Any]:
    """Return the GPUs, hosts and bytes needed, and whether tokens or memory need more hosts."""
    for name, value in asdict(wanted).items():
        gate(isinstance(value, str) or 0 < value < math.inf, f"{name} is {value}; give a number above 0")
    one, four = case(1, SHORT, "hybrid"), case(4, SHORT, "hybrid")
    at_short, base_ms = own_ms(one, four)
    longest = case(1, LONG, "hybrid")
    at_long = longest["p50_us"] / 1e3 - base_ms
    between = (wanted.tokens - SHORT) / (LONG - SHORT)
    own = max(at_short + between * (at_long - at_short), at_short * min(1.0, wanted.tokens / SHORT))
    link_bytes = one["link_bytes"] + between * (longest["link_bytes"] - one["link_bytes"])
    on_device = max(1.0, one["hbm_bytes"] - WEIGHT_BYTES + between * (longest["hbm_bytes"] - one["hbm_bytes"]))
    at_once = int((GPU_BYTES - WEIGHT_BYTES) // on_device)
    gate(
        at_once > 0,
        f"a context of {wanted.tokens:,} tokens takes {on_device / 1e9:.0f} GB of a GPU, which has "
        f"{(GPU_BYTES - WEIGHT_BYTES) / 1e9:.0f} besides the weights; plan with fewer tokens",
    )
    step_ms = base_ms + at_once * own
    tokens_per_s = wanted.requests_per_minute / 60 * wanted.answer_tokens
    of_gpu = 1e3 * at_once / step_ms
    gpus = math.ceil(tokens_per_s / of_gpu)
    kept = sum(context_bytes(spec_of(MODEL, wanted.tokens), KV_FORMATS[wanted.kv]))
    of_host = kept * wanted.contexts / (wanted.host_memory_gb * 1e9)
    hosts = {"tokens": math.ceil(gpus / wanted.gpus_per_host), "memory": math.ceil(of_host)}
    products = PARAMETERS * wanted.tokens + MODEL.num_layers * MODEL.hidden_size * float(wanted.tokens) ** 2
    return {
        "tokens_per_s": round(tokens_per_s),
        "contexts_on_a_gpu": at_once,
        "step_ms": round(step_ms, 1),
        "tokens_per_s_of_a_gpu": round(of_gpu, 1),
        "link_gb_per_s_of_a_gpu": round(link_bytes * of_gpu / 1e9, 1),
        "gpus": gpus,
        "hosts_for_tokens": hosts["tokens"],
        "hosts_for_memory": hosts["memory"],
        "short_first": max(hosts, key=lambda name: hosts[name]),
        "context_gb": round(kept / 1e9, 1),
        "store_tb": round(kept * wanted.contexts / 1e12, 1),
        "s_from_disk": round(kept / wanted.disk_gb_per_s / 1e9, 1),
        "prefill_gpu_s": round(products / PRODUCTS_PER_S),
    }


def own_ms(one: dict[str, Any], four: dict[str, Any]) -> tuple[float, float]:
    """Return the milliseconds that a request adds to a step, and those of a step without any."""
    own = (four["p50_us"] - one["p50_us"]) / 3e3
    return own, one["p50_us"] / 1e3 - own


def table() -> list[str]:
    """Return the table for docs/operate.md."""
    cases = [
        ("100 contexts of 128K, 1000 requests a minute", Wanted(100, SHORT, 1000)),
        ("1000 contexts of 128K, 10 000 requests a minute", Wanted(1000, SHORT, 10_000)),
        ("1000 contexts of 1M, 10 000 requests a minute", Wanted(1000, LONG, 10_000)),
        ("the same, KV in Q8_0", Wanted(1000, LONG, 10_000, kv="q8_0")),
    ]
    lines = [
        "| | a GPU: requests at once, tokens/s | GPUs | hosts of 8 for tokens; for memory | store, TB "
        "| a context from disk, s | its prefill, GPU s |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, wanted in cases:
        of = plan(wanted)
        hosts = f"{of['hosts_for_tokens']}; {of['hosts_for_memory']}"
        cells = f"{of['contexts_on_a_gpu']}, {of['tokens_per_s_of_a_gpu']}", of["gpus"], hosts, of["store_tb"]
        lines.append(f"| {' | '.join(map(str, (name, *cells, of['s_from_disk'], of['prefill_gpu_s'])))} |")
    return lines


def main() -> None:
    parser = options_parser(__doc__)
    for name, kind, default in (
        ("contexts", int, 1000),
        ("tokens", int, LONG),
        ("requests-per-minute", float, 10_000.0),
        ("answer-tokens", int, 200),
        ("gpus-per-host", int, 8),
        ("host-memory-gb", float, 2048.0),
        ("disk-gb-per-s", float, 10.0),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default)
    parser.add_argument("--kv", choices=KV_FORMATS, default="bfloat16")
    options = vars(parser.parse_args())
    to = options.pop("json")
    try:
        finish({**options, **plan(Wanted(**options))}, to)
    except GateError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
