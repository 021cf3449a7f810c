"""Health check of an engine after a failed step."""

import logging

from csattn.config import SearchConfig
from csattn.selector_names import SelectorName
from workers.serving.request import Request
from workers.serving.step_engine import NO_CONTEXT, StepEngine, StepRow

PROBE_EVERY_S = 1.0
_log = logging.getLogger(__name__)


class EngineHealth:
    """Probes an engine that failed by decoding one token. If that succeeds, only the one step was at fault; if not,
    the engine counts as broken (`fault`) and is probed again and again."""

    def __init__(self, engine: StepEngine) -> None:
        self.fault: str | None = None  # why the engine cannot decode; None: it can
        self.next_probe_at = 0.0
        self.contexts: set[int] = set()  # ids of those loaded
        self._engine = engine
        self._config = SearchConfig()
        self._selector: SelectorName = "csattn"

    def probe_after(self, error: Exception, request: Request, now: float, free_request_slot: int) -> None:
        """Probe the engine after a failed step. request: one of the step, whose settings the probe uses."""
        _log.error("a step failed", exc_info=error)
        self._config, self._selector = request.config, request.selector
        self._probe(now, free_request_slot)

    def probe_if_due(self, now: float, free_request_slot: int) -> None:
        if now >= self.next_probe_at:
            self._probe(now, free_request_slot)

    def close_request(self, request_slot: int, now: float) -> None:
        """Close a request of the engine; if that fails, the engine is at fault."""
        try:
            self._engine.close_request(request_slot)
        except Exception as error:
            self._set_fault(error, now)

    def _probe(self, now: float, request_slot: int) -> None:
        try:
            self._engine.open(request_slot, self._prepared_context(), self._config, self._selector)
            try:
                self._engine.step([StepRow(request_slot, 0)])
            finally:
                self._engine.close_request(request_slot)
        except Exception as error:
            self._set_fault(error, now)
        else:
            self.fault = None

    def _prepared_context(self) -> int:
        """A loaded context that opens quickly, as it needs no preparation; else any loaded one; else NO_CONTEXT."""
        config, selector = self._config, self._selector
        quick = (i for i in sorted(self.contexts) if self._engine.preparation(i, config, selector) is None)
        return next(quick, min(self.contexts, default=NO_CONTEXT))

    def _set_fault(self, error: Exception, now: float) -> None:
        if self.fault is None:
            _log.error("the engine has stopped decoding", exc_info=error)
        self.fault = f"the engine has stopped decoding ({type(error).__name__}: {str(error)[:200]})"
        self.next_probe_at = now + PROBE_EVERY_S
