"""What goes into the workers' mails for one layer: planned once for each kind of step, then filled again and again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from csattn.search import TokenSelections
from workers.searchers.mail import BODY, COUNT, Mail
from workers.searchers.shares import Share, shares_of
from workers.searchers.step_searches import STEP_SEARCH, arrays_of

if TYPE_CHECKING:  # the engine's package brings in all that decodes
    from workers.engine.searcher import RowSearch

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """A share of one search."""

    search: int  # which of the layer's
    rows: slice
    q_heads: slice
    heads: slice


@dataclass(frozen=True, slots=True, eq=False)
class Letter:
    """One worker's part of a layer's searches. Compared by identity: mails keep their arrays under it."""

    pieces: tuple[Piece, ...]
    records: NDArray[np.void]  # [num_pieces] of STEP_SEARCH, but for their layer
    num_bytes: int  # that the mail has to have

    def write(self, mail: Mail, layer_idx: int, searches: Sequence["RowSearch"]) -> None:
        """Put records and queries into the mail."""
        kept = self._in(mail)
        kept.words[:] = kept.planned
        kept.layers[:] = layer_idx
        mail.words[COUNT] = len(self.pieces)
        for piece, (q, _) in zip(self.pieces, kept.arrays, strict=True):
            q[:] = searches[piece.search].q[piece.rows, piece.q_heads]

    def collect(self, mail: Mail, searches: Sequence["RowSearch"]) -> None:
        """Copy the selections from the mail to where they are wanted."""
        for piece, (_, chosen) in zip(self.pieces, self._in(mail).arrays, strict=True):
            out = searches[piece.search].out
            out.kv_indices[piece.rows, piece.heads] = chosen.kv_indices
            out.valid_len[piece.rows, piece.heads] = chosen.valid_len
            if out.rest is not None:
                out.rest[piece.rows, piece.q_heads] = chosen.rest

    def _in(self, mail: Mail) -> "_InMail":
        if self not in mail.kept:
            records = mail.array(BODY, self.records.shape, STEP_SEARCH)
            arrays = [arrays_of(mail.memory, record) for record in self.records]
            mail.kept[self] = _InMail(records.view(np.int64), self.records.view(np.int64), records["layer"], arrays)
        found: _InMail = mail.kept[self]
        return found


@dataclass(frozen=True, slots=True)
class _InMail:
    """Where a letter lies: numpy copies words several times as fast as records."""

    words: NDArray[np.int64]  # of the records
    planned: NDArray[np.int64]
    layers: NDArray[np.int64]
    arrays: list[tuple[NDArray[np.float32], TokenSelections]]


def write_letters(searches: Sequence["RowSearch"], num_workers: int) -> list[Letter]:
    """A letter for each worker; it depends on the searches' shapes and settings, not on their contents."""
    return [_write_letter(searches, worker, num_workers) for worker in range(num_workers)]


def kind_of(searches: Sequence["RowSearch"]) -> tuple[Any, ...]:
    """What letters depend on."""
    return tuple(
        (s.context_id, s.q.shape, s.out.kv_indices.shape, s.out.rest is None, s.sink_len, s.window_len, s.softmax_scale)
        for s in searches
    )


def _write_letter(searches: Sequence["RowSearch"], worker: int, num_workers: int) -> Letter:
    shares = [
        (number, share)
        for number, search in enumerate(searches)
        for share in shares_of(worker, num_workers, *search.out.valid_len.shape)
    ]
    records = np.zeros(len(shares), STEP_SEARCH)
    pieces, end = [], BODY + records.nbytes
    for record, (number, share) in zip(records, shares, strict=True):
        end = _fill(record, searches[number], share, end)
        rows = slice(share.first_row, share.first_row + share.num_rows)
        heads = slice(share.first_head, share.first_head + share.num_heads)
        group_size = int(record["group_size"])
        pieces.append(Piece(number, rows, slice(heads.start * group_size, heads.stop * group_size), heads))
    return Letter(tuple(pieces), records, end)


def _fill(record: np.void, search: "RowSearch", share: Share, end: int) -> int:
    """Say what is searched, with its arrays behind that byte. Returns where they end."""
    num_q_heads, head_dim = search.q.shape[1:]
    group_size, top_k = num_q_heads // search.out.valid_len.shape[1], search.out.kv_indices.shape[2]
    record["context"], record["head_dim"], record["group_size"] = search.context_id, head_dim, group_size
    record["num_rows"], record["first_head"], record["num_heads"] = share.num_rows, share.first_head, share.num_heads
    record["top_k"], record["sink_len"], record["window_len"] = top_k, search.sink_len, search.window_len
    record["softmax_scale"] = search.softmax_scale
    words = {"q_at": group_size * head_dim, "kv_at": top_k, "len_at": 1}  # of a row and head
    if search.out.rest is not None:
        words["rest_at"] = group_size * (head_dim + 2)
    for name, size in words.items():
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        record[name], end = begin, begin + 4 * share.num_rows * share.num_heads * size
    return end
