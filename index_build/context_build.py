"""Where the build of one context stands, and what can be done next. Decides; an executor carries it out."""

import time
from collections import Counter
from pathlib import Path
from typing import Literal, NamedTuple

from csattn.artifact import ArtifactWriter, cache_store, local_path, remote_store
from index_build.pieces import Piece, is_ready
from index_build.plan import Plan

MAX_ATTEMPTS = 5  # per piece: nodes may be lent for minutes
# Queries that wait for their index: so much of a disk a context may take besides its artifact.
_HANDOVER_BYTES = 16 * 2**30
_PREFILL_SHARE = 0.75  # of a build's time, about: for the display

Outcome = Literal["built", "resumed", "reused", "failed"]


class BuildState(NamedTuple):
    """How far a build is."""

    context_len: int
    first_share: float  # of the context, where this run began: more than 0 when an earlier one was interrupted
    share: float  # of the context, in all layers
    where: str  # "layer 3/30 index"


class _BusyError(Exception):
    """Another process is building this artifact."""


class ContextBuild:
    """Holds the artifact's lock from the plan to the end, and knows which pieces are done, in work, or can be done.

    plan: None has it made, by the first piece. by_layer: one process prefills and indexes each layer; otherwise prefill
    hands the layers over.
    """

    def __init__(self, store: Path | str, plan: Plan | None = None, by_layer: bool = False):
        self.plan = plan
        self.outcome: Outcome | None = None  # as soon as nothing more can be done
        self.error: str | None = None  # a sentence, when it failed
        self.resumed_at = 0  # first layer that this run found missing
        self.seconds = 0.0  # from the first piece to the outcome
        self._remote = remote_store(store)
        self.store = local_path(store) if self._remote is None else cache_store()  # where the pieces are done
        self._by_layer = by_layer
        self._writer: ArtifactWriter | None = None
        self._ready: set[int] = set()  # layers that need no prefill
        self._in_work: set[Piece] = set()
        self._losses: Counter[Piece] = Counter()
        self.built: Counter[str] = Counter()  # in this run: layers: "prefill", "index"
        self._first_share = 0.0
        self._uploaded_as: Outcome | None = None  # the outcome of the build itself, while it is uploaded
        self._rows: tuple[int, int] = (-1, 0)  # a layer in prefill, and how many of its rows are done
        self._is_refused = False  # another process has the lock
        self._started_s: float | None = None

    def due(self) -> list[Piece]:
        """What can be done now and is not in work; what comes first is needed first."""
        if self.outcome is not None:
            return []
        if self.plan is None:
            pieces = [Piece("plan")]
        elif self._uploaded_as is not None:
            assert self._remote is not None
            pieces = [Piece("upload", url=self._remote.url)]
        elif self._writer is None and not self._open():
            pieces = []
        else:
            pieces = self._due_index() + self._due_prefill()
            if not pieces and not self._in_work:  # a worker died behind its last layer
                self._finish_if_complete()
        return [piece for piece in pieces if piece not in self._in_work]

    def start(self, piece: Piece) -> None:
        self._started_s = self._started_s or time.perf_counter()
        self._in_work.add(piece)

    def settle(self, piece: Piece, value: Plan | int) -> None:
        """Take what doing it returned: the plan, or how much of it was not there before."""
        self._in_work.discard(piece)
        if isinstance(value, Plan):
            self.plan = value
            return
        if piece.kind == "upload":
            self._end(self._uploaded_as)
            return
        assert self._writer is not None
        if piece.kind in ("prefill", "layers"):
            self._ready |= set(range(piece.layer_idx, piece.stop_layer))
            self.built["prefill"] += value
        if piece.kind in ("index", "layers"):
            self.built["index"] += value
        for layer_idx in range(piece.layer_idx, max(piece.layer_idx + 1, piece.stop_layer)):
            self._writer.take_layer(layer_idx)  # of prefill, those that have no index are finished
        self._finish_if_complete()

    def lose(self, piece: Piece, reason: str) -> None:
        """Its worker died: it is due again, unless that happens too often."""
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
    def artifact_id(self) -> str | None:
        """None as long as there is no plan, and when the build failed."""
        return None if self.plan is None or self.error else self.plan.spec.artifact_id

    @property
    def url(self) -> str | None:
        """Of the artifact, if the store is behind one."""
        return None if self._remote is None or self.plan is None else f"{self._remote.url}/{self.plan.spec.artifact_id}"

    @property
    def attempts(self) -> int:
        """More than 1 when workers died over a piece."""
        return 1 + max(self._losses.values(), default=0)

    @property
    def needs_model(self) -> bool:
        """Whether there is a plan to make, or a layer to prefill."""
        return self.outcome is None and (self.plan is None or len(self._ready) < self._num_layers)

    @property
    def is_waiting(self) -> bool:
        """Whether another process is building this artifact."""
        return self._is_refused and self.outcome is None

    @property
    def progress(self) -> BuildState | None:
        """None as long as nobody has read the context."""
        if self.plan is None:
            return None
        context_len = self.plan.spec.context_len
        if self._uploaded_as is not None:
            return BuildState(context_len, self._first_share, 1.0, "uploading")
        if self.is_waiting:
            return BuildState(context_len, 0.0, 0.0, "waiting for another builder of it")
        if self._writer is None:
            return BuildState(context_len, 0.0, 0.0, "ready to begin")
        where = f"{len(self._ready)} layers prefilled, {self._num_finished} of {self._num_layers} indexed"
        return BuildState(context_len, self._first_share, self._share, where)

    @property
    def _num_layers(self) -> int:
        assert self.plan is not None
        return self.plan.spec.model.num_layers

    def _has_index(self, layer_idx: int) -> bool:
        assert self.plan is not None
        return layer_idx in self.plan.spec.model.indexed_layers

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
        """Take the artifact's lock and see what is there; False while another process has it."""
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
        writer.require_space()
        self._look()
        self._first_share = self._share
        missing = (layer_idx for layer_idx in range(self._num_layers) if layer_idx not in self._ready)
        self.resumed_at = next(missing, self._num_layers)
        self._finish_if_complete()
        return self._writer is not None

    def _look(self) -> None:
        """See which layers have been handed over, or finished, since."""
        assert self._writer is not None
        for layer_idx in range(self._num_layers):
            if layer_idx not in self._ready and is_ready(self._writer.work, layer_idx):
                self._ready.add(layer_idx)
                self._writer.take_layer(layer_idx)

    def _due_index(self) -> list[Piece]:
        assert self._writer is not None
        self._look()
        unfinished = [layer_idx for layer_idx in sorted(self._ready) if not self._writer.is_finished(layer_idx)]
        return [Piece("index", layer_idx) for layer_idx in unfinished if self._has_index(layer_idx)]

    def _due_prefill(self) -> list[Piece]:
        assert self.plan is not None
        spec = self.plan.spec
        missing = [layer_idx for layer_idx in range(self._num_layers) if layer_idx not in self._ready]
        if not missing or any(piece.kind in ("prefill", "layers") for piece in self._in_work):
            return []
        if self._by_layer:
            return [Piece("layers", missing[0], self._num_layers)]
        item_bytes = 4 if spec.kv_dtype == "float32" else 2
        query_bytes = spec.model.num_q_heads * spec.context_len * spec.model.head_dim * item_bytes
        num_ahead = max(1, _HANDOVER_BYTES // query_bytes)
        num_waiting = len(self._ready) - self._num_finished
        if num_waiting > num_ahead // 2:
            return []
        return [Piece("prefill", missing[0], min(self._num_layers, missing[0] + max(1, num_ahead - num_waiting)))]

    def _finish_if_complete(self) -> None:
        assert self._writer is not None and self.plan is not None
        if self._writer.finished_layers == self._num_layers:
            self._writer.finish(self.plan.versions, self.plan.notes)
            self._publish("resumed" if self._first_share else "built")

    def _publish(self, outcome: Outcome) -> None:
        """The artifact is whole on this machine; a store behind a URL needs it there."""
        if self._remote is None:
            self._end(outcome)
        else:
            self.abandon()
            self._uploaded_as = outcome

    def _end(self, outcome: Outcome | None, error: str | None = None) -> None:
        self.abandon()
        self.outcome, self.error = outcome, error
        self.seconds = 0.0 if self._started_s is None else time.perf_counter() - self._started_s


def _refuse_to_wait() -> None:
    raise _BusyError
