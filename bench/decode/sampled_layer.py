"""A layer of contexts in host memory, hashed by MagicPIG, and attention to the rows that queries sample."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.decode.sampled_kernels import (
    ARGUMENTS,
    NUM_PARTS,
    RANGE_WORDS,
    STEPS,
    WORD,
    attend_stage,
    count_collisions_stage,
    join_stage,
)
from csattn.cpu.addresses import array_at
from csattn.cpu.arguments import words_of
from csattn.cpu.jit import exact_kernel
from csattn.cpu.tape import Tape
from csattn.cpu.team import Team
from csattn.cpus import available_cpus
from csattn.selectors.base import ContextView
from csattn.selectors.magicpig import hash_codes, make_projections, sampling_probability
from offload.host_memory import copy_rows

KEYS_PER_BLOCK = 2048
LEAST_NORM = 1e-8
READ_BYTES = 1 << 18  # of a piece
MOST_BYTES = 1 << 30  # far more than any cache


@dataclass(frozen=True, slots=True)
class Tables:
    """Size of the hash tables, as published."""

    num_bits: int  # K
    number: int  # L, at most 255 * NUM_PARTS


@dataclass(frozen=True, slots=True)
class HashedLayer:
    """A layer of one context and its hash tables, in host memory."""

    tables: Tables
    kv: Tensor  # [num_kv_heads, context_len, 2, head_dim] bfloat16
    norms: Tensor  # [num_kv_heads, context_len] float32: 1 / |key - mean key|
    rows: Tensor  # [num_kv_heads, num_tables, context_len] int32: see `PreparedMagicpig`
    starts: Tensor  # [num_kv_heads, num_tables, 2**num_bits + 1] int32
    key_mean: Tensor  # [num_kv_heads, head_dim] float32
    projections: Tensor

    @property
    def arrays(self) -> list[Tensor]:
        """The arrays that a step reads."""
        return [self.kv, self.norms, self.rows, self.starts]


def hash_layer(rows: Tensor, tables: Tables) -> HashedLayer:
    """Hash keys on the device where they are, and make their tables on all CPUs.

    rows: [num_kv_heads, context_len, 2, head_dim].
    """
    num_kv_heads, context_len, _, head_dim = rows.shape
    projections = make_projections(head_dim, tables.num_bits, tables.number)
    there = projections.to(rows.device)
    mean = rows[:, :, 0].float().mean(1, keepdim=True)
    codes = torch.empty(num_kv_heads, tables.number, context_len, dtype=torch.int16)
    norms = torch.empty(num_kv_heads, context_len)
    for first in range(0, context_len, KEYS_PER_BLOCK):
        block = slice(first, first + KEYS_PER_BLOCK)
        keys = rows[:, block, 0].float() - mean
        codes[:, :, block] = hash_codes(keys, there, tables.number).transpose(1, 2).contiguous().cpu()
        norms[:, block] = keys.norm(dim=2).clamp_min(LEAST_NORM).reciprocal().cpu()
    starts = torch.empty(num_kv_heads, tables.number, (1 << tables.num_bits) + 1, dtype=torch.int32)
    filed = torch.empty(codes.shape, dtype=torch.int32)
    with ThreadPoolExecutor(available_cpus()) as threads:
        each = (array.flatten(0, 1).numpy() for array in (codes, starts, filed))
        list(threads.map(file_rows, *each))
    return HashedLayer(tables, rows.bfloat16().cpu(), norms, filed, starts, mean[:, 0].cpu(), projections)


@exact_kernel
def file_rows(codes: NDArray[np.int16], starts: NDArray[np.int32], rows: NDArray[np.int32]) -> None:
    """Fill a hash table by counting sort: rows by code, then ascending; code c has rows[starts[c] : starts[c + 1]].

    codes: [context_len], from 0; starts: [num_codes + 1] and rows: [context_len], written.
    """
    starts[:] = 0
    for code in codes:
        starts[code + 1] += 1
    for code in range(1, len(starts)):
        starts[code] += starts[code - 1]
    free = starts.copy()
    for row in range(len(codes)):
        rows[free[codes[row]]] = row
        free[codes[row]] += 1


class SampledAttention:
    """Attention of a batch to the rows that it samples in a layer, except sinks and window, by all threads of a team.

    After `attend`: out [batch_size, num_q_heads, head_dim] and lse [batch_size, num_q_heads], float32; lse is -inf, and
    out zeros, where a head samples nothing.
    """

    def __init__(
        self, team: Team, layer: HashedLayer, num_contexts: int, batch_size: int, num_q_heads: int, view: ContextView
    ) -> None:
        """num_contexts: copies of the layer, each in its own memory; request i continues copy i % num_contexts."""
        assert layer.tables.number <= 255 * NUM_PARTS, "a byte counts no further"
        num_kv_heads, context_len, _, head_dim = layer.kv.shape
        self._team, self._layer, self._scale = team, layer, view.softmax_scale
        self.contexts = [copy_rows(layer.arrays) for _ in range(num_contexts)]
        addresses = [np.array([array.data_ptr() for array in arrays]) for arrays in zip(*self.contexts, strict=True)]
        num_words, heads = -(-context_len // WORD), batch_size * num_q_heads
        num_ranges = -(-num_words // RANGE_WORDS)
        self.out = torch.empty(batch_size, num_q_heads, head_dim)
        self.lse = torch.empty(batch_size, num_q_heads)
        self._q = torch.empty(batch_size, num_q_heads, head_dim)
        self._codes = torch.empty(batch_size, num_q_heads, layer.tables.number, dtype=torch.int16)
        self._to_cosines = torch.empty(batch_size, num_q_heads, 2)
        self._entries_read = np.zeros(heads * NUM_PARTS, np.int64)
        self._rows_read = np.zeros(batch_size * num_kv_heads * num_ranges, np.int64)
        values = {
            "num_contexts": num_contexts,
            "num_kv_heads": num_kv_heads,
            "group_size": num_q_heads // num_kv_heads,
            "head_dim": head_dim,
            "context_len": context_len,
            "first": view.middle.start,
            "stop": view.middle.stop,
            "num_tables": layer.tables.number,
            "num_codes": 1 << layer.tables.num_bits,
            **dict(zip(("kvs", "norms", "rows", "starts"), addresses, strict=True)),
            "q": self._q,
            "codes": self._codes,
            "to_cosines": self._to_cosines,
            "softmax_scale": np.array([view.softmax_scale]),
            "log_weights": log_weights(layer.tables),
            "counters": np.zeros((team.num_threads, num_words * WORD), np.uint8),
            "collision_bits": np.empty((heads, NUM_PARTS, 2, num_words), np.uint64),
            "num_ranges": num_ranges,
            "parts": np.empty((heads, num_ranges, head_dim + 2), np.float32),
            "entries_read": self._entries_read,
            "rows_read": self._rows_read,
            "out": self.out,
            "lse": self.lse,
        }
        self._values = values  # keeps alive what the stages read
        arguments = words_of(ARGUMENTS, values)
        self._tape = Tape()
        self._tape.add(count_collisions_stage, arguments, len(self._entries_read))
        self._tape.add(attend_stage, arguments, len(self._rows_read))
        self._tape.add(join_stage, arguments, heads)

    def hash_queries(self, q: Tensor) -> None:
        """Hash queries for the next `attend`. q: [batch_size, num_q_heads, head_dim]."""
        q, means = q.float().cpu(), self._layer.key_mean
        group_size = q.shape[1] // len(means)
        self._q.copy_(q)
        self._codes.copy_(hash_codes(q, self._layer.projections, self._layer.tables.number))
        self._to_cosines[..., 0] = self._scale * (q * means.repeat_interleave(group_size, 0)).sum(-1)
        self._to_cosines[..., 1] = 1 / (self._scale * q.norm(dim=-1)).clamp_min(LEAST_NORM)

    def attend(self) -> None:
        self._team.run(self._tape)

    @property
    def num_rows(self) -> int:
        """Rows that the last `attend` read, of all requests and KV heads. Rows that a group shares count once."""
        return int(self._rows_read.sum())

    @property
    def num_bucket_entries(self) -> int:
        """Bucket entries that the last `attend` read."""
        return int(self._entries_read.sum())


class OtherLayers:
    """Memory that is read between two steps of a layer, in place of the other layers of a step."""

    def __init__(self, team: Team) -> None:
        self._team, self._memory = team, np.ones(MOST_BYTES, np.uint8)
        self._tape = Tape()
        self._tape.add(read_stage, np.array([self._memory.ctypes.data]))

    def read(self, num_bytes: int) -> None:
        """Read about so many bytes, at most MOST_BYTES, after which no cache holds anything else."""
        self._tape.pieces[0] = min(num_bytes, MOST_BYTES) // READ_BYTES
        self._team.run(self._tape)


def read_stage(arguments: int, piece: int, thread: int, unused: int) -> int:
    """Read a piece of READ_BYTES. Returns its sum, to which every byte contributes. arguments: the memory's address."""
    memory = array_at(array_at(arguments, 1, np.int64(0))[0] + piece * READ_BYTES, READ_BYTES // 8, np.int64(0))
    return memory.sum()


def log_weights(tables: Tables) -> Tensor:
    """Return what is added to a logit, at each 1 - cosine in steps of 2 / STEPS: [STEPS + 2] float32.

    Linear interpolation is within 1e-6, except near a cosine of -1, where nothing is sampled.
    """
    distances = torch.arange(STEPS + 2, dtype=torch.float64) * 2 / STEPS
    return -sampling_probability(1 - distances, tables.num_bits, tables.number).log().float()
