"""PQCache as its authors' code has it: codes of all keys travel to the device a layer ahead, and are searched there."""

from collections.abc import Sequence

import torch
from torch import Tensor

from csattn.batch import DeviceSelection, StepRows
from workers.engine.batch_plan import plan_batch
from workers.engine.far_rows import FarRows
from workers.engine.resident import ResidentRows
from workers.engine.shape import EngineShape


class PqOnDeviceSteps:
    """`StepAttention` in one captured graph, of one context that all rows of a step continue."""

    lookahead = False
    in_graph = True

    def __init__(
        self,
        shape: EngineShape,
        far: FarRows,
        middle: slice,
        centroids: Sequence[Tensor],  # per layer [num_kv_heads, num_subspaces, num_centroids, subspace_dim], on device
        codes: Sequence[Tensor],  # per layer [num_subspaces, num_kv_heads, context_len] uint8, pinned
        device: torch.device,
    ) -> None:
        self.shape, self.far = shape, far
        self.tails = shape.make_tails(device)
        self._middle, self._centroids, self._codes = middle, list(centroids), list(codes)
        self._resident = ResidentRows(shape, device)
        (batch_size,) = shape.batch_sizes
        self._plan = plan_batch(shape, batch_size, device)
        self._on_device = [torch.empty_like(codes[0], device=device) for _ in range(2)]
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._there: dict[int, torch.cuda.Event] = {}

    def load(self, context_id: int, kv: Sequence[Tensor]) -> None:
        self._resident.load(context_id, kv)

    def begin_step(self, rows: StepRows) -> None: ...

    def look_ahead(self, layer_idx: int, q: Tensor, rows: StepRows) -> None: ...

    def attend(self, layer_idx: int, q: Tensor, rows: StepRows, out: Tensor) -> None:
        if layer_idx == 0:
            self._prefetch(0)
        if layer_idx in self._there:
            torch.cuda.current_stream().wait_event(self._there.pop(layer_idx))
        if layer_idx + 1 < self.shape.num_layers:
            self._prefetch(layer_idx + 1)
        selection = self._plan.selection(layer_idx)
        choose_rows(q, self._centroids[layer_idx], self._on_device[layer_idx % 2], self._middle, self.shape, selection)
        selection.valid_len.masked_fill_(rows.context_ids[:, None] < 0, 0)
        fetched = self.far.fetch(layer_idx, selection, rows.context_ids)
        self._plan.attend(layer_idx, q, self._resident, self.tails, self.far, fetched, rows, out)

    def end_step(self, rows: StepRows) -> None: ...

    def _prefetch(self, layer_idx: int) -> None:
        target, codes = self._on_device[layer_idx % 2], self._codes[layer_idx]
        if self._copies is None:
            target.copy_(codes)
            return
        self._copies.wait_stream(torch.cuda.current_stream())  # what is overwritten has been searched
        with torch.cuda.stream(self._copies):
            target.copy_(codes, non_blocking=True)
            self._there[layer_idx] = self._copies.record_event()


def choose_rows(
    q: Tensor,  # [batch_size, num_q_heads, head_dim]
    centroids: Tensor,  # [num_kv_heads, num_subspaces, num_centroids, subspace_dim] float32
    codes: Tensor,  # [num_subspaces, num_kv_heads, context_len] uint8
    middle: slice,
    shape: EngineShape,
    out: DeviceSelection,
) -> None:
    """Top-K of the group's summed softmax over products looked up by the keys' codes."""
    num_kv_heads, num_subspaces, _, subspace_dim = centroids.shape
    batch_size = len(q)
    parts = q.float().view(batch_size, num_kv_heads, -1, num_subspaces, subspace_dim)
    products = torch.einsum("bhgmd,hmcd->mbhgc", parts, centroids) * shape.softmax_scale
    size = *products.shape[1:4], codes.shape[2]
    wide = codes[:, None, :, None].expand(num_subspaces, *size)
    logits = torch.zeros(size, dtype=torch.float32, device=q.device)
    for b in range(num_subspaces):
        logits += products[b].gather(3, wide[b].long())
    worth = logits.softmax(-1).sum(2)[..., middle]
    top_k = min(shape.max_top_k, worth.shape[2])
    chosen = worth.topk(top_k, dim=2).indices.sort(2).values + middle.start
    out.kv_indices[:, :, :top_k].copy_(chosen)
    out.valid_len.fill_(top_k)
