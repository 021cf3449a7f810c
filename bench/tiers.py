"""Does a context of four times the host budget decode correctly from disk, within the budget, and how fast?

    python -m bench.tiers [--context-len 6000] [--share 0.25] [--artifact DIR] [--json FILE]

The demo model continues a novel: first with tokens of the text, one per step, so that selections change as in real use,
and then with its own tokens. Every case runs in a process of its own, whose memory is sampled throughout.
Gates: logits and tokens are bit-identical to those of the same steps from memory; no page of a KV file is mapped; the
store never holds more than the budget; and its process never holds more than the process of the flat store without its
KV, plus the budget, plus 8 MiB for threads and code. The index's memory is not part of the budget.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.disk_speed import disk_speed
from bench.process_memory import Watch, mapped_bytes, resident_bytes, small_pages_only
from bench.timing import end_as_interrupted, finish, gate
from csattn.artifact import Artifact, open_artifact
from csattn.config import SearchConfig, preset
from csattn.cpu.heap import trim_heap
from csattn.models import LoadedModel, load_model
from csattn.selector_names import SelectorName
from index_build.pipeline import build_artifact
from offload.host_store import HostStore
from offload.kv_store import STREAM_ROWS
from offload.tiered_store import TieredStore
from workers.engine.cpu.context import HostBudget
from workers.engine.cpu.engine import CpuEngine
from workers.serving.step_engine import StepRow

TEXT = Path(__file__).parent / "texts" / "novel.txt"
STORE = Path.home() / ".cache" / "csattn" / "bench"
DTYPE, KV_SUFFIX = "bfloat16", ".kv.safetensors"
PROCESS_BYTES = 8 << 20  # stacks of the store's threads, and code that only its process runs; the same for any context
# makes the allocator return freed memory, so that a process holds only what it uses
FRUGAL = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
FORCED, GREEDY, WARM = 48, 8, 16  # tokens; the first WARM of the forced ones fill the tier and are not timed


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration of decoding."""

    selector: SelectorName
    tiered: bool
    reads_ahead: bool = True
    in_place: bool = False  # attention reads mapped rows; False: they are gathered, or streamed in pieces


CASES = {
    "csattn, memory": Case("csattn", False),
    "csattn, disk": Case("csattn", True),
    "csattn, disk, nothing read ahead": Case("csattn", True, reads_ahead=False),
    "full, memory, at once": Case("full", False, in_place=True),
    "full, memory": Case("full", False),
    "full, disk": Case("full", True),
}
WARM_UPS = ("csattn, memory", "full, memory")  # run first, to compile kernels, which takes memory; measured again later


def run_case(name: str, path: Path, budget_bytes: int) -> dict[str, Any]:
    """Run a case; it needs a process of its own."""
    small_pages_only()
    case = CASES[name]
    loaded = load_model(None, DTYPE)
    ids = token_ids(loaded)
    trim_heap()  # the free memory that the heap keeps differs from run to run
    with open_artifact(path) as artifact:
        following = ids[artifact.spec.context_len :][:FORCED]
        config = SearchConfig(lookahead=1)
        budget = budget_bytes if case.tiered else None
        kept = None if budget is None else HostBudget(budget, config, case.selector)
        with CpuEngine(loaded, max_requests=1, tail_capacity=FORCED + GREEDY, host_budget=kept) as engine:
            engine.add_context(0, artifact)
            context = engine.context(0)
            if not case.tiered and not case.in_place:
                engine._contexts[0] = replace(context, store=HostStore(context.kv, STREAM_ROWS), in_place=False)
            store = engine.context(0).store
            if not case.reads_ahead:
                store.prefetch = lambda layer_idx, kv_indices: None  # type: ignore[method-assign]
            engine.open(0, 0, config, case.selector)
            tiered = store if isinstance(store, TieredStore) else None
            result = decode(engine, tiered, following)
            result["mapped_kv_bytes"] = mapped_bytes(path, KV_SUFFIX)
            if tiered:
                assert tiered.held_bytes <= tiered.budget_bytes, f"{tiered!r} exceeds its budget"
    return {"case": name, **result}


def decode(engine: CpuEngine, tiered: TieredStore | None, following: NDArray[np.int32]) -> dict[str, Any]:
    """Run steps over a text, then greedy ones; return times, tokens, memory held and bytes read."""
    hashed = hashlib.sha256()

    def logits_after(token_id: int) -> NDArray[np.float32]:
        result = engine.step([StepRow(0, token_id)], want_logits=True)
        assert result.logits is not None
        return result.logits[0]

    def ask() -> dict[str, int]:
        return {**resident_bytes(), "all": sum(resident_bytes().values()), "held": tiered.held_bytes if tiered else 0}

    with Watch(ask) as watch:
        for step, token in enumerate(following):
            if step == WARM:
                started, cpu_started = time.perf_counter(), time.process_time()
                read_before = tiered.tier.bytes_read if tiered else 0
                counts_before = (tiered.tier.num_hits, tiered.tier.num_misses) if tiered else (0, 0)
            out = logits_after(int(token))
            hashed.update(out.tobytes())
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
        steps = len(following) - WARM
        read = tiered.tier.bytes_read - read_before if tiered else 0
        hits, misses = (tiered.tier.num_hits, tiered.tier.num_misses) if tiered else (0, 0)
        said = []
        for _ in range(GREEDY):
            said.append(int(out.argmax()))
            out = logits_after(said[-1])
    result: dict[str, Any] = {
        "tokens_per_s": round(steps / seconds, 2),
        "cpu_ms_per_token": round(cpu_seconds * 1e3 / steps, 1),  # of all threads, because the machine is shared
        "logits_sha256": hashed.hexdigest(),
        "tokens": said,
        "most_bytes": watch.most,
        "samples": watch.num_samples,
    }
    if tiered:
        hits, misses = hits - counts_before[0], misses - counts_before[1]
        result |= {
            "read_bytes_per_token": round(read / steps),
            "read_mbps": round(read / seconds / 1e6, 1),
            "found_in_memory": round(hits / max(hits + misses, 1), 4),
            "budget_bytes": tiered.budget_bytes,
            "page_rows": tiered.plan.page_rows,
            "pages_of_all": round(tiered.plan.num_slots / tiered.plan.num_pages, 4),
        }
    return result


def token_ids(loaded: LoadedModel) -> NDArray[np.int32]:
    return np.asarray(loaded.tokenizer(TEXT.read_text()).input_ids, np.int32)


def check(results: dict[str, dict[str, Any]], budget_bytes: int) -> None:
    """Check all gates."""
    for memory, disk in (
        ("csattn, memory", "csattn, disk"),
        ("csattn, memory", "csattn, disk, nothing read ahead"),
        ("full, memory", "full, disk"),
    ):
        flat, tiered = results[memory], results[disk]
        for what in ("logits_sha256", "tokens"):
            gate(flat[what] == tiered[what], f"{disk}: {what} are not those of memory")
        gate(flat["mapped_kv_bytes"] > 0, f"{memory}: maps no KV, so it is no measure of what KV takes")
        without_kv = flat["most_bytes"]["all"] - flat["mapped_kv_bytes"]
        extra = tiered["most_bytes"]["all"] - without_kv
        tiered["bytes_beyond_flat_without_kv"] = extra
        most = budget_bytes + PROCESS_BYTES
        gate(
            extra > 0, f"{memory}: {-extra:,} bytes more than {disk} beside KV, so it is no measure of what others hold"
        )
        gate(extra <= most, f"{disk}: the process held {extra:,} bytes more; with its threads, {most:,} are allowed")
    gate(results["full, memory, at once"]["tokens"] == results["full, disk"]["tokens"], "full: other tokens")
    for name, result in results.items():
        if CASES[name].tiered:
            gate(result["mapped_kv_bytes"] == 0, f"{name}: pages of KV files are mapped")
            gate(result["most_bytes"]["held"] <= budget_bytes, f"{name}: the store held more than its budget")


def artifact_of(options: argparse.Namespace) -> Path:
    if options.artifact is not None:
        return Path(options.artifact)
    loaded = load_model(None, DTYPE)
    config = preset("default")
    return build_artifact(loaded, token_ids(loaded)[: options.context_len], config, STORE).path


def kv_bytes(artifact: Artifact) -> int:
    return sum(artifact.layer_kv_place(layer_idx)[2] for layer_idx in range(artifact.spec.model.num_layers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context-len", type=int, default=6000)
    parser.add_argument("--share", type=float, default=0.25, help="host budget, as a share of the KV")
    parser.add_argument("--artifact", type=Path, help="artifact of the demo model in bfloat16 over the same text")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    end_as_interrupted()
    if options.case:
        print(json.dumps(run_case(options.case, options.artifact, options.budget)))
        return
    path = artifact_of(options)
    with open_artifact(path) as artifact:
        total, index_bytes, context_len = kv_bytes(artifact), artifact.index_bytes, artifact.spec.context_len
    budget_bytes = int(total * options.share)
    disk = disk_speed(sorted(path.glob(f"*{KV_SUFFIX}")))
    results = {}
    for name in (*WARM_UPS, *CASES):
        arguments = ["--artifact", str(path), "--case", name, "--budget", str(budget_bytes)]
        done = subprocess.run(
            [sys.executable, "-m", "bench.tiers", *arguments],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env=os.environ | FRUGAL,
        )
        results[name] = json.loads(done.stdout.splitlines()[-1])
        print(f"{name}: {results[name]['tokens_per_s']} tokens/s", file=sys.stderr)
    check(results, budget_bytes)
    for result in results.values():
        if "read_mbps" in result:
            result["of_sequential"] = round(result["read_mbps"] / disk["sequential_mbps"], 3)
    finish(
        {
            "bench": "tiers",
            "context_len": context_len,
            "kv_bytes": total,
            "host_budget_bytes": budget_bytes,
            "index_bytes": index_bytes,
            "disk": disk,
            "cases": results,
        },
        options.json,
    )


if __name__ == "__main__":
    main()
