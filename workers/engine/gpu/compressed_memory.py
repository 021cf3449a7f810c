"""What layers of compressed attention (DeepSeek-V4) keep of contexts and requests on a device, and where it lies.

A layer's rows are one array: contexts' last rows, requests' own rows, then compressed rows, contexts' before requests'.
Index keys are another array, in the order of the compressed rows, so one place gives a compressed row and its key.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from csattn.batch import StepRows
from csattn.lightning import CompressedState
from csattn.models.latent_spec import CompressedSpec
from csattn.models.weights import CompressedStepWeights
from offload.staging import copy_to_device
from workers.engine.gpu.far_rows import ContextRows
from workers.engine.gpu.shape import EngineShape


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenCompressed:
    """What the rows of a step see, and the RoPE of their positions, in all layers of one compression ratio.

    The ratio is 0 for layers without compressed rows.

    Places are numbers among the compressed rows of contexts and requests, and among their index keys.
    """

    positions: Tensor  # [batch_size] int64
    slots: Tensor  # [batch_size] int64: of the rows' requests; num_tails for idle rows
    near: Tensor  # [batch_size, window] int32: where the uncompressed rows that are seen lie; -1: none
    own: Tensor  # [batch_size] int64: where the token's own row is written; for idle rows, one that is never read
    places: Tensor  # [batch_size, most] int32: first of its context, then of its request; -1 padded
    rows: Tensor  # the same as numbers among all of a layer's rows
    lens: Tensor  # [batch_size] int32: number of places
    attended: Tensor  # [batch_size, window + most] int32: `near` and `rows`; -1: none
    written: Tensor  # [batch_size] int64: place of the compressed row that the token completes, or `nowhere`
    first: Tensor  # [batch_size] int64: position of the first token of that compressed row
    cos: Tensor  # [batch_size, rope_dim // 2] float32: of the rows' positions
    sin: Tensor
    first_cos: Tensor  # of the positions `first`
    first_sin: Tensor


class CompressedMemory(ContextRows):
    """Owns what all layers keep of contexts and requests."""

    def __init__(self, shape: EngineShape, device: torch.device) -> None:
        first = shape.compressed[0]
        self._shape, self._device, self._before = shape, device, first.window - 1
        num_own = shape.num_tails * shape.tail_capacity
        self._first_own = shape.num_contexts * self._before
        self.first_compressed = self._first_own + num_own + 1  # after one that is never read
        self.layers = [LayerMemory(shape, of, self.first_compressed, device) for of in shape.compressed]
        own = slice(self._first_own, self._first_own + num_own)
        sizes = shape.num_tails, 1, shape.tail_capacity, 2, shape.head_dim
        self.tails = [layer.rows[own].view(sizes) for layer in self.layers]
        self._lens = torch.zeros(shape.num_contexts + 1, dtype=torch.int64, device=device)  # the last: no context
        self._pending: dict[int, tuple[int, list[Tensor]]] = {}  # by context: its length, what its last tokens add

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for layer in self.layers for part in (layer.rows, layer.keys, layer.pending))

    def load(self, context_id: int, states: Sequence[CompressedState], context_len: int) -> None:
        """Load a context. No step may read it yet."""
        for layer, state in zip(self.layers, states, strict=True):
            start, end = context_id * layer.rows_of_context, (context_id + 1) * self._before
            for kept, memory, first in (
                (state.window, layer.rows, end - len(state.window)),
                (state.rows, layer.compressed, start),
                (state.keys, layer.keys, start),
            ):
                if len(kept):
                    copy_to_device(kept, memory[first : first + len(kept)])
        self._pending[context_id] = context_len, [state.pending.to(self._device) for state in states]
        self._lens[context_id] = context_len

    def unload(self, context_id: int) -> None:
        self._lens[context_id] = 0
        del self._pending[context_id]

    def begin_request(self, tail_id: int, context_id: int) -> None:
        """Copy what the context's last tokens add to compressed rows that the request's tokens will complete.

        context_id: -1 for a request without a context.
        """
        if context_id < 0:
            return
        context_len, states = self._pending[context_id]
        for layer, pending in zip(self.layers, states, strict=True):
            positions = torch.arange(context_len - len(pending), context_len, device=self._device)
            layer.pending[tail_id, positions % max(1, layer.pending.shape[1])] = pending

    def find(self, rows: StepRows, weights: Sequence[CompressedStepWeights]) -> dict[int, SeenCompressed]:
        """Return what the step's rows see, by the layers' ratio. weights: of the layers, with their RoPE angles."""
        shape, positions, is_active = self._shape, rows.positions, rows.tail_lens > 0
        slots = torch.where(is_active, rows.tail_ids.long(), shape.num_tails)
        contexts = rows.context_ids.long()
        context_lens = self._lens[contexts]
        near = self._near(positions, slots, contexts, context_lens).masked_fill(~is_active[:, None], -1).int()
        own = self._first_own + slots * shape.tail_capacity + rows.tail_lens.long() - 1
        own = torch.where(is_active, own, self.first_compressed - 1)
        by_ratio = {}
        layers = {layer.spec.ratio: (layer, of.angles) for layer, of in zip(self.layers, weights, strict=True)}
        for ratio, (layer, angles) in layers.items():
            tokens = max(1, ratio)
            num_of_context, num_seen = context_lens // tokens, torch.where(is_active, (positions + 1) // tokens, 0)
            numbers = torch.arange(layer.rows_of_context + layer.rows_of_request, device=self._device)
            far = contexts[:, None] * layer.rows_of_context + numbers
            requests = shape.num_contexts * layer.rows_of_context
            first_own = requests + slots * layer.rows_of_request - num_of_context
            places = torch.where(numbers < num_of_context[:, None], far, first_own[:, None] + numbers)
            places = places.masked_fill(numbers >= num_seen[:, None], -1).int()
            in_layer = torch.where(places >= 0, places + self.first_compressed, -1)
            ends = is_active & ((positions + 1) % tokens == 0)
            first = (positions + 1 - tokens).clamp(min=0)
            (cos, sin), (first_cos, first_sin) = (_cos_sin(at, angles) for at in (positions, first))
            by_ratio[ratio] = SeenCompressed(
                positions=positions,
                slots=slots,
                near=near,
                own=own,
                places=places,
                rows=in_layer,
                lens=num_seen.int(),
                attended=torch.cat((near, in_layer), dim=1),
                written=torch.where(ends, first_own + num_seen - 1, layer.nowhere),
                first=first,
                cos=cos,
                sin=sin,
                first_cos=first_cos,
                first_sin=first_sin,
            )
        return by_ratio

    def _near(self, positions: Tensor, slots: Tensor, contexts: Tensor, context_lens: Tensor) -> Tensor:
        """Return where the uncompressed rows that are seen lie: [batch_size, window] int64; -1: before position 0."""
        before, (contexts, context_lens) = self._before, (contexts[:, None], context_lens[:, None])
        at = positions[:, None] - before + torch.arange(before + 1, device=self._device)
        of_context = contexts * before + at - context_lens + before
        of_own = self._first_own + slots[:, None] * self._shape.tail_capacity + at - context_lens
        return torch.where(at < context_lens, of_context, of_own).masked_fill(at < 0, -1)


def _cos_sin(positions: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of RoPE, [batch_size, rope_dim // 2] each."""
    phases = positions.float()[:, None] * angles
    return phases.cos(), phases.sin()


class LayerMemory:
    """What one layer keeps.

    rows: [first_compressed + num_rows, head_dim], of which `compressed` is a view from `first_compressed` on; keys:
    [num_rows, index head_dim], empty without an indexer; pending: [num_tails + 1, num_pending, 2 * sum of
    compressed_widths] float32.
    """

    def __init__(self, shape: EngineShape, of: CompressedSpec, first_compressed: int, device: torch.device) -> None:
        self.spec = of
        self.rows_of_context = shape.max_context_len // of.ratio if of.ratio else 0
        self.rows_of_request = shape.tail_capacity // of.ratio + 1 if of.ratio else 0
        self.nowhere = shape.num_contexts * self.rows_of_context + shape.num_tails * self.rows_of_request
        num_rows = self.nowhere + 1  # the last one is never read
        self.rows = torch.zeros(first_compressed + num_rows, of.head_dim, dtype=shape.dtype, device=device)
        self.compressed = self.rows[first_compressed:]
        self.keys = torch.zeros(num_rows if of.index_dim else 0, of.index_dim, dtype=shape.dtype, device=device)
        # a ring buffer, by position: a step's tokens must not overwrite those that its compressed rows are made of
        num_pending = max(shape.batch_sizes) + of.span if of.ratio else 0
        width = 2 * sum(of.compressed_widths)
        self.pending = torch.zeros(shape.num_tails + 1, num_pending, width, dtype=torch.float32, device=device)


def compressed_bytes(shape: EngineShape) -> int:
    """Device memory of contexts and requests, which is allocated from the start."""
    return CompressedMemory(shape, torch.device("meta")).nbytes


def compressed_working_bytes(shape: EngineShape) -> int:
    """Device memory of `SeenCompressed`, of scores, and of temporaries of `find`: numbers of at most 8 bytes."""
    seen = [shape.compressed[0].window]
    for ratio in {of.ratio for of in shape.compressed if of.ratio}:
        seen.append((shape.max_context_len + shape.tail_capacity) // ratio + 1)
    return sum(seen) * (8 * sum(shape.batch_sizes) + 24 * max(shape.batch_sizes))
