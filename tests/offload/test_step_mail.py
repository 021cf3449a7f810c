"""Rows that the device posts arrive with their flag, and selections that it waits for are fetched whole."""

import threading
from collections.abc import Callable

import pytest
import torch

from offload import step_mail
from offload.shared_memory import SharedMemory
from offload.step_mail import RowMail, SelectionMail, StepClock
from tests.cuda_on_cpu import emulated
from tests.cuda_on_cpu.emulated import DEVICE

WAIT_S = 60
NUM_HEADS, MAX_TOP_K = 3, 700


@pytest.fixture(autouse=True)
def kernels(emulator: emulated.Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.stand_in(monkeypatch, step_mail)


def make_clock(step: int) -> StepClock:
    clock = StepClock(10, DEVICE)
    for _ in range(step):
        clock.advance()
    return clock


def enqueue_in_thread(enqueue: Callable[[], None]) -> threading.Thread:
    """Enqueue in a thread a kernel that may wait: on a CPU, a launch returns only when its kernel ends."""

    def run() -> None:
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()  # gives the new thread a context, which the driver requires
        enqueue()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def join_and_synchronize(thread: threading.Thread) -> None:
    thread.join(WAIT_S)
    assert not thread.is_alive()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("row_shape", [(1,), (4, 128), (7, 91)])
def test_posted_rows_arrive_and_set_their_flags(row_shape: tuple[int, ...]) -> None:
    memory = SharedMemory(RowMail.num_bytes(3, row_shape, torch.float32), DEVICE)
    mail, rows = RowMail(3, row_shape, torch.float32, memory), torch.randn(3, *row_shape)
    join_and_synchronize(enqueue_in_thread(lambda: mail.post(rows.to(DEVICE), make_clock(2), flag_of_step=4)))
    assert torch.equal(mail.rows, rows)
    assert mail.flags.tolist() == [24, 24, 24]


def fill(mail: SelectionMail, row: int, width: int, lens: list[int]) -> torch.Tensor:
    """Write a row's selection with heads `width` apart, among valid-looking ids. Return what `fetch` should give."""
    mail.kv_indices[row] = 777
    want = torch.full((NUM_HEADS, MAX_TOP_K), -1, dtype=torch.int32)
    heads = mail.kv_indices[row, : NUM_HEADS * width].view(NUM_HEADS, width)
    for head, length in enumerate(lens):
        want[head, :length] = heads[head, :length] = torch.arange(length, dtype=torch.int32) * 2 + head
    mail.widths[row] = width
    mail.valid_len[row] = torch.tensor(lens)
    return want


def test_fetch_waits_only_for_rows_in_use() -> None:
    memory = SharedMemory(SelectionMail.num_bytes(3, NUM_HEADS, MAX_TOP_K), DEVICE)
    mail, clock = SelectionMail(3, NUM_HEADS, MAX_TOP_K, memory), make_clock(5)
    kv_indices = torch.full((3, NUM_HEADS, MAX_TOP_K), -777, dtype=torch.int32, device=DEVICE)
    valid_len = torch.full((3, NUM_HEADS), -777, dtype=torch.int32, device=DEVICE)
    context_ids = torch.tensor([0, -1, 1], dtype=torch.int32, device=DEVICE)
    mail.flags.fill_(52)  # the previous layer's flag
    waiting = enqueue_in_thread(lambda: mail.fetch(kv_indices, valid_len, context_ids, clock, flag_of_step=3))
    lens = [[MAX_TOP_K, 0, 1], [600, 512, 599]]
    want = [fill(mail, 0, MAX_TOP_K, lens[0]), fill(mail, 2, 600, lens[1])]
    mail.flags[0, :2] = mail.flags[2] = torch.tensor(54)  # a later flag is as good
    waiting.join(0.2)
    assert waiting.is_alive() or DEVICE.type == "cuda", "it did not wait for the last head"
    mail.flags[0, 2] = 53
    join_and_synchronize(waiting)
    assert valid_len.tolist() == [lens[0], [0, 0, 0], lens[1]]
    assert torch.equal(kv_indices[0].cpu(), want[0]) and torch.equal(kv_indices[2].cpu(), want[1])
    assert (kv_indices[1] == -1).all()


def test_rows_that_are_not_whole_words_are_refused() -> None:
    with pytest.raises(AssertionError, match="not words"):
        RowMail(1, (3,), torch.float16, SharedMemory(4096, DEVICE))
