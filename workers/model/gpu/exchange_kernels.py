"""How kernels on several GPUs sum what each of them has computed: by words that they write into each other's memory."""

import triton
import triton.language as tl


@triton.jit
def sum_over_devices(
    own,  # any block, float32; 0 outside
    at,  # places of its numbers among num_numbers
    inside,
    place,  # of the program in counts
    count,  # counts[place], loaded early: nothing else is to delay the words
    counts,  # int32: how many sums each program has taken part in
    inboxes,  # by rank, addresses of [2, NUM_DEVICES, num_numbers] int64
    num_numbers,
    RANK: tl.constexpr,
    NUM_DEVICES: tl.constexpr,
):
    """Return the sum of all devices' blocks, added in the order of their ranks, so with the same bits on each device.

    A word holds a number and, in its upper half, the count of its sum. Words of 8 bytes arrive whole, so a reader that
    sees the count has the number, and needs neither a flag nor a fence (NCCL's LL protocol). Two halves of an inbox
    take turns: a device writes to the same half two sums later, after it has read the sum in between, which its reader
    sent after it had read this one. Programs that wait do not keep out those they wait for: they are launched in order.
    """
    count += 1
    half = (count & 1) * NUM_DEVICES * num_numbers
    tag = count.to(tl.int64) << 32
    words = tag | (own.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
    for rank in tl.static_range(NUM_DEVICES):
        if rank != RANK:
            inbox = _address(inboxes[rank])
            tl.store(inbox + half + RANK * num_numbers + at, words, mask=inside)
    inbox = _address(inboxes[RANK]) + half
    total = tl.zeros_like(own)
    for rank in tl.static_range(NUM_DEVICES):
        if rank == RANK:
            total += own
        else:
            words = tl.load(inbox + rank * num_numbers + at, mask=inside, other=tag, volatile=True)
            while tl.max(((words >> 32).to(tl.int32) != count).to(tl.int32)) > 0:
                words = tl.load(inbox + rank * num_numbers + at, mask=inside, other=tag, volatile=True)
            total += words.to(tl.int32).to(tl.float32, bitcast=True)
    tl.debug_barrier()  # all threads have read the count
    tl.store(counts + place, count)
    return total


@triton.jit
def _address(number):
    """Return the pointer to that address. Triton's interpreter holds small ones, such as of a heap, in int32."""
    return number.to(tl.int64).to(tl.pointer_type(tl.int64))
