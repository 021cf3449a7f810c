"""Chosen rows arrive whichever way they take, and no slot is used again while somebody still reads it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from offload.direct import DirectRows, direct_slot_bytes
from offload.errors import OffloadError
from offload.host_store import HostStore
from offload.pinned import PinnedRows
from offload.staging import StagedRows, StagingRing
from offload.transfer import CudaMachine, Transfer
from tests.offload.late_machine import LateMachine

NUM_LAYERS, NUM_KV_HEADS, CONTEXT_LEN, HEAD_DIM, TOP_K = 3, 2, 61, 8, 7
SLOT_BYTES = direct_slot_bytes(NUM_KV_HEADS, TOP_K, 2 * HEAD_DIM * 4)
NUM_CALLS = 11


def make_layers() -> list[Tensor]:
    return list(torch.randn(NUM_LAYERS, NUM_KV_HEADS, CONTEXT_LEN, 2, HEAD_DIM))


def num_wrong_reads(
    machine: LateMachine | CudaMachine,
    num_slots: int,
    top_k: int,
    layers: list[Tensor],
    read: Callable[[Tensor], Tensor],  # enqueues a reader on the current stream; returns what it will have seen
    finish: Callable[[], None],  # all readers
) -> int:
    ring = StagingRing(machine, num_slots, direct_slot_bytes(NUM_KV_HEADS, top_k, layers[0].shape[2:].numel() * 4))
    rows, store = StagedRows(layers, ring), HostStore(layers)
    seen, wanted = [], []
    for call in range(NUM_CALLS):
        kv_indices = torch.randint(layers[0].shape[1], (NUM_KV_HEADS, top_k))
        wanted.append(store.gather(call % NUM_LAYERS, kv_indices))
        transfer = rows.submit(call % NUM_LAYERS, kv_indices)
        seen.append(read(transfer.wait()))
        transfer.release()
    finish()
    return sum(not torch.equal(s.cpu(), w) for s, w in zip(seen, wanted, strict=True))


def late_wrong_reads(machine: LateMachine, num_slots: int) -> int:
    def read(rows: Tensor) -> Tensor:
        seen = torch.empty_like(rows)
        machine.compute.enqueue(lambda: seen.copy_(rows))
        return seen

    return num_wrong_reads(
        machine, num_slots, TOP_K, make_layers(), read, lambda: machine.compute.run_to(machine.compute.num_enqueued)
    )


@pytest.mark.parametrize("num_slots", [1, 2, 5])
def test_late_readers_see_their_own_rows(num_slots: int) -> None:
    assert late_wrong_reads(LateMachine(), num_slots) == 0


def test_without_the_hosts_wait_a_copy_reads_what_came_later() -> None:
    assert late_wrong_reads(LateMachine(host_is_careless=True), num_slots=2) > 0


def test_without_the_streams_wait_a_reader_sees_what_came_later() -> None:
    assert late_wrong_reads(LateMachine(stream_is_careless=True), num_slots=2) > 0


def test_a_ring_whose_rows_are_all_unread_gives_no_slot() -> None:
    ring = StagingRing(LateMachine(), 2, SLOT_BYTES)
    rows = StagedRows(make_layers(), ring)
    first, _ = (rows.submit(0, torch.zeros(NUM_KV_HEADS, 1).int()) for _ in range(2))
    assert repr(ring) == f"<StagingRing 2/2 slots of {SLOT_BYTES} bytes not released>"
    with pytest.raises(OffloadError, match="all 2 staging slots hold rows that are still to be read; release"):
        rows.submit(0, torch.zeros(NUM_KV_HEADS, 1).int())
    first.release()
    assert repr(ring) == f"<StagingRing 1/2 slots of {SLOT_BYTES} bytes not released>"
    rows.submit(0, torch.zeros(NUM_KV_HEADS, 1).int())


def test_more_rows_than_a_slot_holds_are_refused() -> None:
    rows = StagedRows(make_layers(), StagingRing(LateMachine(), 1, 100))
    with pytest.raises(OffloadError, match="896 bytes are to be staged at once and a slot holds 100"):
        rows.submit(0, torch.zeros(NUM_KV_HEADS, TOP_K).int())


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["staged", "direct"])
@pytest.mark.parametrize(("shape", "top_k"), [((2,), 7), ((4,), 1), ((3, 2), 60), ((3, 4), 0)])
def test_rows_of_both_ways_are_a_gathers(way: str, shape: tuple[int, ...], top_k: int) -> None:
    layers = make_layers()
    pinned = PinnedRows(layers)
    num_lists = torch.Size(shape).numel()
    ring = StagingRing(CudaMachine(torch.device("cuda")), 2, direct_slot_bytes(num_lists, top_k, 2 * HEAD_DIM * 4) + 1)
    rows = StagedRows(pinned.layers, ring) if way == "staged" else DirectRows(pinned, ring, num_lists)
    for layer_idx in (0, 2, 1, 2):
        kv_indices = torch.randint(-1, CONTEXT_LEN, (*shape, top_k))
        transfer = rows.submit(layer_idx, kv_indices)
        assert torch.equal(transfer.result().cpu(), HostStore(layers).gather(layer_idx, kv_indices))
        transfer.release()
    torch.cuda.synchronize()
    pinned.close()


class CarelessStream(torch.cuda.Stream):
    """Waits for no reader."""

    def wait_event(self, event: object) -> None:
        pass


class CarelessMachine(CudaMachine):
    def stream(self) -> torch.cuda.Stream:
        return CarelessStream(self.device)


def slow_wrong_reads(machine: CudaMachine) -> int:
    def read(rows: Tensor) -> Tensor:
        torch.cuda._sleep(4_000_000)  # cycles: about 2 ms, a copy takes some 20 microseconds
        return rows.clone()

    layers = list(torch.randn(NUM_LAYERS, NUM_KV_HEADS, 4096, 2, 64))
    return num_wrong_reads(machine, 2, 512, layers, read, torch.cuda.synchronize)


@pytest.mark.gpu
def test_slow_kernels_see_their_own_rows() -> None:
    assert slow_wrong_reads(CudaMachine(torch.device("cuda"))) == 0


@pytest.mark.gpu
def test_without_the_wait_slow_kernels_see_what_came_later() -> None:
    assert slow_wrong_reads(CarelessMachine(torch.device("cuda"))) > 0


def test_a_transfer_says_what_it_is_about() -> None:
    machine = LateMachine()
    transfer = StagedRows(make_layers(), StagingRing(machine, 1, SLOT_BYTES)).submit(0, torch.tensor([[3], [4]]))
    assert isinstance(transfer, Transfer) and transfer.read is None
    assert transfer.result().shape == (2, 1, 2, HEAD_DIM)
    transfer.release()
    assert transfer.read is not None
