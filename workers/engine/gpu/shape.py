"""The sizes that an engine on a GPU is planned for, fixed from its first step to its last."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from csattn.attention.device import RowCoding
from csattn.config import RestKind, SearchConfig
from csattn.models.latent_spec import CompressedSpec, LatentSpec
from csattn.reach import Reach
from csattn.rest.device import moments_shape
from csattn.search.device import RowsShape
from csattn.sketch.own import Growth
from offload.codecs.formats import KvFormat

_CODED_ROW_UNIT = 16  # bytes that a device loads at once: coded rows are padded to a multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """All sizes of an engine: nothing is ever allocated beyond them.

    Layers are those with an index, or all layers of models of latents or compressed rows.
    """

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    num_index_heads: int
    head_dim: int
    dtype: torch.dtype
    softmax_scale: float
    search: SearchConfig
    max_context_len: int
    batch_sizes: tuple[int, ...]
    num_contexts: int = 1  # loaded at the same time
    num_tails: int = 1  # requests at the same time
    tail_capacity: int = 4096  # own rows of a request in its tail, which is on the device
    own_capacity: int | None = None  # own rows of a request, if the first of them move to the host; None: all stay
    own_slots: int = 0  # cache slots for these on the device, per layer, request and KV head
    rest: RestKind = "none"  # how rows that are neither resident nor selected are attended to
    max_segments: int = 0  # of a context's sketch
    attends_all: bool = False  # every row of a context is attended to: nothing is selected or estimated
    reads_keys: bool = False  # rows are chosen by all keys, not by an index
    searches_beside: bool = False  # its searches run beside others, on another stream
    sparse_or_full: bool = False  # steps of both kinds are captured: rows are chosen, or all are attended to
    kv_format: KvFormat | None = None  # of contexts' rows; None: plain ones. Tails are always plain
    growth: Growth | None = None  # when own rows become segments; None: all of a tail is attended to
    logit_cap: float | None = None
    has_sinks: bool = False  # heads have sink logits
    local: tuple[Reach, ...] = ()  # of the layers that keep rows without an index, which are not counted above
    local_heads: tuple[int, int] | None = None  # their number of KV heads, and head_dim; None: as above
    latents: LatentSpec | None = None  # if all layers keep latents: the model itself chooses among them
    compressed: tuple[CompressedSpec, ...] = ()  # of each layer, if all layers are of compressed attention
    # for each layer, the number of the layer whose rows of a context it attends to; empty: each has its own
    kv_sources: tuple[int, ...] = ()
    state_bytes: int = 0  # of a request or a context, in layers that keep a state instead of rows

    @property
    def max_own_rows(self) -> int:
        """Own rows of one request, in its tail and on the host."""
        return self.own_capacity or self.tail_capacity

    @property
    def max_own_segments(self) -> int:
        """Own segments of one request that can be in use."""
        growth = self.growth if self.rest == "sketch" and not self.attends_all else None
        return growth.num_segments(self.max_own_rows, self.search.window_len) if growth is not None else 0

    @property
    def max_own_len(self) -> int:
        """Rows in `max_own_segments` segments."""
        return self.max_own_segments * self.growth.segment_len if self.growth is not None else 0

    @property
    def has_separate_rest_pass(self) -> bool:
        """Whether attention to the rest takes a pass over the codes of its own: because rows are chosen by other
        queries than the layer's own, or not by codes."""
        by_others = bool(self.search.lookahead) or self.search.search_period > 1
        return self.rest == "sketch" and (by_others or self.reads_keys)

    @property
    def max_top_k(self) -> int:
        if self.latents is not None:
            return self.latents.top_k or 1
        return 1 if self.attends_all else self.search.top_k(self.max_context_len)

    @property
    def max_resident_len(self) -> int:
        """Sinks and window of a context. Requests' own rows, which are resident too, do not count."""
        return 0 if self.attends_all else self.search.sink_len + self.search.window_len

    @property
    def rows(self) -> RowsShape:
        """The shape of a context's rows in a search of all keys."""
        group_size = self.num_q_heads // self.num_kv_heads
        return RowsShape(num_index_heads=self.num_kv_heads, group_size=group_size, head_dim=self.head_dim)

    @property
    def row_bytes(self) -> int:
        """Bytes of K and V of one token in one KV head, not coded."""
        return 2 * self.head_dim * self.dtype.itemsize

    @property
    def coding(self) -> RowCoding | None:
        """How contexts' rows are coded; None: not at all. Raises CodecError if the head_dim does not fit the format."""
        if self.kv_format is None:
            return None
        return RowCoding(
            k=self.kv_format.k.name,
            v=self.kv_format.v.name,
            v_offset=self.kv_format.v_offset(self.head_dim),
            row_bytes=-(-self.kv_format.row_bytes(self.head_dim) // _CODED_ROW_UNIT) * _CODED_ROW_UNIT,
        )

    @property
    def context_row(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Sizes and dtype of a context's row: K and V of one token in one KV head."""
        coding = self.coding
        return ((2, self.head_dim), self.dtype) if coding is None else ((coding.row_bytes,), torch.uint8)

    @property
    def context_row_bytes(self) -> int:
        sizes, dtype = self.context_row
        return prod(sizes) * dtype.itemsize

    def kv_bytes(self, context_len: int) -> int:
        """Return the bytes of a context's KV in all layers."""
        if self.compressed:
            return sum(of.context_numbers(context_len) for of in self.compressed) * self.dtype.itemsize
        return (len(set(self.kv_sources)) or self.num_layers) * self.num_kv_heads * context_len * self.context_row_bytes

    @property
    def of_local(self) -> tuple[int, int]:
        """Number of KV heads, and head_dim, of the layers without an index."""
        return self.local_heads or (self.num_kv_heads, self.head_dim)

    @property
    def near_len(self) -> int:
        """How many of a request's last own rows steps read in its tail: these must stay there."""
        least = self.growth.least_near if self.growth is not None else 0
        return max(least, self.search.window_len, *(reach.num_rows for reach in self.local), 0)

    @property
    def moved_bytes(self) -> int:
        """Bytes of requests' own rows in host memory."""
        if self.own_capacity is None:
            return 0
        return self.num_layers * self.num_tails * self.num_kv_heads * self.own_capacity * self.row_bytes

    @property
    def tails_bytes(self) -> int:
        return self.num_layers * self.num_tails * self.num_kv_heads * self.tail_capacity * self.row_bytes

    @property
    def local_bytes(self) -> int:
        """Bytes of the layers without an index: contexts' last rows and requests' own, and the states of both."""
        kept = sum(min(reach.num_rows, self.max_context_len) for reach in self.local)
        rows = self.num_contexts * kept + len(self.local) * self.num_tails * self.tail_capacity
        row_bytes = 2 * prod(self.of_local) * self.dtype.itemsize  # of all heads
        return rows * row_bytes + (self.num_contexts + self.num_tails) * self.state_bytes

    @property
    def next_query_sizes(self) -> tuple[int, ...]:
        """Sizes of the query predictors: [num_contexts, num_layers, num_q_heads, head_dim + 1, head_dim]. The last
        layer's are never read."""
        return self.num_contexts, self.num_layers, self.num_q_heads, self.head_dim + 1, self.head_dim

    @property
    def next_query_bytes(self) -> int:
        """Bytes of the query predictors; 0 without lookahead."""
        looks_ahead = self.search.lookahead > 0 and not self.attends_all
        return prod(self.next_query_sizes) * self.dtype.itemsize if looks_ahead else 0

    @property
    def resident_bytes(self) -> int:
        return self.num_layers * self.num_contexts * self.num_kv_heads * self.max_resident_len * self.context_row_bytes

    @property
    def moments_bytes(self) -> int:
        """Bytes of the moments of all layers and contexts; 0 unless `rest` is moments."""
        if self.rest != "moments":
            return 0
        of_layer = prod(moments_shape(self.num_kv_heads, self.head_dim)) * self.dtype.itemsize
        return self.num_layers * self.num_contexts * of_layer

    def make_tails(self, device: torch.device) -> Tensor:
        """Allocate the tails: [num_layers, num_tails, num_kv_heads, tail_capacity, 2, head_dim]."""
        size = self.num_layers, self.num_tails, self.num_kv_heads, self.tail_capacity, 2, self.head_dim
        return torch.zeros(size, dtype=self.dtype, device=device)

    def require_context(self, layers: Sequence[Tensor]) -> int:
        """Return the length of a context, and assert that its layers have this shape."""
        assert len(layers) == self.num_layers, f"got {len(layers)} layers, wanted {self.num_layers}"
        num_kv_heads, context_len, *row = layers[0].shape
        sizes, dtype = self.context_row
        assert (num_kv_heads, *row) == (self.num_kv_heads, *sizes), f"KV is {layers[0].shape}"
        assert layers[0].dtype == dtype, f"KV is {layers[0].dtype}, planned was {dtype}"
        assert context_len <= self.max_context_len, f"{context_len} rows, planned were {self.max_context_len}"
        return context_len
