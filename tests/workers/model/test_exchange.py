"""Kernels on several devices add up what each has, by words that they write into each other's memory."""

from itertools import product

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton, whose interpreter runs these kernels on a CPU, is not installed")

from tests.workers.model.step_ops import (
    DEVICE,
    EPS,
    assert_same_stream,
    copy_of,
    make_stream,
    randn,
    readers,
)
from workers.model.gpu.triton_ops import TritonOps
from workers.model.ops import Exchange
from workers.model.torch_ops import TorchOps


def words_of(x: Tensor, number: int) -> Tensor:
    """What a device writes into the inboxes of others: its numbers, and which sum they belong to."""
    return (number << 32) + (x.view(torch.int32).long() & 0xFFFFFFFF)


def make_exchanges(
    num_devices: int, batch_size: int, hidden_size: int, count: int = 0
) -> list[tuple[Exchange, Tensor]]:
    """One for each rank, with its inbox, as after `count` sums."""
    sizes = 2, num_devices, batch_size, hidden_size
    inboxes = [torch.zeros(sizes, dtype=torch.int64, device=DEVICE) for _ in range(num_devices)]
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], device=DEVICE)
    counts = [torch.full((batch_size,), count, dtype=torch.int32, device=DEVICE) for _ in inboxes]
    return [(Exchange(addresses, counts[rank], rank), inboxes[rank]) for rank in range(num_devices)]


@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize(("num_devices", "rank"), [(2, 0), (2, 1), (3, 1), (8, 7)])
@pytest.mark.parametrize(("batch_size", "hidden_size"), [(1, 63), (3, 100)])
def test_a_device_adds_in_the_order_of_ranks(batch_size, hidden_size, num_devices, rank, is_normed) -> None:
    """Two sums, of which the other devices have written theirs already."""
    exchanges = make_exchanges(num_devices, batch_size, hidden_size, count=2**31 - 2)
    exchange, inbox = exchanges[rank]
    norm = 1 + randn(hidden_size, scale=0.3) if is_normed else None
    for count in (2**31 - 1, -(2**31)):  # it goes on counting from there
        turn, read = count & 1, readers("both", hidden_size)
        parts = [randn(batch_size, hidden_size, scale=3.0) for _ in range(num_devices)]
        total = torch.zeros_like(parts[0])
        for part in parts:
            total += part
        for other in set(range(num_devices)) - {rank}:
            inbox[turn, other] = words_of(parts[other], count)
        got = make_stream(batch_size, hidden_size, torch.float32)
        want = copy_of(got)
        TritonOps(DEVICE).add_normed(parts[rank], norm, EPS, 0.5, 1.0, got, read, exchange)
        TorchOps().add_normed(total, norm, EPS, 0.5, 1.0, want, read)
        assert_same_stream(got, want, ahead=True)
        assert is_normed or torch.equal(got.hidden, want.hidden)
        assert (exchange.counts == count).all()
        for other in set(range(num_devices)) - {rank}:
            assert torch.equal(exchanges[other][1][turn, rank], words_of(parts[rank], count))
    for other, (_, memory) in enumerate(exchanges):  # and nothing else was written
        written = torch.zeros_like(memory, dtype=torch.bool)
        written[:, [rank] if other != rank else [x for x in range(num_devices) if x != rank]] = True
        assert not memory[~written].any()


@pytest.mark.gpu
@pytest.mark.parametrize("num_devices", [2, 4])
@pytest.mark.parametrize(("batch_size", "hidden_size"), [(1, 4096), (8, 100), (33, 576)])
def test_devices_wait_for_each_other(num_devices, batch_size, hidden_size) -> None:
    """As many streams of one GPU in their place: sums follow each other without a pause, and ranks begin in turn."""
    exchanges, num_sums = make_exchanges(num_devices, batch_size, hidden_size), 50
    parts = randn(num_sums, num_devices, batch_size, hidden_size)
    first, read = make_stream(batch_size, hidden_size, torch.float32), readers("one", hidden_size)
    held = [(torch.cuda.Stream(), TritonOps(DEVICE), copy_of(first)) for _ in range(num_devices)]
    # in one process, to load a kernel waits for those that run: each is loaded first, as it begins and as it goes on
    for number, (rank, (stream, ops, got)) in product(range(2), enumerate(held)):
        for other in set(range(num_devices)) - {rank}:
            exchanges[rank][1][(number + 1) % 2, other] = words_of(parts[number, other], number + 1)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            ops.add_normed(parts[number, rank], None, EPS, 1.0, 1.0, got, read, exchanges[rank][0])
        torch.cuda.synchronize()
    for number in range(2, num_sums):
        order = torch.randperm(num_devices).tolist()
        for rank in order:
            stream, ops, got = held[rank]
            with torch.cuda.stream(stream):
                ops.add_normed(parts[number, rank], None, EPS, 1.0, 1.0, got, read, exchanges[rank][0])
    torch.cuda.synchronize()
    want = first.hidden.clone()
    for of_sum in parts:
        total = torch.zeros_like(want)
        for part in of_sum:
            total += part
        want += total
    for _, _, got in held:
        assert torch.equal(got.hidden, want)
