"""Direct or staged: which way of moving chosen rows is faster on this machine, found by trying both at start-up."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.direct import DirectRows, direct_slot_bytes
from offload.pinned import PinnedRows
from offload.staging import StagedRows, StagingRing
from offload.transfer import CudaMachine, Transfer

_NUM_CALLS = 4  # timed together, so that the CPU's part of one overlaps the link's part of another
_CLEARLY_FASTER = 1.1  # staging keeps the CPU busy, so it has to be worth it


@dataclass(frozen=True, slots=True)
class Calibration:
    """Rates of moving one layer's selection to the device, in bytes of rows over time."""

    link_gbps: float  # one large copy of pinned memory
    direct_gbps: float | None  # None: the rows are not pinned
    staged_gbps: float
    chosen: str  # "direct" or "staged"
    reason: str

    def __str__(self) -> str:
        direct = "not possible" if self.direct_gbps is None else f"{self.direct_gbps:.1f} GB/s"
        return (
            f"{self.chosen}: {self.reason} (link {self.link_gbps:.1f} GB/s, direct {direct}, "
            f"staged {self.staged_gbps:.1f} GB/s)"
        )


def calibrate(rows: PinnedRows, top_k: int, device: torch.device) -> Calibration:
    """Move random selections of a context's rows both ways; takes some tens of milliseconds."""
    kv = rows.layers[0]
    num_kv_heads, context_len = kv.shape[:2]
    top_k = min(top_k, context_len)
    row_bytes = kv.shape[2:].numel() * kv.itemsize
    machine = CudaMachine(device)
    ring = StagingRing(machine, num_slots=2, slot_bytes=direct_slot_bytes(num_kv_heads, top_k, row_bytes))
    keys = [torch.randint(context_len, (num_kv_heads, top_k)).sort().values for _ in range(_NUM_CALLS)]
    rates = {"staged": _rate_gbps(StagedRows(rows.layers, ring).submit, len(rows.layers), keys, row_bytes)}
    if rows.pinned:
        direct = DirectRows(rows, ring, max_lists=num_kv_heads)
        rates["direct"] = _rate_gbps(direct.submit, len(rows.layers), keys, row_bytes)
    chosen, reason = choose(rates.get("direct"), rates["staged"], rows.how)
    return Calibration(_link_gbps(ring), rates.get("direct"), rates["staged"], chosen, reason)


def choose(direct_gbps: float | None, staged_gbps: float, how_pinned: str) -> tuple[str, str]:
    """The way to take, and why."""
    if direct_gbps is None:
        return "staged", f"the device cannot read the context's rows ({how_pinned})"
    if staged_gbps > _CLEARLY_FASTER * direct_gbps:
        return "staged", f"gathering by the CPU is {staged_gbps / direct_gbps:.2f} times as fast"
    return "direct", "the device reads the rows about as fast or faster, and leaves the CPU free"


def _rate_gbps(submit: Callable[[int, Tensor], Transfer], num_layers: int, keys: list[Tensor], row_bytes: int) -> float:
    def move(layer_idx: int, kv_indices: Tensor) -> Transfer:
        transfer = submit(layer_idx % num_layers, kv_indices)
        transfer.release()
        return transfer

    move(0, keys[0]).result()
    started = time.perf_counter()
    transfers = [move(layer_idx, kv_indices) for layer_idx, kv_indices in enumerate(keys)]
    transfers[-1].result()
    seconds = time.perf_counter() - started
    return sum(kv_indices.numel() for kv_indices in keys) * row_bytes / seconds / 1e9


def _link_gbps(ring: StagingRing) -> float:
    slot = ring.next()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(_NUM_CALLS):
        slot.device.copy_(slot.host, non_blocking=True)
    torch.cuda.synchronize()
    return _NUM_CALLS * ring.slot_bytes / (time.perf_counter() - started) / 1e9
