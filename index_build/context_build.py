"""Where the build of one context stands, and what can be done next. Decides; an executor carries it out."""

import time
from collections import Counter
from pathlib import Path
from typing import Literal, NamedTuple

from csattn.artifact import ArtifactWriter, cache_store, local_path, remote_store
from index_build.board import BuildProgress
from index_build.pieces import Piece
from index_build.plan import Plan

MAX_ATTEMPTS = 5  # per piece: nodes may be lent for minutes

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

    plan: None has it made, by the first piece.
    """

    def __init__(self, store: Path | str, plan: Plan | None = None):
        self.plan = plan
        self.outcome: Outcome | None = None  # as soon as nothing more can be done
        self.error: str | None = None  # a sentence, when it failed
        self.resumed_at = 0  # first layer that this run found missing
        self.seconds = 0.0  # from the first piece to the outcome
        self._remote = remote_store(store)
        self.store = local_path(store) if self._remote is None else cache_store()  # where the pieces are done
        self._writer: ArtifactWriter | None = None
        self._is_in_work = False
        self._losses: Counter[Piece] = Counter()
        self.num_built = 0  # layers, in this run
        self._first_share = 0.0
        self._uploaded_as: Outcome | None = None  # the outcome of the build itself, while it is uploaded
        self._shown: BuildProgress | None = None
        self._is_refused = False  # another process has the lock
        self._started_s: float | None = None

    def due(self) -> Piece | None:
        """What can be done now; None while something is in work, or another process builds it, and at the end."""
        if self.outcome is not None or self._is_in_work:
            return None
        if self.plan is None:
            return Piece("plan")
        if self._uploaded_as is None and (self._writer is not None or self._open()):
            self._take_layers()  # a worker may have died behind its last one
            if self._writer is not None:
                return Piece("layers", self._writer.finished_layers)
        if self._uploaded_as is None:
            return None
        assert self._remote is not None
        return Piece("upload", url=self._remote.url)

    def start(self, piece: Piece) -> None:
        self._started_s = self._started_s or time.perf_counter()
        self._is_in_work = True

    def settle(self, piece: Piece, plan: Plan | None = None) -> None:
        """It is done. plan: what a plan's piece has made."""
        self._is_in_work = False
        if piece.kind == "plan":
            self.plan = plan
        elif piece.kind == "upload":
            self._end(self._uploaded_as)
        else:
            self._take_layers()

    def show(self, progress: BuildProgress) -> None:
        """That is where it is."""
        self._shown = progress

    def lose(self, piece: Piece, reason: str) -> None:
        """Its worker died: it is due again, unless that happens too often."""
        self._is_in_work = False
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
        """Whether there is a plan to make, or a layer."""
        return self.outcome is None and self._uploaded_as is None

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
        if (shown := self._shown) is None:
            return BuildState(context_len, self._first_share, self._first_share, "begins")
        where = f"layer {shown.layer_idx + 1}/{shown.num_layers} {shown.phase}"
        return BuildState(context_len, self._first_share, shown.share, where)

    @property
    def _num_layers(self) -> int:
        assert self.plan is not None
        return self.plan.spec.model.num_layers

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
        self.resumed_at, self._first_share = writer.finished_layers, writer.finished_layers / self._num_layers
        return True

    def _take_layers(self) -> None:
        """See which have been finished since; with the last of them the artifact is."""
        assert self._writer is not None and self.plan is not None
        for layer_idx in range(self._num_layers):
            if not self._writer.is_finished(layer_idx):
                self.num_built += self._writer.take_layer(layer_idx)
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
