"""csattn's attention on the device by itself: a batch's steps in layer after layer, as an engine runs them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.decode.baselines import TOLERANCE, relative_error
from bench.decode.gpu_timing import num_input_sets
from bench.decode.options import Options
from bench.decode.placements import device_steps, least_bytes
from bench.decode.prepared import TAIL_LEN
from bench.decode.roofline import full_bytes, index_bytes
from bench.decode.variants import of_variant
from bench.decode.widened import NUM_WIDE_LAYERS
from bench.decode.workload import Workload
from bench.timing import gate
from csattn.attention import merge_state
from csattn.rest import moments_of
from csattn.rest.reference import estimate_rest
from csattn.search.device import DeviceSketch, place_codes
from csattn.sketch import SketchIndex, reference
from csattn.sketch.codes import FINE_CODES
from workers.model import StepAttention

SET_BYTES = 48 << 30  # device memory for input sets
MOST_SETS = 64
LEAST_CALLS = 8  # calls in one graph, at least

Rest = tuple[Tensor, Tensor]  # out [head_dim] and lse


class SparseOp:
    """A variant's search and attention, ready to be timed. Layers are input sets, more than the L2 cache holds."""

    def __init__(self, work: Workload, options: Options, variant: str) -> None:
        config, search = of_variant(variant, options.search)
        self.work, self.search = work, search
        self.moved = least_bytes(work, options, config, search)
        stored = full_bytes(options.shape, work.context_len) + index_bytes(options.shape, config, work.context_len)
        self.stored_bytes = work.num_contexts * stored
        wanted = num_input_sets(sum(self.moved.values()), MOST_SETS)
        self.num_sets = int(max(1, min(wanted, SET_BYTES // self.stored_bytes)))
        of_sets = options.of_layers(self.num_sets)
        self.shape, loaded = of_sets.shape, device_steps(work, of_sets, config, search)
        self.steps, self.kv, self.index = loaded.steps, loaded.kv[0], loaded.index[0]
        self.steps.tails.normal_()
        self._calls = RecordedCalls(self.steps, work)
        self.calls, self.out = self._calls.calls, self._calls.out

    def check(self) -> None:
        """Raise GateError if selections have the wrong number or order, or if attention is off."""
        self.calls[0]()
        for request, head in ((0, 0), (self.work.batch_size - 1, self.shape.num_q_heads - 1)):
            error = relative_error(self.out[request, head], self._wanted(request, head))
            gate(error < TOLERANCE, f"attention to the selected rows is off by {error:.3f} in head {head}")

    def _wanted(self, request: int, head: int) -> Tensor:
        """Return the expected output of a query head in the first call, [head_dim]. All contexts have equal rows."""
        selection = self.steps.chosen(0, self._calls.rows)
        index_head = head * selection.valid_len.shape[1] // self.shape.num_q_heads
        kv_head = head * self.shape.num_kv_heads // self.shape.num_q_heads
        middle = slice(self.search.sink_len, self.work.context_len - self.search.window_len)
        valid, top_k = int(selection.valid_len[request, index_head]), self.search.top_k(self.work.context_len)
        gate(valid == top_k, f"{valid} rows are selected, {top_k} were wanted")
        chosen = selection.kv_indices[request, index_head, :valid].long()
        inside = int(chosen[0]) >= middle.start and int(chosen[-1]) < middle.stop
        gate(inside and bool((chosen.diff() > 0).all()), "selected rows are not ascending, or are resident ones")
        kv, tail = self.kv[kv_head], self.steps.tails[0, request, kv_head, :TAIL_LEN]
        seen = torch.cat([kv[: middle.start], kv[chosen], kv[middle.stop :], tail]).float()
        q = self._calls.q[0, request, head].float()
        scores = seen[:, 0] @ q * self.shape.softmax_scale
        out, lse = scores.softmax(0) @ seen[:, 1], scores.logsumexp(0)
        rest = self._rest(q.cpu(), kv_head, middle, chosen.cpu())
        return out if rest is None else merge_state(out, lse, *(x.to(out.device) for x in rest))[0]

    def _rest(self, q: Tensor, kv_head: int, middle: slice, chosen: Tensor) -> Rest | None:
        """Return attention to the rows that are not selected, by definition, or None if they are dropped."""
        scale = self.shape.softmax_scale
        if self.search.rest == "sketch":
            is_rest = np.zeros((1, self.work.context_len), np.bool_)
            is_rest[0, middle] = True
            is_rest[0, chosen.numpy()] = False
            assert isinstance(self.index, DeviceSketch)
            of_head = on_host(self.index, self.work.context_len, kv_head)
            out, lse = reference.attend_rest(q[None].numpy(), of_head, is_rest, scale)
        elif self.search.rest == "moments":
            moments = moments_of([self.kv[kv_head, None, middle]])
            num_chosen, num_rows = np.array([[len(chosen)]], np.int32), np.array([middle.stop - middle.start])
            outs, lses = estimate_rest(q[None, None].numpy(), moments, num_chosen, num_rows, scale)
            out, lse = outs[0], lses[0]
        else:
            return None
        return torch.from_numpy(out)[0], torch.from_numpy(lse)[0]


class RecordedCalls:
    """Calls to the layers of an attention in turn, each with the recorded queries of one step."""

    def __init__(self, attention: StepAttention, work: Workload) -> None:
        num_layers = len(attention.tails)
        queries = [work.queries(layer_idx) for layer_idx in range(min(NUM_WIDE_LAYERS, num_layers))]
        num_calls = -(-LEAST_CALLS // num_layers) * num_layers
        layers = [i % num_layers for i in range(num_calls)]
        self.q = torch.stack(  # [num_calls, batch_size, num_q_heads, head_dim]
            [queries[layer_idx % len(queries)][i % len(queries[0])] for i, layer_idx in enumerate(layers)]
        )
        self.out = torch.full_like(self.q[0], torch.nan)
        self.rows = work.step_rows(TAIL_LEN)

        def call(i: int) -> Callable[[], None]:
            return lambda: attention.attend(layers[i], self.q[i], self.rows, self.out)

        self.calls = [call(i) for i in range(num_calls)]


def on_host(index: DeviceSketch, context_len: int, head: int) -> SketchIndex:
    """Return one head's part of an index, as the definition reads it."""

    def of_head(part: Tensor) -> NDArray[Any]:
        return part[head, None].cpu().numpy()

    num_words, num_coords = index.codes.shape[2], index.query_transform.shape[3]
    return SketchIndex(
        codes=place_codes(index.codes[head, None]).cpu().numpy().view(np.uint32),
        marks=of_head(index.marks).view(np.uint32),
        num_fine=2 * num_words - num_coords // FINE_CODES,  # a coarse word holds twice as many
        segment_starts=index.segment_starts.cpu().numpy(),
        key_mean=of_head(index.key_mean),
        query_transform=of_head(index.query_transform),
        value_mean=of_head(index.value_mean),
        value_transform=of_head(index.value_transform),
        context_len=context_len,
    )
