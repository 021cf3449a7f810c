"""Kernels on several devices sum their partial results by writing words into each other's memory."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton, whose interpreter runs these kernels on a CPU, is not installed")

from csattn.models.weights import Linear
from tests.workers.model.step_ops import (
    DEVICE,
    EPS,
    assert_same_stream,
    copy_of,
    make_linear,
    make_stream,
    randn,
    readers,
)
from workers.model.gpu.triton_ops import TritonOps
from workers.model.ops import Exchange, Normed, Readers, Stream
from workers.model.torch_ops import TorchOps

NUM_IN = 40
WAYS = ["rows", "tiles"]  # a kernel that adds rows, and a product that adds its tiles


def words_of(x: Tensor, count: int) -> Tensor:
    """Return the words that a device writes into the others' inboxes: the sum's count (high half) and a float32."""
    return (count << 32) + (x.view(torch.int32).long() & 0xFFFFFFFF)


def make_exchanges(num_devices: int, batch_size: int, hidden_size: int, count: int = 0) -> list[Exchange]:
    """Make each rank's exchange and its inbox, in the state after `count` sums."""
    sizes = 2, num_devices, batch_size, hidden_size
    inboxes = [torch.zeros(sizes, dtype=torch.int64, device=DEVICE) for _ in range(num_devices)]
    addresses = tuple(inbox.data_ptr() for inbox in inboxes)
    counts = [torch.full((hidden_size,), count, dtype=torch.int32, device=DEVICE) for _ in inboxes]
    return [Exchange(inboxes[rank], addresses, counts[rank], rank) for rank in range(num_devices)]


def make_parts(
    batch_size: int, hidden_size: int, num_devices: int, way: str
) -> list[tuple[Tensor, Linear | None, Tensor]]:
    """Make each rank's input, its weights if it adds a product, and the numbers that it adds."""
    if way == "rows":
        return [(x, None, x) for x in (randn(batch_size, hidden_size, scale=3.0) for _ in range(num_devices))]
    parts: list[tuple[Tensor, Linear | None, Tensor]] = []
    for rank in range(num_devices):
        x, linear = randn(batch_size, NUM_IN), make_linear(hidden_size, NUM_IN, torch.float32, bias=rank == 0)
        products = torch.zeros(batch_size, hidden_size, device=DEVICE)
        TritonOps(DEVICE, EPS).linear(Normed(x), [linear], products)
        parts.append((x, linear, products))
    return parts


def add(
    ops: TritonOps, part: tuple[Tensor, Linear | None, Tensor], norm: Tensor | None, to: Stream, read: Readers
) -> None:
    x, linear, _ = part
    if linear is None:
        ops.add_normed(x, norm, 0.5, 1.0, to, read)
    else:
        ops.linear_add(x, linear, 0.5, to, read)


def in_order(parts: list[tuple[Tensor, Linear | None, Tensor]]) -> Tensor:
    total = torch.zeros_like(parts[0][2])
    for _, _, numbers in parts:
        total += numbers
    return total


@pytest.mark.parametrize(("way", "is_normed"), [("rows", False), ("rows", True), ("tiles", False)])
@pytest.mark.parametrize(("num_devices", "rank"), [(2, 0), (2, 1), (3, 1), (8, 7)])
@pytest.mark.parametrize(("batch_size", "hidden_size"), [(1, 63), (3, 100), (2, 1100)])
def test_a_device_adds_partial_sums_in_the_order_of_ranks(
    batch_size, hidden_size, num_devices, rank, way, is_normed
) -> None:
    """Make two sums; the other devices' words are already in the inbox."""
    exchanges = make_exchanges(num_devices, batch_size, hidden_size, count=2**31 - 2)
    exchange = exchanges[rank]
    inbox = exchange.inbox
    others = set(range(num_devices)) - {rank}
    norm = 1 + randn(hidden_size, scale=0.3) if is_normed else None
    columns = 64 if way == "tiles" else hidden_size if is_normed else 1024
    num_programs = -(-hidden_size // columns) * (1 if way == "tiles" else batch_size)
    for count in (2**31 - 1, -(2**31)):  # the count wraps around
        half, read = count & 1, readers("both", hidden_size)
        parts = make_parts(batch_size, hidden_size, num_devices, way)
        for other in others:
            inbox[half, other] = words_of(parts[other][2], count)
        got = make_stream(batch_size, hidden_size, torch.float32)
        want = copy_of(got)
        add(TritonOps(DEVICE, EPS), parts[rank], norm, replace(got, row_sums=exchange, tile_sums=exchange), read)
        TorchOps(EPS).add_normed(in_order(parts), norm, 0.5, 1.0, want, read)
        assert_same_stream(got, want, ahead=True)
        assert is_normed or torch.equal(got.hidden, want.hidden)
        assert (exchange.counts[:num_programs] == count).all()
        for other in others:
            assert torch.equal(exchanges[other].inbox[half, rank], words_of(parts[rank][2], count))
    for other, memory in enumerate(exchange.inbox for exchange in exchanges):  # nothing else was written
        written = torch.zeros_like(memory, dtype=torch.bool)
        written[:, list(others) if other == rank else [rank]] = True
        assert not memory[~written].any()


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("num_devices", "batch_size", "hidden_size"), [(2, 1, 4096), (4, 8, 100), (4, 33, 576)])
def test_devices_wait_for_each_others_partial_sums(num_devices, batch_size, hidden_size, way) -> None:
    """CUDA streams of one GPU stand for devices. Sums follow each other without a pause, with ranks in random order."""
    exchanges, num_sums = make_exchanges(num_devices, batch_size, hidden_size), 50
    parts = [make_parts(batch_size, hidden_size, num_devices, way) for _ in range(num_sums)]
    first, read = make_stream(batch_size, hidden_size, torch.float32), readers("one", hidden_size)
    held = [
        (torch.cuda.Stream(), TritonOps(DEVICE, EPS), replace(copy_of(first), row_sums=exchange, tile_sums=exchange))
        for exchange in exchanges
    ]
    # In one process, loading a kernel waits for running ones: load both variants before any kernel waits for another.
    for number, (rank, (stream, ops, to)) in product(range(2), enumerate(held)):
        for other in set(range(num_devices)) - {rank}:
            exchanges[rank].inbox[(number + 1) % 2, other] = words_of(parts[number][other][2], number + 1)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            add(ops, parts[number][rank], None, to, read)
        torch.cuda.synchronize()
    for number in range(2, num_sums):
        for rank in torch.randperm(num_devices).tolist():
            stream, ops, to = held[rank]
            with torch.cuda.stream(stream):
                add(ops, parts[number][rank], None, to, read)
    torch.cuda.synchronize()
    want = first.hidden.clone()
    for of_sum in parts:
        want += 0.5 * in_order(of_sum)
    for _, _, got in held:
        assert torch.equal(got.hidden, want)
