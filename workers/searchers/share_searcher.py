"""Searches as a mail asks for them: what a worker does, and the client itself while a worker is away."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from csattn.artifact import Artifact
from csattn.artifact.share import index_of_heads
from csattn.errors import SearchLostError
from csattn.search import LayerSearch, SearchPool, TokenSelections
from csattn.sketch import SketchIndex
from workers.searchers.mail import (
    CONTEXT,
    FIRST_HEAD,
    HEADS,
    KV_AT,
    LAYER,
    LEN_AT,
    Q_AT,
    REST_AT,
    ROWS,
    SCALE,
    SINCE,
    SINK,
    TOP_K,
    WINDOW,
    Mail,
)
from workers.searchers.step_searches import STEP_SEARCH, StepSearches

MAX_KEPT = 4096  # requests whose searches are kept: as many as layers times kinds of steps that come up again


class ShareSearcher:
    """Open contexts and a pool. Keeps nothing of a request: selections depend on the query and the context alone."""

    def __init__(self, num_threads: int, cpus: Sequence[int] | None = None) -> None:
        self._pool = SearchPool(num_threads, cpus)  # cpus: of its own threads, one less than num_threads
        self._artifacts: dict[int, Artifact] = {}
        self.steps = StepSearches(self._pool)
        self._step: NDArray[np.void] = np.zeros(0, STEP_SEARCH)  # the records of the last step

    @property
    def context_ids(self) -> tuple[int, ...]:
        return tuple(self._artifacts)

    def load(self, context_id: int, artifact: Artifact) -> None:
        """Check every layer's index, and search once so that nothing is left to compile or to open."""
        artifact.indexes()
        self._pool.search_layers([_first_search(artifact)])
        self._artifacts[context_id] = artifact
        self.steps.load(context_id, artifact)

    def unload(self, context_id: int, mail: Mail) -> Artifact | None:
        """Forget the context and searches over it that are kept with the mail."""
        mail.kept.clear()
        self.steps.unload(context_id)
        return self._artifacts.pop(context_id, None)

    def search(self, mail: Mail) -> None:
        """Do what the mail's records ask for. Searches over the same places are made once."""
        records = mail.records()
        request = int(mail.words[LAYER]), records.tobytes()
        searches: list[LayerSearch] | None = mail.kept.get(request)
        if searches is None:
            if len(mail.kept) >= MAX_KEPT:
                mail.kept.clear()
            searches = mail.kept[request] = [self._make_search(mail, record) for record in records]
        self._pool.search_layers(searches)

    def search_step(self, mail: Mail) -> None:
        """Search a step as the mail's records say, or, where it has none, those of the step before."""
        records = mail.step_records()
        if len(records):
            self._step = records.copy()
        self.steps.run(self._step, int(mail.words[SINCE]), self.steps.give_up)

    def close(self) -> None:
        self.steps.close()
        self._artifacts.clear()

    def __repr__(self) -> str:
        return f"<ShareSearcher of {len(self._artifacts)} contexts, {self._pool!r}>"

    def _make_search(self, mail: Mail, record: NDArray[np.int64]) -> LayerSearch:
        words = record.tolist()
        artifact = self._artifacts.get(words[CONTEXT])
        if artifact is None:
            raise SearchLostError(f"context {words[CONTEXT]} is not loaded here; load it before it is searched")
        rows, heads, model = words[ROWS], words[HEADS], artifact.spec.model
        index = index_of_heads(
            artifact.indexes()[int(mail.words[LAYER])], slice(words[FIRST_HEAD], words[FIRST_HEAD] + heads)
        )
        group_size = model.num_q_heads // artifact.spec.num_index_heads
        q = mail.array(words[Q_AT], (rows, heads * group_size, model.head_dim), np.float32)
        out = TokenSelections(
            mail.array(words[KV_AT], (rows, heads, words[TOP_K]), np.int32),
            mail.array(words[LEN_AT], (rows, heads), np.int32),
            mail.array(words[REST_AT], (rows, q.shape[1], q.shape[2] + 2), np.float32) if words[REST_AT] else None,
        )
        scale = float(record[SCALE : SCALE + 1].view(np.float64)[0])
        return LayerSearch(q, index, None, words[SINK], words[WINDOW], scale, out)


def _first_search(artifact: Artifact) -> LayerSearch:
    """A search whose answer is of no interest, with all stages that a search of the context may have."""
    model, num_heads = artifact.spec.model, artifact.spec.num_index_heads
    q = np.ones((1, model.num_q_heads, model.head_dim), np.float32)
    index, rest = artifact.indexes()[0], None
    if isinstance(index, SketchIndex):
        rest = np.empty((1, model.num_q_heads, model.head_dim + 2), np.float32)
    out = TokenSelections(np.empty((1, num_heads, 1), np.int32), np.empty((1, num_heads), np.int32), rest)
    return LayerSearch(q, index, None, 0, 0, 1.0, out)
