"""How fast do chosen rows get from pinned host memory to the device, and what does deciding which of them move cost?

    python -m bench.movement --out bench/results/movement.json

Copies listed rows of several sizes with several numbers of blocks, against one large copy over the same link; then
replays captured lookups of the slot cache over selections that drift as a decode's do. Needs a CUDA device.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.timing import finish, gate, machine
from offload.gather import RowGather, RowLists, make_row_lists
from offload.host_memory import allocate_rows
from offload.pinned import PinnedRows
from offload.slot_cache import SlotCache, SlotCacheShape

NUM_KV_HEADS, HEAD_DIM, CONTEXT_LEN, TOP_K = 8, 128, 131072, 6554  # one layer of an 8B model, 5 % of 128K
NUM_LAYERS = 8  # whose state and rows are too much for any cache
OVERLAP_NOISE = 0.45  # consecutive selections then share about 60 % of their rows, as a decode's do


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="keep the result in this JSON file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench.movement measures a GPU's link and there is no CUDA device here; run it on one")
    host = PinnedRows(allocate_rows(NUM_LAYERS, (NUM_KV_HEADS, CONTEXT_LEN, 2, HEAD_DIM), torch.bfloat16))
    print(host, flush=True)
    gate(host.pinned, f"host memory cannot be pinned: {host.how}")
    host.layers[0].view(torch.int64).random_()
    link_gbps = measure_link(host)
    result: dict[str, Any] = {"name": "movement", "device": torch.cuda.get_device_name(), "machine": machine()}
    result["link_gbps"] = round(link_gbps, 1)
    result["gather"] = [measure_gather(host, *case, link_gbps) for case in gather_cases()]
    result["slot_cache"] = [measure_slot_cache(host, *case) for case in slot_cache_cases()]
    host.close()
    finish(result, args.out)


def measure_link(host: PinnedRows) -> float:
    """GB/s of one large copy."""
    source = host.layers[0]
    target = torch.empty_like(source, device="cuda")
    us = graph_us(lambda: target.copy_(source, non_blocking=True), num_replays=5)
    print(f"link: {source.nbytes / us / 1e3:.1f} GB/s", flush=True)
    return source.nbytes / us / 1e3


def gather_cases() -> list[tuple[int, int, int, int]]:
    """row_bytes, num_blocks, threads, in_flight."""
    shapes = [
        (2, 1024, 8),
        (4, 512, 4),
        (4, 512, 8),
        (4, 1024, 4),
        (8, 512, 4),
        (8, 512, 8),
        (16, 512, 4),
        (32, 512, 4),
    ]
    sizes = [(row_bytes, blocks, 512, 4) for row_bytes in (128, 256, 1024) for blocks in (4, 8, 16, 32)]
    return [(512, *shape) for shape in shapes] + sizes


def measure_gather(
    host: PinnedRows, row_bytes: int, num_blocks: int, threads: int, in_flight: int, link_gbps: float
) -> dict[str, Any]:
    """As many bytes as a layer's selection has, rows ascending as in a selection."""
    source = host.layers[0].view(torch.uint8).view(NUM_KV_HEADS, -1, row_bytes)
    num_rows = TOP_K * 512 // row_bytes
    lists = make_row_lists(NUM_KV_HEADS, num_rows, torch.device("cuda"))
    target = torch.zeros(NUM_KV_HEADS, num_rows, row_bytes, dtype=torch.uint8, device="cuda")
    lists.counts.fill_(num_rows)
    lists.from_addresses.copy_(torch.tensor([head.data_ptr() for head in source]))
    lists.to_addresses.copy_(torch.tensor([head.data_ptr() for head in target]))
    lists.to_rows.copy_(torch.arange(num_rows).expand(NUM_KV_HEADS, -1))
    for head in range(NUM_KV_HEADS):
        lists.from_rows[head] = torch.randperm(source.shape[1])[:num_rows].sort().values
    gather = RowGather(row_bytes, NUM_KV_HEADS, num_blocks=num_blocks, threads=threads, in_flight=in_flight)
    us = graph_us(lambda: gather.launch(lists), num_replays=9)
    gate(is_gathered(lists, source, target), f"{gather!r} copied the wrong rows")
    gbps = target.nbytes / us / 1e3
    print(f"{gather!r}, {in_flight} in flight: {gbps:.1f} GB/s, {gbps / link_gbps:.2f} of the link", flush=True)
    return {
        "row_bytes": row_bytes,
        "num_blocks": num_blocks,
        "threads": threads,
        "in_flight": in_flight,
        "us": round(us, 1),
        "moved_bytes": target.nbytes,
        "gbps": round(gbps, 1),
        "of_link": round(gbps / link_gbps, 3),
    }


def is_gathered(lists: RowLists, source: torch.Tensor, target: torch.Tensor) -> bool:
    return all(
        torch.equal(target[head].cpu(), source[head, lists.from_rows[head].long().cpu()]) for head in range(len(source))
    )


def slot_cache_cases() -> list[tuple[int, int]]:
    """batch, num_slots."""
    return [(1, 2 * TOP_K), (1, 3 * TOP_K), (4, 3 * TOP_K)]


def measure_slot_cache(host: PinnedRows, batch: int, num_slots: int) -> dict[str, Any]:
    """Lookups alone, and with their gathers, per layer; all rows of the batch continue one context."""
    shape = SlotCacheShape(
        num_layers=NUM_LAYERS,
        num_contexts=1,
        num_kv_heads=NUM_KV_HEADS,
        num_index_heads=NUM_KV_HEADS,
        context_capacity=CONTEXT_LEN,
        num_slots=num_slots,
        max_top_k=TOP_K,
        max_batch=batch,
        row_bytes=2 * HEAD_DIM * torch.bfloat16.itemsize,
    )
    cache = SlotCache(shape, torch.device("cuda"))
    cache.load_context(0, host.addresses, CONTEXT_LEN)
    steps = drifting_selections(24, batch)
    keys = torch.empty_like(steps[0])
    valid_len = torch.full((batch, NUM_KV_HEADS), TOP_K, dtype=torch.int32, device="cuda")
    context_ids = torch.zeros(batch, dtype=torch.int32, device="cuda")

    def run(decide_only: bool) -> None:
        for layer_idx in range(NUM_LAYERS):
            if decide_only:
                cache.look_up(layer_idx, keys, valid_len, context_ids)
            else:
                cache.fetch(layer_idx, keys, valid_len, context_ids)

    fetch_us = replay_us(capture(lambda: run(False)), steps, keys)
    seen = cache.statistics()
    cache.check()
    cache.clear_statistics()
    look_up_us = replay_us(capture(lambda: run(True)), steps, keys)
    moved_bytes = sum(layer.num_moved for layer in seen) * shape.row_bytes / NUM_LAYERS / len(steps)
    found = sum(layer.num_found for layer in seen) / sum(layer.num_selected for layer in seen)
    result = {
        "batch": batch,
        "num_slots": num_slots,
        "look_up_us": round(look_up_us / NUM_LAYERS, 2),
        "fetch_us": round(fetch_us / NUM_LAYERS, 2),
        "found_with_first_steps": round(found, 3),
        "moved_bytes_with_first_steps": int(moved_bytes),
    }
    print(f"{cache!r}: {result}", flush=True)
    return result


def drifting_selections(num_steps: int, batch: int) -> list[torch.Tensor]:
    """Per step kv_indices [batch, num_kv_heads, top_k]."""
    lasting = torch.randn(batch, NUM_KV_HEADS, CONTEXT_LEN, device="cuda")
    scores = [lasting + OVERLAP_NOISE * torch.randn_like(lasting) for _ in range(num_steps)]
    return [s.topk(TOP_K).indices.int().sort().values for s in scores]


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def graph_us(run: Callable[[], object], num_replays: int) -> float:
    """Median time of one captured run."""
    graph = capture(run)
    return statistics.median(time_us(graph.replay) for _ in range(num_replays))


def replay_us(graph: torch.cuda.CUDAGraph, steps: list[torch.Tensor], keys: torch.Tensor) -> float:
    """Median time of the later half of the steps."""
    times = []
    for step in steps:
        keys.copy_(step)
        times.append(time_us(graph.replay))
    return statistics.median(times[len(times) // 2 :])


def time_us(run: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


if __name__ == "__main__":
    main()
