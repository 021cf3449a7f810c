"""What goes into the workers' mails for one layer: planned once for each kind of step, then filled again and again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from workers.searchers.mail import BODY, CONTEXT, COUNT, RECORD_WORDS, Mail
from workers.searchers.shares import Share, shares_of

if TYPE_CHECKING:  # the engine's package brings in all that decodes
    from workers.engine.searcher import RowSearch

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """A share of one search, and where it lies in the mail."""

    search: int  # which of the layer's
    rows: slice
    q_heads: slice
    heads: slice
    top_k: int
    head_dim: int
    places: tuple[int, int, int, int]  # of queries, kv_indices, valid_len and rest; 0: that is not asked for


@dataclass(frozen=True, slots=True, eq=False)
class Letter:
    """One worker's part of a layer's searches. Compared by identity: mails keep their views under it."""

    pieces: tuple[Piece, ...]
    records: NDArray[np.int64]  # [num_pieces, RECORD_WORDS]
    num_bytes: int  # that the mail has to have

    def write(self, mail: Mail, searches: Sequence["RowSearch"]) -> None:
        """Put records and queries into the mail."""
        records, views = self._views(mail)
        records[:] = self.records
        mail.words[COUNT] = len(self.pieces)
        for piece, (q, *_) in zip(self.pieces, views, strict=True):
            q[:] = searches[piece.search].q[piece.rows, piece.q_heads]

    def collect(self, mail: Mail, searches: Sequence["RowSearch"]) -> None:
        """Copy the selections from the mail to where they are wanted."""
        _, views = self._views(mail)
        for piece, (_, kv_indices, valid_len, *rest) in zip(self.pieces, views, strict=True):
            out = searches[piece.search].out
            out.kv_indices[piece.rows, piece.heads] = kv_indices
            out.valid_len[piece.rows, piece.heads] = valid_len
            if out.rest is not None:
                out.rest[piece.rows, piece.q_heads] = rest[0]

    def _views(self, mail: Mail) -> tuple[NDArray[np.int64], list[tuple[NDArray[Any], ...]]]:
        views: tuple[NDArray[np.int64], list[tuple[NDArray[Any], ...]]] | None = mail.kept.get(self)
        if views is None:
            records = mail.array(BODY, self.records.shape, np.int64)
            views = mail.kept[self] = records, [_views_of(piece, mail) for piece in self.pieces]
        return views


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
    end = BODY + 8 * RECORD_WORDS * len(shares)
    pieces = []
    for number, share in shares:
        piece, end = _place(searches[number], number, share, end)
        pieces.append(piece)
    records = np.zeros((len(shares), RECORD_WORDS), np.int64)
    for record, piece, (number, share) in zip(records, pieces, shares, strict=True):
        search = searches[number]
        scale = int(np.float64(search.softmax_scale).view(np.int64))
        record[CONTEXT:] = (
            search.context_id,
            share.num_rows,
            share.first_head,
            share.num_heads,
            piece.top_k,
            search.sink_len,
            search.window_len,
            scale,
            *piece.places,
        )
    return Letter(tuple(pieces), records, end)


def _place(search: "RowSearch", number: int, share: Share, end: int) -> tuple[Piece, int]:
    """Where a share's arrays lie behind that byte; and their end."""
    group_size = search.q.shape[1] // search.out.valid_len.shape[1]
    head_dim, top_k = search.q.shape[2], search.out.kv_indices.shape[2]
    jobs = share.num_rows * share.num_heads
    places = []
    for num_bytes in (4 * jobs * group_size * head_dim, 4 * jobs * top_k, 4 * jobs):
        places.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = places[-1] + num_bytes
    rest_at = 0
    if search.out.rest is not None:
        rest_at = -(-end // ALIGNMENT) * ALIGNMENT
        end = rest_at + 4 * jobs * group_size * (head_dim + 2)
    rows = slice(share.first_row, share.first_row + share.num_rows)
    heads = slice(share.first_head, share.first_head + share.num_heads)
    q_heads = slice(heads.start * group_size, heads.stop * group_size)
    return Piece(number, rows, q_heads, heads, top_k, head_dim, (places[0], places[1], places[2], rest_at)), end


def _views_of(piece: Piece, mail: Mail) -> tuple[NDArray[Any], ...]:
    """Queries, kv_indices and valid_len of the piece, and its rest, if that is asked for."""
    rows, heads, q_heads = (part.stop - part.start for part in (piece.rows, piece.heads, piece.q_heads))
    q_at, kv_at, len_at, rest_at = piece.places
    rest = (mail.array(rest_at, (rows, q_heads, piece.head_dim + 2), np.float32),) if rest_at else ()
    return (
        mail.array(q_at, (rows, q_heads, piece.head_dim), np.float32),
        mail.array(kv_at, (rows, heads, piece.top_k), np.int32),
        mail.array(len_at, (rows, heads), np.int32),
        *rest,
    )
