"""The thread that owns the engine and runs the scheduler's turns until it is closed."""

import logging
import time
from threading import Thread

from workers.serving.messages import WorkerLostError, closing
from workers.serving.scheduler import Scheduler
from workers.serving.step_engine import StepEngine

_log = logging.getLogger(__name__)


class StepThread:
    """Runs the scheduler, and waits without polling: an idle service takes no CPU."""

    def __init__(self, scheduler: Scheduler, engine: StepEngine) -> None:
        self._scheduler, self._engine = scheduler, engine
        self._is_ending = False
        self._thread = Thread(target=self._run, name="csattn-steps", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self, drain_s: float) -> None:
        """Let running requests finish for up to drain_s, then end the others with an error, and close the engine.

        Blocks; new requests are refused from now on.
        """
        flow = self._scheduler.flow
        flow.closed = closing()
        deadline = time.monotonic() + drain_s
        while flow.num_in_flight and self.is_alive and time.monotonic() < deadline:
            time.sleep(0.01)
        self._scheduler.inbox.call(self._end)
        self._thread.join()

    def _end(self) -> None:
        self._is_ending = True

    def _run(self) -> None:
        scheduler = self._scheduler
        while not self._is_ending:
            try:
                idle_s = scheduler.turn()
            except Exception as error:  # a bug in the scheduler itself: its requests must not wait for ever
                _log.exception("a turn of the scheduler failed")
                scheduler.fail_all(WorkerLostError(f"the scheduler failed ({error}); send the request again"))
                continue
            if idle_s != 0.0 and not self._is_ending:
                scheduler.inbox.wait(idle_s)
        scheduler.inbox.close(closing())
        scheduler.fail_all(closing())
        self._engine.close()
