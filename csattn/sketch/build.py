"""Build the sketch of one layer's keys. Definition: `csattn.sketch.reference`.

Sums over rows are computed on the device that holds the rows: in float32 within a block of rows, in float64 over the
blocks. Only the eigenvectors are computed on the CPU, by many threads, which is faster than a GPU for matrices this
small. On a CPU each head has its own thread, because a library's sums depend on its number of threads and on how many
heads it gets at once.

From the same transform, every device makes the same codes. Transforms are fitted to the same queries and rows on every
device and in the definition, and agree up to the rounding of sums over rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from csattn.config import SketchConfig
from csattn.sketch.codes import BLOCK_KEYS, COARSE_BITS, FINE_BITS, FINE_CODES, coord_bits, num_blocks
from csattn.sketch.index import MARKED_SHARE
from csattn.sketch.reference import (
    KEY_BITS,
    LEAST_ENERGY,
    LEAST_KEY_ENERGY,
    LEAST_QUERY_ENERGY,
    NORMAL_STEP,
    RIDGE,
    STEP_MULTIPLES,
    STEP_SAMPLES,
    TRANSFORM_BITS,
    sample_of_queries,
)
from csattn.torch_threads import Map, on_one_thread, one_thread

# Rows of a head that are held in floating point at a time. On a CPU: enough that threads seldom wait for the GIL.
# A block's sum of products of codes must be exact in float32.
_BLOCK_ROWS, _BLOCK_ROWS_ON_GPU = 2**13, 2**15
_WORD_KEYS = 32  # keys whose marks share a word

Part = tuple[slice, slice]  # some segments, and their rows or a piece of them: equally many of each segment


@dataclass(frozen=True, slots=True)
class KeyTransforms:
    """The key side of `csattn.sketch.reference.Transform` for each head and segment, on the device of the rows."""

    key_mean: Tensor  # [num_heads, num_segments, head_dim] float32
    key_exponent: Tensor  # [num_heads, num_segments] int64
    key_transform: Tensor  # [num_heads, num_segments, head_dim, num_coords] float32
    query_transform: Tensor  # [num_heads, num_segments, head_dim, num_coords] float16


def sketch_arrays(
    q: Tensor | None,  # [num_q_heads, context_len, head_dim], after RoPE; None: all directions count equally
    kv: Tensor,  # [num_kv_heads, context_len, 2, head_dim]
    config: SketchConfig,
    parallel_map: Map,  # a `map` over threads, for the work on the CPU
    segment_starts: Sequence[int] | None = None,  # default: the configuration's
) -> dict[str, Tensor]:
    """Return the arrays of `SketchIndex` by name, on the device of q and kv.

    Preconditions: at least one row, and no number that is NaN or above LARGEST_NUMBER (captures check this). A single
    one would spoil its head's choices or make its attention to the rest NaN.
    """
    num_heads, context_len, _, head_dim = kv.shape
    assert context_len > 0, "a sketch has rows"
    queries = None if q is None else q.reshape(num_heads, -1, head_dim)
    starts = config.segment_starts(context_len) if segment_starts is None else segment_starts
    words = config.words(head_dim)
    arrays = {"segment_starts": torch.tensor(starts, dtype=torch.int32, device=kv.device)}
    with one_thread():
        if kv.is_cuda:
            return arrays | _sketch_heads(queries, kv, words, starts, parallel_map)
        heads = [None] * num_heads if queries is None else torch.split(queries, 1), torch.split(kv, 1)
        of_head = on_one_thread(partial(_sketch_heads, words=words, segment_starts=starts, parallel_map=map))
        made = list(parallel_map(of_head, *heads))
    return arrays | {name: torch.cat([of_one[name] for of_one in made]) for name in made[0]}


@torch.inference_mode()
def _sketch_heads(
    queries: Tensor | None,  # [num_heads, num_queries, head_dim]
    kv: Tensor,
    words: tuple[int, int],
    segment_starts: Sequence[int],
    parallel_map: Map,
) -> dict[str, Tensor]:
    bits = torch.from_numpy(coord_bits(*words)).to(kv.device)
    k, v = kv[:, :, 0], kv[:, :, 1]
    metric = even_metric(k) if queries is None else fit_queries(queries, parallel_map)
    made = fit_keys(k, segment_starts, metric, bits, parallel_map)
    codes, errors = encode(k, segment_starts, made, bits)
    value_mean, value_transform = fit_values(codes, v, segment_starts, bits)
    arrays = {
        "codes": pack(codes, *words),
        "marks": mark(errors, segment_starts),
        "key_mean": made.key_mean,
        "query_transform": made.query_transform,
        "value_mean": value_mean,
        "value_transform": value_transform,
    }
    return {name: array.contiguous() for name, array in arrays.items()}  # searches use their addresses


def fit_queries(queries: Tensor, parallel_map: Map = map) -> tuple[Tensor, Tensor]:
    """The square root of the mean of q q^T over unit queries, and its inverse: [num_heads, head_dim, head_dim] float64.

    Only a sample of the queries [num_heads, num_queries, head_dim] is used.
    """
    queries = queries[:, sample_of_queries(*queries.shape[1:])]
    total = _zeros(queries, queries.shape[2], queries.shape[2])
    for _, rows in _parts(queries, (0,)):
        of_rows = queries[:, rows].float()
        energy = of_rows.square().sum(2, keepdim=True)
        unit = of_rows * torch.where(energy > 0, energy.rsqrt(), 0.0)
        total += unit.mT @ unit
    energy, directions = _eigh(total / queries.shape[1], parallel_map)
    greatest = energy[:, -1:]
    root = torch.where(greatest > 0, energy.maximum(LEAST_QUERY_ENERGY * greatest), 1.0).sqrt()[:, None]
    return directions * root @ directions.mT, directions / root @ directions.mT


def even_metric(k: Tensor) -> tuple[Tensor, Tensor]:
    """The result of `fit_queries` for queries that are spread evenly over all directions.

    k: [num_heads, num_keys, head_dim], used for its shape and device only.
    """
    unit = torch.eye(k.shape[2], dtype=torch.float64, device=k.device).expand(len(k), -1, -1)
    root = torch.tensor(1 / k.shape[2], dtype=torch.float64).sqrt().item()
    return unit * root, unit / root


def fit_keys(
    k: Tensor,  # [num_heads, context_len, head_dim]
    segment_starts: Sequence[int],  # each with at least one row
    metric: tuple[Tensor, Tensor],  # from `fit_queries`
    bits: Tensor,  # [num_coords] int64
    parallel_map: Map = map,
) -> KeyTransforms:
    """Fit the transform of each segment: the coordinates that are kept of its keys, and their quantization steps."""
    mean, covariance, largest = _moments(k, segment_starts)
    root, inverse = (array[:, None] for array in metric)
    energy, basis = _eigh(root @ covariance @ root, parallel_map)
    energy, basis = energy.flip(2)[:, :, : len(bits)], basis.flip(3)[..., : len(bits)]
    least = (LEAST_KEY_ENERGY * energy[:, :, :1]).clamp_min(LEAST_ENERGY)
    deviation = torch.where(energy > least, energy, 0.0).sqrt()
    forward, step = root @ basis, torch.empty_like(deviation)
    for part in _runs(segment_starts, k.shape[1]):
        rows = _rows(k, part)
        samples = rows[:, :, :: -(-rows.shape[2] // STEP_SAMPLES)] - mean[:, part[0], None].float()
        step[:, part[0]] = _best_steps(samples @ forward[:, part[0]].float(), deviation[:, part[0]], bits)
    wide = step[:, :, None]
    columns = torch.where(wide > 0, forward / torch.where(wide > 0, wide, 1.0), 0.0)
    back = inverse @ basis * wide
    return KeyTransforms(mean.float(), _exponent(largest), _in_fixed_point(columns), _half(back))


def encode(k: Tensor, segment_starts: Sequence[int], made: KeyTransforms, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [num_heads, context_len, num_coords] uint8, on the device of k, equal to the reference's.

    The second result is the squared error of each key's reconstruction from codes: [num_heads, context_len] float32.
    """
    per_unit = _power_of_two(KEY_BITS - made.key_exponent)[:, :, None, None]
    shift, transform = -made.key_mean.double()[:, :, None] * per_unit, made.key_transform / per_unit
    half, back = (1 << bits - 1).float(), made.query_transform.float().mT
    reconstruction_of_zero_codes = (made.key_mean - (half - 0.5) @ back)[:, :, None]
    codes = torch.empty(*k.shape[:2], len(bits), dtype=torch.uint8, device=k.device)
    errors = torch.empty(k.shape[:2], dtype=torch.float32, device=k.device)
    for part in _parts(k, segment_starts):
        of = part[0]
        whole = torch.addcmul(shift[:, of], _rows(k, part), per_unit[:, of]).round_()
        steps = whole.clamp_(-(2.0**KEY_BITS), 2.0**KEY_BITS) @ transform[:, of]
        u = steps.floor_().float().clamp_(-half, half - 1).add_(half)  # before floor(), adding half would round
        _rows(codes, part)[:] = u
        missed = (u @ back[:, of]).add_(reconstruction_of_zero_codes[:, of]).sub_(_rows(k, part))
        _rows(errors, part)[:] = missed.square_().sum(3)
    return codes, errors


def mark(errors: Tensor, segment_starts: Sequence[int]) -> Tensor:
    """Mark the rows with the largest errors (of equal ones, the first), in words like `pack_marks`.

    errors: [num_heads, context_len] float32, none below 0.
    """
    size = num_blocks(errors.shape[1]) * BLOCK_KEYS // _WORD_KEYS
    words = torch.zeros(len(errors), size, dtype=torch.int64, device=errors.device)
    for part in _runs(segment_starts, errors.shape[1]):
        of_rows = _rows(errors, part)
        num_marked = of_rows.shape[2] // MARKED_SHARE
        places = torch.arange(of_rows.shape[2], device=errors.device)
        keys = (of_rows.contiguous().view(torch.int32).long() << 32) - places  # floats >= 0 are ordered like their bits
        first = torch.tensor(segment_starts[part[0]], device=errors.device)
        rows = (keys.topk(num_marked, dim=2).indices + first[:, None]).flatten(1)
        words.scatter_add_(1, rows // _WORD_KEYS, torch.ones_like(rows) << rows % _WORD_KEYS)
    return words.view(len(errors), -1, BLOCK_KEYS // _WORD_KEYS).to(torch.int32).view(torch.uint32)


def fit_values(codes: Tensor, v: Tensor, segment_starts: Sequence[int], bits: Tensor) -> tuple[Tensor, Tensor]:
    """Fit a linear regression of values on codes in each segment; see the reference's `Transform`.

    codes: from `encode`. v: [num_heads, context_len, head_dim]. Returns value_mean [num_heads, num_segments, head_dim]
    float32 and value_transform [num_heads, num_segments, num_coords, head_dim] float16.
    """
    u_mean, v_mean, gram, cross = _value_moments(codes, v, segment_starts)
    gram, cross = gram - u_mean.mT @ u_mean, cross - u_mean.mT @ v_mean
    variance = gram.diagonal(dim1=2, dim2=3)[..., None]
    ridge = RIDGE * (variance.mean(2, keepdim=True) + 1.0)
    matrix = solve_ridge(gram, cross, ridge)
    fine = (bits == FINE_BITS).double()
    scaled = matrix * torch.where(fine[:, None] > 0, 1.0, variance)
    return (v_mean - fine * u_mean @ matrix)[:, :, 0].float(), _half(scaled)


def pack(codes: Tensor, num_fine: int, num_coarse: int) -> Tensor:
    """`pack_codes` in torch: [num_heads, num_blocks, num_fine + num_coarse, BLOCK_KEYS] uint32.

    Four codes of neighbouring coordinates, one byte each, are read as an int32; one shift puts all of them in place.
    """
    num_heads, num_rows, _ = codes.shape
    fours = torch.nn.functional.pad(codes.view(torch.int32), (0, 0, 0, -num_rows % BLOCK_KEYS))
    fine, coarse = fours.tensor_split([num_fine * FINE_CODES // 4], dim=2)
    words = torch.cat([_join_codes(fine, FINE_BITS), _join_codes(coarse, COARSE_BITS)], dim=2)
    by_block = words.view(num_heads, -1, BLOCK_KEYS, num_fine + num_coarse).mT
    return by_block.contiguous().view(torch.uint32)


def _runs(starts: Sequence[int], num_rows: int) -> Iterator[Part]:
    """Yield runs of neighbouring segments of equal length, with their rows."""
    edges = (*starts, num_rows)
    for _, run in groupby(range(len(starts)), key=lambda number: edges[number + 1] - edges[number]):
        numbers = list(run)
        stop = numbers[-1] + 1
        yield slice(numbers[0], stop), slice(edges[numbers[0]], edges[stop])


def _parts(rows: Tensor, starts: Sequence[int]) -> Iterator[Part]:
    """Yield parts that cover all rows [num_heads, num_rows, ...] in order.

    Each is some whole segments of equal length, or a piece of one segment.
    """
    most = _BLOCK_ROWS_ON_GPU if rows.is_cuda else _BLOCK_ROWS
    for segments, of_run in _runs(starts, rows.shape[1]):
        length = (of_run.stop - of_run.start) // (segments.stop - segments.start)
        at_once, piece = max(1, most // length), min(length, most)
        for first in range(segments.start, segments.stop, at_once):
            last = min(first + at_once, segments.stop)
            begin, end = (of_run.start + (number - segments.start) * length for number in (first, last))
            for start in range(begin, end, at_once * piece):
                yield slice(first, last), slice(start, min(start + at_once * piece, end))


def _rows(rows: Tensor, part: Part) -> Tensor:
    """A view of that part of rows [num_heads, num_rows, ...] by segment: [num_heads, num_segments, num_rows, ...]."""
    segments, of_part = part
    return torch.unflatten(rows[:, of_part], 1, (segments.stop - segments.start, -1))


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right for each head and segment, accumulated in float32; 16-bit inputs use a GPU's tensor cores."""
    if left.dtype == torch.float32:
        return left @ right
    product = torch.bmm(left.flatten(0, 1), right.flatten(0, 1), out_dtype=torch.float32)
    return product.view(*left.shape[:3], -1)


def _lengths(starts: Sequence[int], rows: Tensor) -> Tensor:
    """The lengths of the segments of rows [num_heads, num_rows, ...]: [num_segments, 1] float64."""
    edges = torch.tensor([*starts, rows.shape[1]], dtype=torch.float64, device=rows.device)
    return edges.diff()[:, None]


def _zeros(like: Tensor, *shape: int) -> Tensor:
    return torch.zeros(len(like), *shape, dtype=torch.float64, device=like.device)


def _half(x: Tensor) -> Tensor:
    """Round to float16; numbers out of its range become its largest."""
    limit = torch.finfo(torch.float16).max
    return x.clamp(-limit, limit).half()


def _eigh(matrices: Tensor, parallel_map: Map) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and eigenvectors of symmetric matrices [..., n, n], computed on the CPU."""
    on_gpu = matrices.is_cuda
    here = matrices.flatten(0, -3).to("cpu", non_blocking=True)  # from a GPU, to pinned memory: many times as fast
    values = torch.empty(here.shape[:2], dtype=here.dtype, pin_memory=on_gpu)
    vectors = torch.empty(here.shape, dtype=here.dtype, pin_memory=on_gpu)  # as rows, which is how they are written
    if on_gpu:
        torch.cuda.current_stream(matrices.device).synchronize()

    @on_one_thread
    def decompose(number: int) -> None:
        values[number], columns = torch.linalg.eigh(here[number])
        vectors[number] = columns.mT

    for _ in parallel_map(decompose, range(len(here))):
        pass
    values, vectors = (found.to(matrices.device, non_blocking=True) for found in (values, vectors))
    return values.view(matrices.shape[:-1]), vectors.view(matrices.shape).mT


def _exponent(x: Tensor) -> Tensor:
    """The exponent of the smallest power of two that is not below x; 0 where x is 0."""
    mantissa, exponent = torch.frexp(x)
    return exponent.long() - (mantissa == 0.5).long()


def _power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent in float64, made from its bits: a GPU's own result may be wrong in the last bit."""
    return (exponent + 1023 << 52).view(torch.float64)


def _in_fixed_point(columns: Tensor) -> Tensor:
    """`csattn.sketch.reference.in_fixed_point` for many matrices [..., head_dim, num_coords]."""
    unit = _power_of_two(_exponent(columns.abs().amax(-2, keepdim=True)) - TRANSFORM_BITS)
    return ((columns / unit).round() * unit).float()


def _moments(k: Tensor, starts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """For each segment: the mean of the keys, their covariance, and the largest distance from the mean in a dimension.

    float64 [num_heads, num_segments, head_dim], [num_heads, num_segments, head_dim, head_dim] and
    [num_heads, num_segments].
    """
    num_rows, shape = _lengths(starts, k), (len(starts), k.shape[2])
    mean = _zeros(k, *shape)
    least, most = mean + torch.inf, mean - torch.inf
    for part in _parts(k, starts):
        rows, segments = _rows(k, part), part[0]
        mean[:, segments] += rows.sum(2, dtype=torch.float32)
        least[:, segments] = least[:, segments].minimum(rows.amin(2))
        most[:, segments] = most[:, segments].maximum(rows.amax(2))
    mean /= num_rows
    covariance, shift = _zeros(k, *shape, k.shape[2]), mean.float()[:, :, None]
    for part in _parts(k, starts):
        centred = _rows(k, part) - shift[:, part[0]]
        covariance[:, part[0]] += centred.mT @ centred
    return mean, covariance / num_rows[..., None], torch.maximum(most - mean, mean - least).amax(2)


def _best_steps(samples: Tensor, deviation: Tensor, bits: Tensor) -> Tensor:
    """The steps [..., num_coords] with the least squared error; 0 where a coordinate has no energy.

    samples: [..., num_samples, num_coords] float32, deviation: [..., num_coords] float64.
    """
    normal = torch.where(bits == FINE_BITS, NORMAL_STEP[FINE_BITS], NORMAL_STEP[COARSE_BITS])
    last = (1 << bits - 1)[:, None].float() - 1
    steps = torch.where(deviation > 0, deviation * normal, torch.inf)[..., None].float()
    sizes = samples.mT.contiguous().abs_().div_(steps)
    errors = []
    for multiple in STEP_MULTIPLES:
        distance = sizes * (1 / multiple)  # in steps: from the level's lower edge, then from its middle
        distance.sub_(distance.floor().minimum(last)).sub_(0.5)
        errors.append(multiple**2 * distance.square_().mean(-1))
    multiples = torch.tensor(STEP_MULTIPLES, dtype=torch.float64, device=samples.device)
    return deviation * normal * multiples[torch.stack(errors).argmin(0)]


def _value_moments(codes: Tensor, v: Tensor, starts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Means over the rows of u, v, u u^T and u v^T in each segment, in float64.

    The means of vectors are [num_heads, num_segments, 1, width], those of products [num_heads, num_segments, width of
    u, width]. Sums within a block are in float32, which is exact for products of codes: they are small integers.
    """
    num_coords, head_dim, num_rows = codes.shape[2], v.shape[2], _lengths(starts, v)[..., None]
    shapes = (1, num_coords), (1, head_dim), (num_coords, num_coords), (num_coords, head_dim)
    dtype = v.dtype if v.is_cuda and v.dtype.itemsize == 2 else torch.float32
    u_sum, v_sum, gram, cross = (_zeros(v, len(starts), *shape) for shape in shapes)
    for part in _parts(v, starts):
        of, u, of_values = part[0], _rows(codes, part).to(dtype), _rows(v, part).to(dtype)
        u_sum[:, of] += u.sum(2, keepdim=True, dtype=torch.float32)
        v_sum[:, of] += of_values.sum(2, keepdim=True, dtype=torch.float32)
        gram[:, of] += _product(u.mT, u)
        cross[:, of] += _product(u.mT, of_values)
    return u_sum / num_rows, v_sum / num_rows, gram / num_rows, cross / num_rows


def solve_ridge(gram: Tensor, right: Tensor, ridge: Tensor) -> Tensor:
    """Call `solve_definite` with a ridge [..., 1, 1] added to the diagonals of gram [..., n, n]."""
    return solve_definite(gram + ridge * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device), right)


def solve_definite(gram: Tensor, right: Tensor) -> Tensor:
    """Solve gram @ x = right for x, by Cholesky, for positive definite matrices gram [..., n, n].

    `torch.linalg.solve` hangs or crashes for several matrices of more than 150 rows and several threads
    (https://github.com/pytorch/pytorch/issues/141358).
    """
    with one_thread():  # one matrix at a time; more threads are slower
        lower: Tensor = torch.linalg.cholesky_ex(gram).L
        half_way = torch.linalg.solve_triangular(lower, right, upper=False)
        solved: Tensor = torch.linalg.solve_triangular(lower.mT, half_way, upper=True)
    return solved


def _join_codes(fours: Tensor, bits: int) -> Tensor:
    """Pack [..., n] int32 with four codes each into [..., n * bits / 8] words."""
    words, *others = torch.unflatten(fours, -1, (-1, 8 // bits)).unbind(-1)
    for number, other in enumerate(others, start=1):
        words = words | other << number * bits
    return words
