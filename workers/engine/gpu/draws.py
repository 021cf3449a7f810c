"""Sampling on the device, where the logits are: one launch draws the tokens of all rows of a step (`draw.cu`)."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.cuda import CudaKernel, cuda_kernel
from workers.model.runner import StepOutput
from workers.serving.step_engine import Likelihood, StepRow

_SOURCE, _THREADS = Path(__file__).with_name("draw.cu"), 1024
MAX_TOP = 20  # most likely tokens that are reported, at most
_DRAW = np.dtype(
    [
        *(("top_p", "f8"), ("at", "f8"), ("temperature", "f4"), ("min_p", "f4"), ("penalty", "f4"), ("row", "i4")),
        *(("top_k", "i4"), ("num_top", "i4"), ("num_added", "i4")),
        *(("added_ids", "i4"), ("added", "i4"), ("repeated", "i4"), ("allowed", "i4"), ("unused", "i4")),
    ]
)
_SCORE = np.dtype(
    [
        *(("greatest", "f4"), ("total", "f4"), ("logit", "f4"), ("num_top", "i4")),
        *(("top_logits", "f4", MAX_TOP), ("top_ids", "i4", MAX_TOP)),
    ]
)


class DrawsOnDevice:
    """Owns memory for one step's draws, on host and device: their parameters, and how likely the tokens were."""

    def __init__(self, device: torch.device, max_rows: int) -> None:
        """If the device is the CPU, memory is not pinned and copies are synchronous."""
        if device.type == "cuda":
            _kernel()  # compiled before a token waits for it
        self._device = device
        self._records = _MirroredBuffer(device, max_rows * _DRAW.itemsize)
        self._scores = _MirroredBuffer(device, max_rows * _SCORE.itemsize)

    def enqueue(self, rows: Sequence[StepRow], output: StepOutput) -> None:
        """Enqueue the draws of rows that have one: they write `output.next_ids`, and change these rows' logits."""
        draws = [(number, row.draw) for number, row in enumerate(rows) if row.draw is not None]
        if not draws:
            return
        records, words, vocab_size = np.zeros(len(draws), _DRAW), _Words(), output.logits.shape[1]
        finding = [None if draw.allowed is None else draw.allowed(vocab_size) for _, draw in draws]
        for i, ((number, draw), found) in enumerate(zip(draws, finding, strict=True)):
            num_top = -1 if draw.num_top is None else min(draw.num_top, MAX_TOP)
            added = len(draw.added_ids), words.add(draw.added_ids), words.add(draw.added)
            masks = words.add_mask(draw.repeated), words.add_mask(None if found is None else found())
            numbers = draw.top_p, draw.at, draw.temperature, draw.min_p, draw.penalty
            records[i] = (*numbers, number, draw.top_k, num_top, *added, *masks, 0)
        sent = np.concatenate([part.view(np.uint8) for part in (records, *words.parts)])
        if len(sent) > len(self._records.on_host):
            self._records = _MirroredBuffer(self._device, 2 * len(sent))
        sent_records = self._records.send(sent)
        _kernel().launch(
            (len(draws), 1, 1),
            _THREADS,
            output.logits,
            output.logits.stride(0),
            vocab_size,
            sent_records,
            sent_records[records.nbytes :],
            output.next_ids,
            self._scores.on_device,
        )
        self._scores.fetch()

    def likelihoods(self, rows: Sequence[StepRow], next_ids: NDArray[np.int64]) -> list[Likelihood | None]:
        """Return how likely the drawn tokens were, for rows that ask and have a token. The draws must be done."""
        scores, likelihoods = iter(self._scores.on_host.numpy().view(_SCORE)), list[Likelihood | None]()
        for row, next_id in zip(rows, next_ids, strict=True):
            if row.draw is None:
                likelihoods.append(None)
                continue
            score = next(scores)
            likelihoods.append(_likelihood(score) if row.draw.num_top is not None and next_id >= 0 else None)
        return likelihoods


class _Words:
    """Arrays of 32-bit words that will be concatenated. Each is identified by its offset in words."""

    def __init__(self) -> None:
        self.parts: list[NDArray[Any]] = []
        self._num_words = 0

    def add(self, words: NDArray[Any]) -> int:
        at, self._num_words = self._num_words, self._num_words + len(words)
        self.parts.append(words)
        return at

    def add_mask(self, mask: NDArray[np.bool_] | None) -> int:
        """Add a mask as a bit for each entry. Return its offset, or -1 for no mask."""
        if mask is None:
            return -1
        bits = np.packbits(mask, bitorder="little")
        return self.add(np.concatenate([bits, np.zeros(-len(bits) % 4, np.uint8)]).view(np.uint32))


class _MirroredBuffer:
    """A buffer on the device, and one of the same size in pinned host memory."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self.on_device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.on_host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def send(self, data: NDArray[np.uint8]) -> Tensor:
        """Begin to copy data to the device. Nothing else may be sent before the copy is done."""
        self.on_host.numpy()[: len(data)] = data
        return self.on_device[: len(data)].copy_(self.on_host[: len(data)], non_blocking=True)

    def fetch(self) -> None:
        self.on_host.copy_(self.on_device, non_blocking=True)


def _kernel() -> CudaKernel:
    return cuda_kernel(_SOURCE, "draw", {"THREADS": _THREADS, "MAX_TOP": MAX_TOP})


def _likelihood(score: np.void) -> Likelihood:
    num_top = int(score["num_top"])
    top = tuple(zip(score["top_ids"][:num_top].tolist(), score["top_logits"][:num_top].tolist(), strict=True))
    return Likelihood(float(score["logit"]), float(score["greatest"]) + math.log(score["total"]), top)
