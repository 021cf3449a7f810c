"""Where the build of one context in pieces stands, and what can be done next. Decides; others carry it out."""

import time
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from csattn.artifact import ArtifactWriter, cache_store, remote_store, require_space
from csattn.artifact.handover import has_shard
from index_build.batch import JobProgress, JobResult, Outcome
from index_build.job_list import Job
from index_build.pieces import Plan, head_groups, is_ready

MAX_ATTEMPTS = 5  # per piece: nodes may be lent for minutes
# Queries that wait for their index: so much of a disk a context may take besides its artifact.
_HANDOVER_BYTES = 16 * 2**30
_PREFILL_SHARE = 0.75  # of a build's time, about: for the display


@dataclass(frozen=True, slots=True)
class Piece:
    """Something to be done for one context by anybody."""

    kind: Literal["plan", "prefill", "index", "join", "upload"]
    job_idx: int
    layer_idx: int = -1  # of prefill: the first layer that is not there
    stop_layer: int = -1  # of prefill
    heads: range = range(0)  # of index: KV heads


class _BusyError(Exception):
    """Somebody else is building this artifact."""


class ContextBuild:
    """Holds the artifact's lock from the plan to the end, and knows which pieces are done, in work, or can be done."""

    def __init__(self, job_idx: int, job: Job, store: Path | str, heads_per_piece: int | None = None):
        self.job_idx, self.job = job_idx, job
        self.plan: Plan | None = None
        self.result: JobResult | None = None  # as soon as nothing more can be done
        self._remote = remote_store(store)
        self.store = Path(store).absolute() if self._remote is None else cache_store()  # where the pieces are done
        self._heads_per_piece = heads_per_piece
        self._writer: ArtifactWriter | None = None
        self._ready: set[int] = set()  # layers that need no prefill
        self._shards: dict[int, set[int]] = {}  # of a layer in work: the groups of heads that are done
        self._in_work: set[Piece] = set()
        self._losses: Counter[Piece] = Counter()
        self._built: Counter[str] = Counter()
        self._first_share = 0.0
        self._outcome: Outcome = "built"
        self._is_uploading = False
        self._rows: tuple[int, int] = (-1, 0)  # a layer in prefill, and how many of its rows are done
        self._is_refused = False  # the lock: somebody else has it
        self._started_s: float | None = None

    def due(self) -> list[Piece]:
        """What can be done now and is not in work; what comes first is needed first."""
        if self.result is not None:
            return []
        if self.plan is None:
            pieces = [Piece("plan", self.job_idx)]
        elif self._is_uploading:
            pieces = [Piece("upload", self.job_idx)]
        elif self._writer is None and not self._open():
            pieces = []
        else:
            pieces = self._due_index() + self._due_prefill()
        return [piece for piece in pieces if piece not in self._in_work]

    def start(self, piece: Piece) -> None:
        self._started_s = self._started_s or time.perf_counter()
        self._in_work.add(piece)

    def settle(self, piece: Piece, value: Any) -> None:
        """Take what the function of `pieces` for it returned."""
        self._in_work.discard(piece)
        if piece.kind == "plan":
            self.plan = value
            return
        if piece.kind == "upload":
            self._end(self._outcome)
            return
        assert self._writer is not None
        self._built[piece.kind] += int(value)
        if piece.kind == "prefill":
            self._ready |= set(range(piece.layer_idx, piece.stop_layer))
        elif piece.kind == "join" or len(self.groups) == 1:
            self._writer.take_layer(piece.layer_idx)
        else:
            self._shards[piece.layer_idx].add(piece.heads.start)
        self._finish_if_complete()

    def lose(self, piece: Piece, reason: str) -> None:
        """Whoever did it died: it is due again, unless that happens too often."""
        self._in_work.discard(piece)
        self._losses[piece] += 1
        if self._losses[piece] >= MAX_ATTEMPTS:
            self.fail(f"its worker died {MAX_ATTEMPTS} times, last of {reason}")

    def fail(self, error: str) -> None:
        self._end("failed", error)

    def abandon(self) -> None:
        """Give the artifact's lock back; what was done stays."""
        if self._writer is not None:
            self._writer.__exit__(None, None, None)
            self._writer = None

    def add_rows(self, layer_idx: int, num_rows: int) -> None:
        """That many rows of a layer have been prefilled."""
        self._rows = (layer_idx, num_rows)

    @property
    def url(self) -> str | None:
        """Of the store, if it is not a directory."""
        return None if self._remote is None else self._remote.url

    @property
    def is_waiting(self) -> bool:
        """Whether somebody else is building this artifact."""
        return self._is_refused and self.result is None

    @property
    def progress(self) -> JobProgress | None:
        """None as long as nobody has read the context."""
        if self.plan is None:
            return None
        context_len = self.plan.spec.context_len
        if self._is_uploading:
            return JobProgress(self.job_idx, context_len, self._first_share, 1.0, "uploading")
        if self.is_waiting:
            return JobProgress(self.job_idx, context_len, 0.0, 0.0, "waiting for another builder of it")
        if self._writer is None:
            return JobProgress(self.job_idx, context_len, 0.0, 0.0, "ready to begin")
        where = f"{len(self._ready)} layers prefilled, {self._num_finished} of {self._num_layers} indexed"
        return JobProgress(self.job_idx, context_len, self._first_share, self._share, where)

    @cached_property
    def groups(self) -> list[range]:
        """KV heads that are indexed together."""
        assert self.plan is not None
        return head_groups(self.plan.spec, self._heads_per_piece)

    @property
    def _num_layers(self) -> int:
        assert self.plan is not None
        return self.plan.spec.model.num_layers

    @property
    def _num_finished(self) -> int:
        assert self._writer is not None
        return sum(self._writer.is_finished(layer_idx) for layer_idx in range(self._num_layers))

    @property
    def _share(self) -> float:
        assert self.plan is not None
        layer_idx, num_rows = self._rows
        prefilled = len(self._ready) + (num_rows / self.plan.spec.context_len if layer_idx not in self._ready else 0.0)
        return (_PREFILL_SHARE * prefilled + (1 - _PREFILL_SHARE) * self._num_finished) / self._num_layers

    def _open(self) -> bool:
        """Take the artifact's lock and see what is there; False while somebody else has it."""
        assert self.plan is not None
        if self._remote is not None and self._remote.holds(self.plan.spec.artifact_id):
            self._end("reused")
            return False
        writer = ArtifactWriter(self.store, self.plan.spec, self.plan.token_ids, _refuse_to_wait)
        try:
            writer.__enter__()
        except _BusyError:
            self._is_refused = True
            return False
        self._is_refused = False
        self._writer = writer
        if writer.finished_path is not None:
            self._publish("reused")
            return False
        require_space(self.store, writer.remaining_bytes)
        self._look()
        self._first_share = self._share
        self._finish_if_complete()
        return self.result is None and not self._is_uploading

    def _look(self) -> None:
        """See which layers have been handed over since."""
        assert self._writer is not None
        for layer_idx in range(self._num_layers):
            if layer_idx not in self._ready and is_ready(self._writer.work, layer_idx):
                self._ready.add(layer_idx)

    def _due_index(self) -> list[Piece]:
        assert self._writer is not None
        self._look()
        pieces = []
        for layer_idx in sorted(self._ready):
            if self._writer.is_finished(layer_idx):
                continue
            if layer_idx not in self._shards:
                done = {heads.start for heads in self.groups if has_shard(self._writer.work, layer_idx, heads)}
                self._shards[layer_idx] = done
            missing = [heads for heads in self.groups if heads.start not in self._shards[layer_idx]]
            pieces += [Piece("index", self.job_idx, layer_idx, heads=heads) for heads in missing]
            pieces += [] if missing else [Piece("join", self.job_idx, layer_idx)]
        return pieces

    def _due_prefill(self) -> list[Piece]:
        assert self.plan is not None
        spec = self.plan.spec
        if len(self._ready) == self._num_layers or any(piece.kind == "prefill" for piece in self._in_work):
            return []
        item_bytes = 4 if spec.kv_dtype == "float32" else 2
        query_bytes = spec.model.num_q_heads * spec.context_len * spec.model.head_dim * item_bytes
        num_ahead = max(1, _HANDOVER_BYTES // query_bytes)
        num_waiting = len(self._ready) - self._num_finished
        if num_waiting > num_ahead // 2:
            return []
        first = next(layer_idx for layer_idx in range(self._num_layers) if layer_idx not in self._ready)
        stop = min(self._num_layers, first + max(1, num_ahead - num_waiting))
        return [Piece("prefill", self.job_idx, first, stop)]

    def _finish_if_complete(self) -> None:
        assert self._writer is not None and self.plan is not None
        if self.result is None and self._writer.finished_layers == self._num_layers:
            self._writer.finish(self.plan.versions, self.plan.notes)
            self._publish("resumed" if self._first_share else "built")

    def _publish(self, outcome: Outcome) -> None:
        """The artifact is whole on this machine; a store behind a URL needs it there."""
        self._outcome = outcome
        if self._remote is None:
            self._end(outcome)
        else:
            self.abandon()
            self._is_uploading = True

    def _end(self, outcome: Outcome, error: str | None = None) -> None:
        self.abandon()
        artifact_id = None if error or self.plan is None else self.plan.spec.artifact_id
        place = self.store if self._remote is None else self._remote.url
        self.result = JobResult(
            self.job,
            outcome,
            0.0 if self._started_s is None else time.perf_counter() - self._started_s,
            artifact_id,
            None if artifact_id is None else f"{place}/{artifact_id}" if self._remote else Path(place) / artifact_id,
            0 if self.plan is None else self.plan.spec.context_len,
            error,
            1 + max(self._losses.values(), default=0),
            self._built["prefill"],
            self._built["index"],
        )


def _refuse_to_wait() -> None:
    raise _BusyError
