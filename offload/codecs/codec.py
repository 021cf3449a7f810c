"""What encodes and decodes whole arrays of vectors, and rows of a key and a value."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offload.codecs.decoders import gather_rows, reader_address
from offload.codecs.encoders import DONE, NOT_FINITE, encode_rows
from offload.codecs.formats import KvFormat, not_finite, too_large


@dataclass(frozen=True, slots=True)
class KvCodec:
    """Rows of one head_dim in one pair of formats: each is one piece of bytes, the key's and behind them the value's.

    Definition: `reference`. Calls release the GIL, and any number may run at the same time.
    """

    form: KvFormat
    head_dim: int

    def __post_init__(self) -> None:
        self.form.row_bytes(self.head_dim)  # refuses a head_dim that does not fit

    @property
    def row_bytes(self) -> int:
        return self.form.row_bytes(self.head_dim)

    @property
    def v_offset(self) -> int:
        """Bytes from where a row begins to its value."""
        return self.form.v_offset(self.head_dim)

    @property
    def readers(self) -> tuple[int, int]:
        """Addresses of what decodes keys and values where they lie: see `reader_address`."""
        return reader_address(self.form.k), reader_address(self.form.v)

    def encode(self, kv: NDArray[np.float32]) -> NDArray[np.uint8]:
        """[..., 2, head_dim] float32 -> [..., row_bytes]. Raises CodecError for what the formats cannot keep."""
        assert kv.dtype == np.float32 and kv.shape[-2:] == (2, self.head_dim), f"got {kv.shape} of {kv.dtype}"
        coded = np.empty((*kv.shape[:-2], self.row_bytes), np.uint8)
        rows, flat = np.ascontiguousarray(kv).reshape(-1, 2, self.head_dim), coded.reshape(-1)
        k, v = self.form.k, self.form.v
        status, refusing = encode_rows(k.number, v.number, rows, flat, self.row_bytes, self.v_offset)
        if status != DONE:
            form = k if refusing == k.number else v
            raise not_finite(form) if status == NOT_FINITE else too_large(form)
        return coded

    def decode(self, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
        """[..., row_bytes] -> [..., 2, head_dim] float32."""
        flat = np.ascontiguousarray(rows).reshape(-1)
        numbers = np.arange(flat.size // self.row_bytes)
        return self.gather(flat, numbers).reshape(*rows.shape[:-1], 2, self.head_dim)

    def gather(self, rows: NDArray[np.uint8], numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        """Rows numbers[i] of those that lie one behind the other in `rows`: [len(numbers), 2, head_dim] float32."""
        out = np.empty((len(numbers), 2, self.head_dim), np.float32)
        k, v = self.form.k.number, self.form.v.number
        gather_rows(k, v, rows.reshape(-1), self.row_bytes, self.v_offset, numbers, out)
        return out
