"""Whether an engine still decodes, after it has failed once."""

import logging

from csattn.config import SearchConfig
from workers.serving.messages import Selector
from workers.serving.request import Request
from workers.serving.step_engine import NO_CONTEXT, StepEngine, StepRow

PROBE_EVERY_S = 1.0
_log = logging.getLogger(__name__)


class Soundness:
    """Asks an engine that failed for a token: if one comes, the failure was of one step; else nothing is decoded,
    and it is asked again and again."""

    def __init__(self, engine: StepEngine) -> None:
        self.fault: str | None = None  # why nothing is decoded now
        self.next_probe_at = 0.0
        self.contexts: set[int] = set()  # loaded
        self._engine = engine
        self._config = SearchConfig()
        self._selector: Selector = "csattn"

    def probe_after(self, error: Exception, request: Request, now: float, free_slot: int) -> None:
        """A step failed; this is one of its requests."""
        _log.error("a step failed", exc_info=error)
        self._config, self._selector = request.config, request.selector
        self._probe(now, free_slot)

    def probe_if_due(self, now: float, free_slot: int) -> None:
        if now >= self.next_probe_at:
            self._probe(now, free_slot)

    def close_slot(self, slot: int, now: float) -> None:
        """A slot that cannot be closed is a fault."""
        try:
            self._engine.close_slot(slot)
        except Exception as error:
            self._set_fault(error, now)

    def _probe(self, now: float, slot: int) -> None:
        try:
            self._engine.open(slot, self._prepared_context(), self._config, self._selector)
            try:
                self._engine.step([StepRow(slot, 0)])
            finally:
                self._engine.close_slot(slot)
        except Exception as error:
            self._set_fault(error, now)
        else:
            self.fault = None

    def _prepared_context(self) -> int:
        """One that is quick to open: such as that of the request that failed, if it is still loaded."""
        config, selector = self._config, self._selector
        quick = (i for i in sorted(self.contexts) if self._engine.preparation(i, config, selector) is None)
        return next(quick, min(self.contexts, default=NO_CONTEXT))

    def _set_fault(self, error: Exception, now: float) -> None:
        if self.fault is None:
            _log.error("the engine does not decode any more", exc_info=error)
        self.fault = f"the engine does not decode any more ({type(error).__name__}: {str(error)[:200]})"
        self.next_probe_at = now + PROBE_EVERY_S
