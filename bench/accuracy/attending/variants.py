"""The sketch with one thing done another way, in floating point: what was tried and not taken."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from bench.accuracy.attending.attend import Codes
from bench.accuracy.attending.context import ContextLayer
from csattn.config import SketchConfig
from csattn.sketch.build import solve_ridge
from csattn.sketch.reference import LEAST_QUERY_ENERGY, RIDGE, STEP_MULTIPLES

# steps that are best for a normal distribution, in deviations, by the bits
_NORMAL_STEP = {1: 1.596, 2: 0.996, 3: 0.586, 4: 0.335}
_MOST_BITS = 4  # that reverse water-filling gives to a coordinate
_LLOYD_ROUNDS = 20

Levels = Literal["even", "lloyd", "range"]


@dataclass(frozen=True, slots=True)
class Variant:
    """How a sketch is made."""

    bits: tuple[int, ...] = (4,) * 16 + (2,) * 32  # of the first coordinates; others have none
    deal_bits: bool = False  # as many bits as `bits` has in all, each to where it helps most
    levels: Levels = "even"  # range: from the least to the largest, nothing is clipped
    segment_len: int = SketchConfig().segment_len  # rows that share a transform, about; 0: all of them
    measured: int = 16  # coordinates whose weighted mean is measured
    respond: bool = True  # the mean of the other coordinates is predicted from the query
    value_bits: tuple[int, ...] = ()  # values have codes of their own, of the first of their principal coordinates
    correct_mass: bool = False  # a stand-in weighs as its row would on average, not as its code does
    normal_shares: bool = False  # a group's shares are of the sum for normal logits, not of the logits' own sum


class VariantCodes(Codes):
    def __init__(self, layer: ContextLayer, variant: Variant):
        self._variant = variant
        self._scale = layer.softmax_scale
        rows = layer.context_len
        num_segments = max(1, round(rows / variant.segment_len)) if variant.segment_len else 1
        edges = [rows * i // num_segments for i in range(num_segments + 1)]
        metric = _query_metric(layer.q.flatten(1, 2))
        segments = [slice(*edge) for edge in pairwise(edges)]
        self._segments = [_Segment(layer, part, metric, variant) for part in segments]
        total_bits = sum(variant.bits) + sum(variant.value_bits)
        self.bytes_per_key = total_bits / 8
        num_heads, _, head_dim = layer.k.shape
        coords = head_dim if variant.deal_bits else len(variant.bits)
        self.fixed_bytes = num_segments * num_heads * head_dim * (2 * 4 + 2 * 2 * (coords + len(variant.value_bits)))

    def logits(self, q: Tensor) -> Tensor:
        return torch.cat([segment.logits(q, self._variant, self._scale) for segment in self._segments], dim=2)

    def weighted_values(self, weights: Tensor, q: Tensor) -> Tensor:
        parts = (segment.weighted_values(weights[..., segment.rows], self._scale * q) for segment in self._segments)
        return torch.stack(list(parts)).sum(0)

    def log_total(self, q: Tensor) -> Tensor | None:
        if not self._variant.normal_shares:
            return None
        return torch.stack([segment.log_total(self._scale * q) for segment in self._segments]).logsumexp(0)


class _Segment:
    """Rows that share a transform."""

    def __init__(self, layer: ContextLayer, rows: slice, metric: tuple[Tensor, Tensor], variant: Variant):
        self.rows = rows
        k, v = layer.k[:, rows], layer.v[:, rows]
        root, inverse = metric
        self._mean = k.double().mean(1, keepdim=True).float()
        centred = (k - self._mean).double()
        energy, basis = _eigh(root @ (centred.mT @ centred / k.shape[1]) @ root)
        energy = energy.clamp_min(1e-30)
        bits = _padded(variant.bits, k)
        if variant.deal_bits:
            bits = torch.stack([_water_filling(of_head, sum(variant.bits)) for of_head in energy])
        kept = int((bits > 0).sum(1).max())
        y = (centred @ root @ basis).float()[..., :kept]
        self._y = _coded(y, energy[:, :kept].sqrt().float(), bits[:, :kept], variant.levels)
        self._lost = torch.cat([(self._y - y).square().mean(1), energy[:, kept:].float()], dim=1)
        self._energy = energy.float()
        self._to_coords = (inverse @ basis).float()
        self._measured = min(variant.measured, kept)
        self._code_values(v, variant)

    def _code_values(self, v: Tensor, variant: Variant) -> None:
        """The value of a row is value_mean + y @ value_matrix, y of the keys or of the values themselves."""
        mean = v.mean(1, keepdim=True)
        if variant.value_bits:
            centred = (v - mean).double()
            energy, axes = _eigh(centred.mT @ centred / v.shape[1])
            num_coords, bits = len(variant.value_bits), _padded(variant.value_bits, v)
            y = (centred @ axes).float()[..., :num_coords]
            deviation = energy.clamp_min(1e-30).sqrt().float()[:, :num_coords]
            self._values_y = _coded(y, deviation, bits[:, :num_coords], variant.levels)
            self._value_matrix = axes.float()[..., :num_coords].mT
            self._value_mean, self._predicted = mean, 0
            return
        num_coords = self._y.shape[2] if variant.respond else self._measured
        y_mean = self._y[..., :num_coords].mean(1, keepdim=True)
        centred = (self._y[..., :num_coords] - y_mean).double()
        gram = centred.mT @ centred
        ridge = RIDGE * gram.diagonal(dim1=1, dim2=2).mean(1) if num_coords else torch.zeros(len(v), device=v.device)
        ridge = ridge.clamp_min(1e-6)[:, None, None]
        self._value_matrix = solve_ridge(gram, centred.mT @ (v - mean).double(), ridge).float()
        self._value_mean = mean - y_mean @ self._value_matrix
        self._values_y = self._y[..., : self._measured]
        self._predicted = num_coords - self._measured
        self._variance = centred[..., self._measured :].square().mean(1, keepdim=True).float()

    def logits(self, q: Tensor, variant: Variant, scale: float) -> Tensor:
        p = q @ self._to_coords
        logits = p[..., : self._y.shape[2]] @ self._y.mT + q @ self._mean.mT
        if variant.correct_mass:
            logits += 0.5 * scale * (p.square() @ self._lost[..., None])
        return logits

    def weighted_values(self, weights: Tensor, query: Tensor) -> Tensor:
        """query: in units of logits."""
        share = weights.sum(-1, keepdim=True)
        codes = weights @ self._values_y
        if self._predicted:
            slopes = (query @ self._to_coords)[..., self._measured : self._measured + self._predicted]
            codes = torch.cat([codes, share * slopes * self._variance], -1)
        return share * self._value_mean + codes @ self._value_matrix

    def log_total(self, query: Tensor) -> Tensor:
        spread = (query @ self._to_coords).square() @ (self._energy - self._lost).clamp_min(0)[..., None]
        num_rows = torch.tensor(float(self._y.shape[1]), device=query.device)
        return (query @ self._mean.mT + spread / 2)[..., 0] + num_rows.log()


def _query_metric(q: Tensor) -> tuple[Tensor, Tensor]:
    unit = torch.nn.functional.normalize(q.double(), dim=-1)
    energy, axes = _eigh(unit.mT @ unit / q.shape[1])
    root = energy.clamp_min(LEAST_QUERY_ENERGY * energy.amax()).sqrt()[:, None]
    return axes * root @ axes.mT, axes / root @ axes.mT


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Energies, largest first, and axes: found on the CPU, which is faster at such small matrices."""
    energy, axes = torch.linalg.eigh(matrix.cpu())
    return energy.flip(1).to(matrix.device), axes.flip(2).to(matrix.device)


def _padded(bits: tuple[int, ...], like: Tensor) -> Tensor:
    """The bits of all coordinates: [num_kv_heads, head_dim]."""
    row = torch.zeros(like.shape[2], dtype=torch.long, device=like.device)
    row[: len(bits)] = torch.tensor(bits, device=like.device)
    return row.expand(len(like), -1)


def _water_filling(energy: Tensor, num_bits: int) -> Tensor:
    """Each bit to the coordinate that has lost most so far: [head_dim]."""
    bits = torch.zeros(len(energy), dtype=torch.long)
    left = energy.cpu().clone()
    for _ in range(num_bits):
        worst = int(left.argmax())
        bits[worst] += 1
        left[worst] = left[worst] / 4 if bits[worst] < _MOST_BITS else -1.0
    return bits.to(energy.device)


def _coded(y: Tensor, deviation: Tensor, bits: Tensor, levels: Levels) -> Tensor:
    """y [num_heads, num_rows, num_coords] after coding; deviation and bits [num_heads, num_coords]."""
    if levels == "lloyd":
        return _by_lloyd(y, int(bits.max()))
    half = (2.0 ** (bits - 1))[:, None]
    if levels == "range":
        steps = [y.abs().amax(1) / half[:, 0]]
    else:
        normal = torch.tensor([0.0, *_NORMAL_STEP.values()], device=y.device)[bits]
        steps = [deviation * normal * multiple for multiple in STEP_MULTIPLES]
    best, least = torch.zeros_like(y), torch.full_like(deviation, torch.inf)
    for step in steps:
        wide = step.clamp_min(1e-30)[:, None]
        coded = wide * ((y / wide).floor().clamp(-half, half - 1) + 0.5)
        error = (coded - y).square().mean(1)
        best = torch.where((error < least)[:, None], coded, best)
        least = torch.minimum(error, least)
    return torch.where((bits > 0)[:, None], best, 0.0)


def _by_lloyd(y: Tensor, bits: int) -> Tensor:
    """With the levels that lose least on the rows themselves, 2**bits for every coordinate."""
    coords = y.mT.contiguous()  # [num_heads, num_coords, num_rows]
    ranks = ((torch.arange(2**bits, device=y.device) + 0.5) / 2**bits * coords.shape[2]).long()
    levels = coords.sort(2).values[..., ranks]
    cells = torch.zeros_like(coords, dtype=torch.long)
    for _ in range(_LLOYD_ROUNDS):
        cells = torch.searchsorted(((levels[..., 1:] + levels[..., :-1]) / 2).contiguous(), coords)
        sums = torch.zeros_like(levels).scatter_add_(2, cells, coords)
        counts = torch.zeros_like(levels).scatter_add_(2, cells, torch.ones_like(coords))
        levels = torch.where(counts > 0, sums / counts.clamp_min(1), levels)
    return levels.gather(2, cells).mT
