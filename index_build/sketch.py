"""The sketch of one layer's keys. Definition: `csattn.sketch.reference`.

Sums over the rows are taken block by block in float64, where the rows are. Only eigenvectors are found on the CPU, by
many threads: at such small matrices that is faster than a GPU. On a CPU each head has a thread of its own, because a
library's sums depend on the number of threads and on how many heads it is given at once.

From the same transform every device makes the same codes; transforms agree up to rounding.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from csattn.config import SketchConfig
from csattn.sketch.codes import BLOCK_KEYS, COARSE_BITS, FINE_BITS, coord_bits, num_blocks, pack_codes
from csattn.sketch.reference import (
    KEY_BITS,
    LEAST_KEY_ENERGY,
    LEAST_QUERY_ENERGY,
    NORMAL_STEP,
    RIDGE,
    STEP_MULTIPLES,
    STEP_SAMPLES,
    TRANSFORM_BITS,
)

# of a head, held in float64 at a time: on a CPU its cache's worth; so few that sums of codes' products fit a float32
_BLOCK_ROWS, _BLOCK_ROWS_ON_GPU = 2**10, 2**15
_QUERIES_PER_DIM = 64  # of a KV head's queries so many for each dimension, evenly spaced; more change nothing

Map = Callable[..., Any]  # the builtin, or a pool's


@dataclass(frozen=True, slots=True)
class KeyTransforms:
    """Of each head's rows in each segment, on the device of the rows; see `csattn.sketch.reference.Transform`."""

    key_mean: Tensor  # [num_heads, num_segments, head_dim] float32
    key_exponent: Tensor  # [num_heads, num_segments] int64
    key_transform: Tensor  # [num_heads, num_segments, head_dim, num_coords] float32
    query_transform: Tensor  # [num_heads, num_segments, head_dim, num_coords] float16


def sketch_arrays(
    q: Tensor,  # [num_q_heads, context_len, head_dim], after RoPE
    kv: Tensor,  # [num_kv_heads, context_len, 2, head_dim]
    config: SketchConfig,
    threads: Executor,  # for what runs on the CPU
    segment_starts: Sequence[int] | None = None,  # as the configuration has them unless said
) -> dict[str, Tensor]:
    """The arrays of `SketchIndex` that every head has its part of, by name, on the device of q and kv."""
    num_heads, context_len, _, head_dim = kv.shape
    queries = q.reshape(num_heads, -1, head_dim)
    starts = config.segment_starts(context_len) if segment_starts is None else segment_starts
    words = config.words(head_dim)
    with _one_thread():
        if kv.is_cuda:
            return _sketch_heads(queries, kv, words, starts, threads.map)
        heads = torch.split(queries, 1), torch.split(kv, 1)
        made = list(threads.map(lambda q, kv: _sketch_heads(q, kv, words, starts, map), *heads))
    return {name: torch.cat([of_head[name] for of_head in made]) for name in made[0]}


@torch.inference_mode()
def _sketch_heads(
    queries: Tensor,  # [num_heads, num_queries, head_dim]
    kv: Tensor,
    words: tuple[int, int],
    segment_starts: Sequence[int],
    side_by_side: Map,
) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    bits = torch.from_numpy(coord_bits(*words)).to(kv.device)
    k, v = kv[:, :, 0], kv[:, :, 1]
    made = fit_keys(k, segment_starts, fit_queries(queries, side_by_side), bits, side_by_side)
    codes = encode(k, segment_starts, made, bits)
    value_mean, value_transform = fit_values(codes, v, segment_starts, bits)
    arrays = {
        "codes": pack(codes, *words),
        "key_mean": made.key_mean,
        "query_transform": made.query_transform,
        "value_mean": value_mean,
        "value_transform": value_transform,
    }
    return {name: array.contiguous() for name, array in arrays.items()}  # searches take their addresses


def fit_queries(queries: Tensor, side_by_side: Map = map) -> tuple[Tensor, Tensor]:
    """The root of the mean of q q^T over unit queries, and its inverse: [num_heads, head_dim, head_dim] float64."""
    queries = queries[:, :: -(-queries.shape[1] // (_QUERIES_PER_DIM * queries.shape[2]))]
    total = _zeros(queries, queries.shape[2], queries.shape[2])
    for rows in _blocks(queries):
        wide = queries[:, rows].double()
        norm = wide.square().sum(2, keepdim=True).sqrt()
        unit = wide.mul_(torch.where(norm > 0, 1.0 / norm, 0.0))
        total += unit.mT @ unit
    energy, directions = _eigh(total / queries.shape[1], side_by_side)
    greatest = energy[:, -1:]
    root = torch.where(greatest > 0, energy.maximum(LEAST_QUERY_ENERGY * greatest), 1.0).sqrt()[:, None]
    return directions * root @ directions.mT, directions / root @ directions.mT


def fit_keys(
    k: Tensor,  # [num_heads, context_len, head_dim]
    segment_starts: Sequence[int],  # each with at least one row
    metric: tuple[Tensor, Tensor],  # of `fit_queries`
    bits: Tensor,  # [num_coords] int64
    side_by_side: Map = map,
) -> KeyTransforms:
    """Which coordinates are kept of these keys, and their steps."""
    segments = [k[:, rows] for rows in _segments(segment_starts, k)]
    mean, covariance, largest = (torch.stack(of, dim=1) for of in zip(*map(_moments, segments), strict=True))
    root, inverse = (array[:, None] for array in metric)
    energy, basis = _eigh(root @ covariance @ root, side_by_side)
    energy, basis = energy.flip(2)[:, :, : len(bits)], basis.flip(3)[:, :, :, : len(bits)]
    deviation = torch.where(energy > LEAST_KEY_ENERGY * energy[:, :, :1], energy, 0.0).clamp_min(0.0).sqrt()
    forward, steps = root @ basis, []
    for number, rows in enumerate(segments):
        samples = rows[:, :: -(-rows.shape[1] // STEP_SAMPLES)].double().sub_(mean[:, None, number])
        steps.append(_best_steps(samples @ forward[:, number], deviation[:, number], bits))
    step = torch.stack(steps, dim=1)[:, :, None]
    columns = torch.where(step > 0, forward / torch.where(step > 0, step, 1.0), 0.0)
    return KeyTransforms(
        mean.float(), _exponent(largest), _in_fixed_point(columns), (inverse @ basis * (step / 2)).half()
    )


def encode(k: Tensor, segment_starts: Sequence[int], made: KeyTransforms, bits: Tensor) -> Tensor:
    """Codes [num_heads, context_len, num_coords] uint8 on the device of k: to the bit those of the reference."""
    per_unit = _power_of_two(KEY_BITS - made.key_exponent)[:, :, None, None]
    mean, transform = made.key_mean.double()[:, :, None], made.key_transform / per_unit
    half = (1 << bits - 1).double()
    codes = torch.empty(*k.shape[:2], len(bits), dtype=torch.uint8, device=k.device)
    for number, segment in enumerate(_segments(segment_starts, k)):
        for rows in _blocks(k, segment):
            whole = k[:, rows].double().sub_(mean[:, number]).mul_(per_unit[:, number]).round_()
            steps = (whole.clamp_(-(2.0**KEY_BITS), 2.0**KEY_BITS) @ transform[:, number]).floor_()
            codes[:, rows] = steps.clamp_(-half, half - 1).add_(half)
    return codes


def fit_values(codes: Tensor, v: Tensor, segment_starts: Sequence[int], bits: Tensor) -> tuple[Tensor, Tensor]:
    """Linear regression of values on codes, segment by segment; see `Transform` of the reference.

    codes: of `encode`. v: [num_heads, context_len, head_dim]. value_mean [num_heads, num_segments, head_dim] float32;
    value_transform [num_heads, num_segments, num_coords, head_dim] float16.
    """
    segments, largest = _segments(segment_starts, v), ((1 << bits) - 1).float()
    sums = (_value_sums(codes[:, rows], v[:, rows], largest) for rows in segments)
    c_total, v_total, gram, cross = (torch.stack(of, dim=1) for of in zip(*sums, strict=True))
    num_rows = torch.tensor([rows.stop - rows.start for rows in segments], device=v.device)[None, :, None, None]
    c_mean, v_mean = c_total[:, :, None] / num_rows, v_total[:, :, None] / num_rows
    gram, cross = gram / num_rows - c_mean.mT @ c_mean, cross / num_rows - c_mean.mT @ v_mean
    variance = gram.diagonal(dim1=2, dim2=3)[..., None]
    ridge = RIDGE * variance.mean(2, keepdim=True) + 1e-9
    matrix = torch.linalg.solve(gram + ridge * torch.eye(len(bits), dtype=gram.dtype, device=v.device), cross)
    fine = (bits == FINE_BITS).double()
    scaled = matrix * torch.where(fine[:, None] > 0, 1.0, variance)
    return (v_mean - fine * c_mean @ matrix)[:, :, 0].float(), scaled.half()


def pack(codes: Tensor, num_fine: int, num_coarse: int) -> Tensor:
    """`pack_codes` in torch: [num_heads, num_blocks, num_fine + num_coarse, BLOCK_KEYS] uint32.

    A word is the sum of its codes times powers of two, which float64 holds exactly; a code of 1 tells its power.
    """
    num_heads, num_rows, num_coords = codes.shape
    ones = pack_codes(np.eye(num_coords, dtype=np.uint8), num_fine, num_coarse).swapaxes(1, 2)
    powers = torch.from_numpy(ones.reshape(-1, num_fine + num_coarse)[:num_coords].astype(np.float64)).to(codes.device)
    size = num_heads, num_blocks(num_rows) * BLOCK_KEYS, num_fine + num_coarse
    words = torch.zeros(size, dtype=torch.int64, device=codes.device)
    for rows in _blocks(codes):
        words[:, rows][:, : num_rows - rows.start] = (codes[:, rows].double() @ powers).long()
    by_block = words.view(num_heads, -1, BLOCK_KEYS, num_fine + num_coarse).mT
    return by_block.to(torch.int32).contiguous().view(torch.uint32)


@contextmanager
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _segments(starts: Sequence[int], rows: Tensor) -> list[slice]:
    """Of rows [num_heads, num_rows, ...]."""
    return [slice(start, stop) for start, stop in pairwise((*starts, rows.shape[1]))]


def _blocks(rows: Tensor, within: slice | None = None) -> Iterator[slice]:
    """The rows [num_heads, num_rows, ...] in blocks, in order; those of a segment, or all."""
    within = within or slice(0, rows.shape[1])
    size = _BLOCK_ROWS_ON_GPU if rows.is_cuda else _BLOCK_ROWS
    return (slice(start, min(start + size, within.stop)) for start in range(within.start, within.stop, size))


def _zeros(like: Tensor, *shape: int) -> Tensor:
    return torch.zeros(len(like), *shape, dtype=torch.float64, device=like.device)


def _eigh(matrices: Tensor, side_by_side: Map) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and eigenvectors of symmetric matrices [..., n, n], found on the CPU."""

    def alone(matrix: Tensor) -> tuple[Tensor, Tensor]:
        torch.set_num_threads(1)
        values, vectors = torch.linalg.eigh(matrix)
        return values, vectors

    found = side_by_side(alone, matrices.flatten(0, -3).cpu())
    values, vectors = (torch.stack(of).to(matrices.device) for of in zip(*found, strict=True))
    return values.view(matrices.shape[:-1]), vectors.view(matrices.shape)


def _exponent(x: Tensor) -> Tensor:
    """Of the least power of two that is not below x; 0 where x is 0."""
    mantissa, exponent = torch.frexp(x)
    return exponent.long() - (mantissa == 0.5).long()


def _power_of_two(exponent: Tensor) -> Tensor:
    """In float64, by its bits: what a GPU computes may be off in the last."""
    return (exponent + 1023 << 52).view(torch.float64)


def _in_fixed_point(columns: Tensor) -> Tensor:
    """`csattn.sketch.reference.in_fixed_point` of many matrices [..., head_dim, num_coords]."""
    unit = _power_of_two(_exponent(columns.abs().amax(-2, keepdim=True)) - TRANSFORM_BITS)
    return ((columns / unit).round() * unit).float()


def _moments(k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of keys [num_heads, num_rows, head_dim] the mean, the covariance and the largest distance in a dimension."""
    total = _zeros(k, k.shape[2])
    for rows in _blocks(k):
        total += k[:, rows].double().sum(1)
    mean = total / k.shape[1]
    covariance, largest = _zeros(k, k.shape[2], k.shape[2]), _zeros(k)
    for rows in _blocks(k):
        centred = k[:, rows].double().sub_(mean[:, None])
        covariance += centred.mT @ centred
        largest = largest.maximum(centred.abs_().amax((1, 2)))
    return mean, covariance / k.shape[1], largest


def _best_steps(samples: Tensor, deviation: Tensor, bits: Tensor) -> Tensor:
    """The steps [num_heads, num_coords] that lose least; 0 where a coordinate has no energy.

    samples: [num_heads, num_samples, num_coords], deviation: [num_heads, num_coords].
    """
    normal = torch.where(bits == FINE_BITS, NORMAL_STEP[FINE_BITS], NORMAL_STEP[COARSE_BITS])
    last = (1 << bits - 1)[:, None].float() - 1
    sizes = (samples.mT.abs() / torch.where(deviation > 0, deviation * normal, torch.inf)[:, :, None]).float()
    errors = []
    for multiple in STEP_MULTIPLES:
        distance = sizes / multiple  # in steps, to the start of the level, then to its middle
        distance.sub_(distance.floor().minimum(last)).sub_(0.5)
        errors.append(multiple**2 * distance.square_().mean(2))
    multiples = torch.tensor(STEP_MULTIPLES, dtype=torch.float64, device=samples.device)
    return deviation * normal * multiples[torch.stack(errors).argmin(0)]


def _value_sums(codes: Tensor, v: Tensor, largest: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums over the rows of c, v, c c^T and c v^T."""
    num_coords, head_dim = codes.shape[2], v.shape[2]
    c_total, v_total = _zeros(v, num_coords), _zeros(v, head_dim)
    gram, cross = _zeros(v, num_coords, num_coords), _zeros(v, num_coords, head_dim)
    for rows in _blocks(v):
        c, wide = codes[:, rows].float().mul_(2.0).sub_(largest), v[:, rows].double()
        c_total += c.sum(1)
        v_total += wide.sum(1)
        gram += c.mT @ c
        cross += c.double().mT @ wide
    return c_total, v_total, gram, cross
