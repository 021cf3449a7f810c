"""csattn's sketch, as `csattn.sketch.reference` defines it, for many queries at once on any device."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.accuracy.attending.attend import Codes
from bench.accuracy.attending.context import ContextLayer
from csattn.config import SketchConfig
from csattn.sketch import SketchIndex
from csattn.sketch.build import sketch_arrays
from csattn.sketch.codes import FINE_CODES, coord_bits, unpack_codes, unpack_marks
from csattn.sketch.reference import (
    LARGEST_EXPONENT,
    LARGEST_MULTIPLIER,
    LEAST_OCTAVE,
    LOG2_E,
    LOG_BITS,
    NORMALISER_KEYS,
    SCORE_ROOM,
    TOTAL_BITS,
)

_LARGEST_GROUP_SCORE = 32767
_MOST_ROWS = 2**24  # of a context


def build_sketch(layer: ContextLayer, config: SketchConfig) -> SketchIndex:
    """Build the sketch that csattn would build for this layer of the context."""
    head_dim = layer.k.shape[2]
    num_fine, _ = config.words(head_dim)
    starts = config.segment_starts(layer.context_len)
    kv = torch.stack([layer.k, layer.v], dim=2)
    with ThreadPoolExecutor() as threads:
        arrays = sketch_arrays(layer.q.flatten(0, 1), kv, config, threads.map, starts)
    host = {name: array.cpu().numpy() for name, array in arrays.items()}
    return SketchIndex(**host, num_fine=num_fine, context_len=layer.context_len)


class SketchCodes(Codes):
    """Integer scores, group scores and the values of the rest, for any `SketchIndex`."""

    def __init__(self, index: SketchIndex, layer: ContextLayer):
        self._index = index
        self._group_size = layer.q.shape[1]
        self._num_measured = FINE_CODES * index.num_fine
        self._segments = [index.segment(number) for number in range(index.num_segments)]
        self._octaves = layer.softmax_scale * LOG2_E
        bits = coord_bits(index.num_fine, index.num_coarse)
        device = layer.k.device
        codes = unpack_codes(index.codes, index.context_len, index.num_fine)
        self._u = torch.from_numpy(codes).to(device).float()  # [num_kv_heads, context_len, num_coords]
        self._marks = torch.from_numpy(unpack_marks(index.marks, index.context_len)).to(device)
        self._largest = torch.from_numpy(2**bits - 1).to(device)
        self._key_mean = _on(device, index.key_mean)
        self._query_transform = _on(device, index.query_transform)
        self._value_mean = _on(device, index.value_mean)
        self._value_transform = _on(device, index.value_transform)
        transforms = index.key_mean, index.query_transform, index.value_mean, index.value_transform
        self.bytes_per_key = (float(bits.sum()) + 1) / 8
        self.fixed_bytes = sum(array.nbytes for array in transforms)

    def logits(self, q: Tensor) -> Tensor:
        bases, exponent, scores = self._scores(q.unflatten(1, (self._group_size, -1)))
        units = torch.ldexp(torch.ones_like(bases[:, :1]), exponent[:, None])
        return scores.mul_(units[..., None]).add_(bases[..., None]).div_(self._octaves).flatten(1, 2)

    def group_scores(self, q: Tensor, top_k: int) -> Tensor:
        """Like `csattn.sketch.reference.group_scores`; ties go to the first row."""
        _, exponent, scores = self._scores(q)
        normalisers = normaliser(scores, exponent[:, None])
        shares = scores.sub_((normalisers - normalisers.amin(1, keepdim=True))[..., None])
        best = shares.amax(1).clamp_(-_LARGEST_GROUP_SCORE, _LARGEST_GROUP_SCORE)
        if self._index.uses_marks(top_k):
            best.masked_fill_(self._marks[:, None], _LARGEST_GROUP_SCORE)
        rows = torch.arange(best.shape[2], dtype=torch.float64, device=best.device)
        return best.double().sub_(rows / _MOST_ROWS)

    def weighted_values(self, weights: Tensor, q: Tensor) -> Tensor:
        _, coordinates = self._project(q)
        slopes = coordinates[..., self._num_measured :] / LOG2_E
        out = torch.zeros_like(q)
        for number, rows in enumerate(self._segments):
            of_segment = weights[..., rows]
            share = of_segment.sum(-1, keepdim=True)
            codes = [of_segment @ self._u[:, rows, : self._num_measured], share * slopes[:, number]]
            out += share * self._value_mean[:, number, None] + torch.cat(codes, -1) @ self._value_transform[:, number]
        return out

    def _scores(self, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Like `csattn.sketch.reference.score_group`, for each token.

        Returns bases [num_kv_heads, group_size, num_tokens] float32, exponent [num_kv_heads, num_tokens] int32 and
        scores [num_kv_heads, group_size, num_tokens, context_len] float32.
        """
        means, coordinates = (
            array.unflatten(2, q.shape[1:3]) for array in self._project(q.flatten(1, 2))
        )  # [num_kv_heads, num_segments, group_size, num_tokens, ...]
        exponent, multipliers, offsets = integer_queries(means, coordinates, self._largest)
        scores = torch.empty(*q.shape[:3], self._u.shape[1], device=q.device)
        for number, rows in enumerate(self._segments):
            of_segment = multipliers[:, number].float() @ self._u[:, None, rows].mT  # whole numbers: exact
            scores[..., rows] = of_segment + offsets[:, number, ..., None].float()
        return means[:, 0], exponent, scores

    def _project(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Like `csattn.sketch.reference.project`: [num_kv_heads, num_segments, n] and [..., num_coords] float32."""
        wide = q.double()[:, None]
        means = (wide @ self._key_mean.double()[..., None])[..., 0]
        short, coordinates = (self._octaves * wide).float(), torch.zeros((), device=q.device)
        for i in range(q.shape[-1]):  # in this order, with each product and each sum rounded, as in the definition
            coordinates = coordinates + short[..., i, None] * self._query_transform[:, :, i, None]
        return (self._octaves * means).float(), coordinates


def integer_queries(
    means: Tensor,  # [num_kv_heads, num_segments, group_size, n] float32
    coordinates: Tensor,  # [num_kv_heads, num_segments, group_size, n, num_coords] float32
    largest: Tensor,  # [num_coords] int64, the largest code of each coordinate
) -> tuple[Tensor, Tensor, Tensor]:
    """Like `csattn.sketch.reference.integer_queries`, for n groups: exponent [num_kv_heads, n], multipliers, offsets.

    exponent is int32.
    """
    half = largest.double() / 2
    p, differences = coordinates.double(), means.double() - means[:, :1].double()
    total = (p.abs() * half).sum(-1) + differences.abs()
    room = SCORE_ROOM - float(half.sum()) / 2
    needed = torch.maximum(p.abs().amax(-1) / LARGEST_MULTIPLIER, total / room).amax(1)
    is_finite = needed <= 2.0**LARGEST_EXPONENT  # not where it is no number
    most = torch.where(is_finite, needed, 0.0).amax(1).clamp_min(2.0**-LARGEST_EXPONENT)
    fraction, exponent = torch.frexp(most)
    exponent = exponent - (fraction == 0.5).int()
    unit = torch.ldexp(torch.ones_like(most), exponent)[:, None, None]
    counts = is_finite[:, None]
    multipliers = (torch.where(counts[..., None], p, 0.0) / unit[..., None]).round()
    offsets = (torch.where(counts, differences, 0.0) / unit).round()
    return exponent, multipliers, offsets - ((multipliers @ largest.double()) / 2).floor()


def normaliser(scores: Tensor, exponent: Tensor) -> Tensor:
    """Like `csattn.sketch.reference.normaliser`, for whole-number scores [..., context_len], exponent [...] int32."""
    padded = torch.nn.functional.pad(scores, (0, -scores.shape[-1] % NORMALISER_KEYS), value=-torch.inf)
    greatest = padded.unflatten(-1, (-1, NORMALISER_KEYS)).amax(-1).int()
    shift = exponent[..., None]
    octaves = (greatest >> (-shift).clamp_min(0) << shift.clamp_min(0)).clamp_(min=LEAST_OCTAVE)
    top = octaves.amax(-1, keepdim=True)
    total = (2**TOTAL_BITS >> (top - octaves).clamp_(max=TOTAL_BITS + 1)).sum(-1, dtype=torch.int64)
    whole = torch.frexp(total.double()).exponent.long() - 1
    log = ((top[..., 0] + whole - TOTAL_BITS) << LOG_BITS) + (total >> whole - LOG_BITS) - 2**LOG_BITS
    return (log >> LOG_BITS + exponent.long()).to(scores.dtype)


def _on(device: torch.device, array: NDArray[np.floating]) -> Tensor:
    return torch.from_numpy(np.asarray(array, np.float32)).to(device)
