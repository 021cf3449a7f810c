"""The product's sketch, as `csattn.sketch.reference` defines it, for many queries at once on any device."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.accuracy.attending.attend import Codes
from bench.accuracy.attending.context import ContextLayer
from csattn.config import SketchConfig
from csattn.sketch import SketchIndex
from csattn.sketch.codes import FINE_CODES, coord_bits, unpack_codes
from csattn.sketch.reference import LARGEST_MULTIPLIER, SCORE_ROOM
from index_build.sketch import sketch_arrays


def build_sketch(layer: ContextLayer, config: SketchConfig) -> SketchIndex:
    """What the product would make of a layer of the context."""
    head_dim = layer.k.shape[2]
    num_fine, _ = config.words(head_dim)
    starts = config.segment_starts(layer.context_len)
    kv = torch.stack([layer.k, layer.v], dim=2)
    with ThreadPoolExecutor() as threads:
        arrays = sketch_arrays(layer.q.flatten(0, 1), kv, config, threads, starts)
    host = {name: array.cpu().numpy() for name, array in arrays.items()}
    return SketchIndex(
        **host, num_fine=num_fine, segment_starts=np.array(starts, np.int32), context_len=layer.context_len
    )


class SketchCodes(Codes):
    """Scores by integers and the rest's values, of any `SketchIndex`."""

    def __init__(self, index: SketchIndex, layer: ContextLayer):
        self._num_measured = FINE_CODES * index.num_fine
        self._segments = [index.segment(number) for number in range(index.num_segments)]
        self._softmax_scale = layer.softmax_scale
        bits = coord_bits(index.num_fine, index.num_coarse)
        device = layer.k.device
        codes = torch.from_numpy(unpack_codes(index.codes, index.context_len, index.num_fine)).to(device)
        self._largest = torch.from_numpy(2**bits - 1).to(device)
        self._c = 2.0 * codes - self._largest.float()  # [num_kv_heads, context_len, num_coords]
        self._key_mean = _on(device, index.key_mean)
        self._query_transform = _on(device, index.query_transform)
        self._value_mean = _on(device, index.value_mean)
        self._value_transform = _on(device, index.value_transform)
        transforms = index.key_mean, index.query_transform, index.value_mean, index.value_transform
        self.bytes_per_key = float(bits.sum()) / 8
        self.fixed_bytes = sum(array.nbytes for array in transforms)

    def logits(self, q: Tensor) -> Tensor:
        means, coordinates = self._project(q)
        unit, multipliers, shifts = integer_queries(means, coordinates, self._largest)
        logits = torch.empty(*q.shape[:2], self._c.shape[1], device=q.device)
        for number, rows in enumerate(self._segments):
            scores = multipliers[:, number].float() @ self._c[:, rows].mT  # whole numbers below 2**15: exact
            logits[..., rows] = scores + shifts[:, number, :, None].float()
        return logits.mul_(unit[..., None].float()).add_(means[:, 0, :, None])

    def weighted_values(self, weights: Tensor, q: Tensor) -> Tensor:
        _, coordinates = self._project(q)
        slopes = self._softmax_scale * coordinates[..., self._num_measured :]
        out = torch.zeros_like(q)
        for number, rows in enumerate(self._segments):
            of_segment = weights[..., rows]
            share = of_segment.sum(-1, keepdim=True)
            codes = [of_segment @ self._c[:, rows, : self._num_measured], share * slopes[:, number]]
            out += share * self._value_mean[:, number, None] + torch.cat(codes, -1) @ self._value_transform[:, number]
        return out

    def _project(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """As `csattn.sketch.reference.project`: [num_kv_heads, num_segments, n] and [..., num_coords] float32."""
        wide = q.double()[:, None]
        means = (wide @ self._key_mean.double()[..., None])[..., 0]
        return means.float(), (wide @ self._query_transform.double()).float()


def integer_queries(
    means: Tensor,  # [num_kv_heads, num_segments, n] float32
    coordinates: Tensor,  # [num_kv_heads, num_segments, n, num_coords] float32
    largest: Tensor,  # [num_coords]: of the numbers that codes stand for
) -> tuple[Tensor, Tensor, Tensor]:
    """`csattn.sketch.reference.integer_query` of each query: unit [num_kv_heads, n], multipliers and shifts float64."""
    p, shift = coordinates.double(), means.double() - means[:, :1].double()
    room = SCORE_ROOM - float(largest.sum()) / 2
    total = (p.abs() * largest).sum(-1) + shift.abs()
    unit = torch.maximum(p.abs().amax(-1) / LARGEST_MULTIPLIER, total / room).amax(1)
    unit = torch.where((unit > 0) & unit.isfinite(), unit, 0.0)
    counts = (unit > 0)[:, None]  # other queries get zeros
    divisor = torch.where(counts, unit[:, None], 1.0)
    multipliers = torch.where(counts[..., None], (p / divisor[..., None]).round(), 0.0)
    return unit, multipliers, torch.where(counts, (shift / divisor).round(), 0.0)


def _on(device: torch.device, array: NDArray[np.floating]) -> Tensor:
    return torch.from_numpy(np.asarray(array, np.float32)).to(device)
