"""The context's KV in host memory in a compact format: encoded once, decoded as rows are gathered."""

from collections.abc import Sequence

import torch
from torch import Tensor

from offload.codecs.codec import KvCodec, encode_layer
from offload.codecs.formats import KvFormat
from offload.host_store import HostStore, distinct, row_numbers

_STREAM_ROWS = 4096  # rows of a piece that is decoded and attended to at once


def coded_bytes(kv: Sequence[Tensor], form: KvFormat) -> int:
    """Return the bytes that a `CodedStore` of these rows will own. Raises CodecError if head_dim does not fit."""
    return sum(layer.shape[:2].numel() for layer in distinct(kv)) * form.row_bytes(kv[0].shape[-1])


class CodedStore(HostStore):
    """Owns the coded KV of all layers. Returns rows as float32, whatever dtype they were encoded from."""

    def __init__(self, kv: Sequence[Tensor], form: KvFormat) -> None:
        """kv: per layer [num_kv_heads, context_len, 2, head_dim] of any float dtype, read once, layer by layer.

        Raises CodecError for what the format cannot keep.
        """
        self.codec = KvCodec(form, kv[0].shape[-1])
        coded = {layer.data_ptr(): encode_layer(layer, self.codec) for layer in distinct(kv)}
        self.layers = [coded[layer.data_ptr()] for layer in kv]  # [num_kv_heads, context_len, row_bytes]
        super().__init__(self.layers, _STREAM_ROWS)

    @property
    def num_bytes(self) -> int:
        return sum(layer.nbytes for layer in distinct(self.layers))

    def rows(self, layer_idx: int, rows: slice) -> Tensor:
        """Decode a contiguous range of rows: [num_kv_heads, num_rows, 2, head_dim] float32."""
        return torch.from_numpy(self.codec.decode(self.layers[layer_idx][:, rows].numpy()))

    def gather(self, layer_idx: int, kv_indices: Tensor) -> Tensor:
        """See `KvStore.gather`; the result is float32."""
        layer = self.layers[layer_idx]
        numbers = row_numbers(layer.shape, kv_indices).flatten()
        rows = self.codec.gather(layer.numpy(), numbers.numpy())
        return torch.from_numpy(rows).view(*kv_indices.shape, 2, self.codec.head_dim)
