"""Attention over coded rows equals, bit for bit, attention over the decoded rows in float32, and reads no others."""

from dataclasses import dataclass, replace

import pytest
import torch

from offload.codecs.codec import KvCodec
from offload.codecs.formats import FORMATS, KvFormat
from tests.attention.test_in_place import Row, make_row, run

FORMS = [*FORMATS, "k=q8_0,v=q4_0", "k=bfloat16,v=fp8"]


@dataclass(frozen=True)
class CodedRow(Row):
    """A row whose context is coded. Coded rows that it must not read would decode to NaN."""

    codec: KvCodec
    coded: torch.Tensor  # [num_kv_heads, context_len, row_bytes] uint8

    @property
    def memory(self) -> torch.Tensor:
        return self.coded

    @property
    def layout(self) -> tuple[int, int, int, int]:
        return self.codec.row_bytes, self.codec.v_offset, *self.codec.readers


def code(row: Row, codec: KvCodec) -> tuple[CodedRow, Row]:
    """Return the row with its context coded, and the row over the decoded context, both in float32."""
    read = ~row.context[:, :, 0, 0].isnan()
    coded = torch.from_numpy(codec.encode(row.context.float().nan_to_num().numpy()))
    coded[~read] = 0xFF
    decoded = torch.from_numpy(codec.decode(coded.numpy()))
    assert decoded[~read].isnan().all()
    plain = replace(row, context=decoded, tail=row.tail.float())
    return CodedRow(**vars(row), codec=codec, coded=coded), plain


def rows_of_all_kinds(dtype: torch.dtype, head_dim: int) -> list[Row]:
    return [
        make_row(dtype, (6, 2, num_index_heads), head_dim, context_len, near, top_k, tail_len, 40)
        for num_index_heads, context_len, near, top_k, tail_len in [
            (2, 1, (0, 0), 0, 1),
            (2, 50, (0, 50), 1, 1),  # one row of the context, one of the tail
            (6, 300, (4, 250), 16, 40),  # one selection per query head
            (2, 255, (255, 255), 0, 1),  # exactly one range
            (2, 256, (256, 256), 0, 9),  # a range of the context, and one of the tail
            (6, 1000, (10, 800), 333, 17),
        ]
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("text", FORMS)
def test_attention_to_coded_rows_has_the_bits_of_decoded_ones(text: str, dtype: torch.dtype) -> None:
    codec = KvCodec(KvFormat.parse(text), 32)
    coded, plain = zip(*(code(row, codec) for row in rows_of_all_kinds(dtype, 32)), strict=True)
    got = run(list(coded))
    assert torch.equal(got, run(list(plain)))
    assert not got.isnan().any()


@pytest.mark.parametrize("head_dim", [15, 80, 128])
def test_attention_to_coded_rows_has_the_bits_of_decoded_ones_for_any_head_dim(head_dim: int) -> None:
    codec = KvCodec(KvFormat.parse("fp8"), head_dim)
    coded, plain = zip(*(code(row, codec) for row in rows_of_all_kinds(torch.float32, head_dim)), strict=True)
    assert torch.equal(run(list(coded)), run(list(plain)))


def test_a_rows_bits_do_not_depend_on_rows_of_other_formats_in_the_step() -> None:
    """A step may have rows over contexts of different formats."""
    rows: list[Row] = []
    for row, text in zip(rows_of_all_kinds(torch.float32, 64), FORMS, strict=False):
        rows += [row, code(row, KvCodec(KvFormat.parse(text), 64))[0]]
    alone = torch.cat([run([row]) for row in rows])
    assert torch.equal(run(rows, num_threads=3), alone)
    assert torch.equal(run(rows[::-1]).flip(0), alone)


def test_attention_to_q8_0_rows_is_within_0_02_of_the_original() -> None:
    row = make_row(torch.float32, (6, 2, 2), 64, 500, (4, 400), 90, 5, 8)
    coded, _ = code(row, KvCodec(KvFormat.parse("q8_0"), 64))
    torch.testing.assert_close(run([coded])[0], row.want(), rtol=0, atol=0.02)
