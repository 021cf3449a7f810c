"""One step's searches by workers. What a lost one leaves undone is searched here, from where it stopped."""

import select
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from functools import partial

import numpy as np
from numpy.typing import NDArray

from csattn.errors import SearchLostError
from workers.background import BackgroundThread
from workers.searchers.channel import Channel
from workers.searchers.step_searches import StepPlan, StepSearches, progress_of

LOOK_MS = 50  # how often those who work are looked at


class StepRun:
    """Runs in one thread; what is searched here, in another.

    A worker that is lost, or that does not come on though its queries are there, has its process ended before anybody
    else writes where it would. Its flags tell how far it came.
    """

    def __init__(self, channels: Sequence[Channel | None], own: StepSearches, background: BackgroundThread) -> None:
        """channels: by worker; None: it is away."""
        self._channels, self._own, self._background = channels, own, background
        self._stop_here = np.zeros(1, np.int64)
        self._here: Future[None] | None = None  # what is searched here
        self._seen: dict[int, tuple[int, float]] = {}  # by worker: how many searches it had done, since when
        self.left: set[int] = set()  # workers whose shares are searched here
        self.fault = ""

    def run(self, plan: StepPlan, since: int, patience_s: float) -> bool:
        """False if the step was given up. Raises SearchLostError where not even this process can search."""
        shares = [plan.share(worker, len(self._channels)) for worker in range(len(self._channels))]
        waiting: dict[int, Channel] = {}
        for worker, (channel, share) in enumerate(zip(self._channels, shares, strict=True)):
            if not share.size:
                continue
            if channel is not None and channel.step(plan.number, share, since):
                waiting[worker] = channel
            else:
                self.left.add(worker)
        try:
            self._search_left(shares, since)
            while waiting:
                lost = set()
                for worker in self._await_some(waiting):
                    channel = waiting[worker]
                    if channel.lost or channel.failure is not None:
                        lost.add(worker)
                    else:
                        del waiting[worker]
                lost |= {w for w in waiting if self._hangs(w, shares[w], since, patience_s)}
                for worker in lost:
                    self._give_up_worker(waiting.pop(worker))
                if lost:
                    self.left |= lost
                    self._search_left(shares, since)
                if self._here is not None and self._here.done():
                    self._here.result()  # what went wrong here ends the step now
            while self._here is not None and not wait([self._here], LOOK_MS / 1e3).done:
                self._hear_of_end()
            if self._here is not None:
                self._here.result()
        except BaseException:
            self._end(waiting)
            raise
        return not self._own.give_up[0]

    def _search_left(self, shares: Sequence[NDArray[np.void]], since: int) -> None:
        """Have the shares of those who are lost searched here, beside what the others do."""
        if not self.left:
            return
        if self._here is not None:
            self._stop_here[0] = 1
            self._here.result()
            self._stop_here[0] = 0
        records = np.concatenate([shares[worker] for worker in sorted(self.left)], axis=1)
        self._here = self._background.start(partial(self._search_here, records, since))

    def _search_here(self, records: NDArray[np.void], since: int) -> None:
        try:
            self._own.run(records, since, self._stop_here)
        except Exception as error:
            raise SearchLostError(
                f"a search worker is lost and its share of the step cannot be searched here "
                f"({type(error).__name__}: {error}); ask again"
            ) from error

    def _await_some(self, waiting: dict[int, Channel]) -> list[int]:
        """Those who have answered or are lost, as soon as there are any; nobody after LOOK_MS."""
        ready = [w for w, channel in waiting.items() if channel.lost or channel.await_word(channel.spin_ns)]
        if ready:
            return ready
        poller = select.poll()
        for channel in waiting.values():
            poller.register(channel.connection, select.POLLIN)
        heard = {fd for fd, _ in poller.poll(LOOK_MS)}
        for channel in waiting.values():
            if channel.connection.fileno() in heard and not channel.hear():
                channel.lose()
        self._hear_of_end()
        return [w for w, channel in waiting.items() if channel.lost or channel.await_word(0)]

    def _hear_of_end(self) -> None:
        """Workers see by themselves that the step is given up."""
        if self._own.give_up[0]:
            self._stop_here[0] = 1

    def _hangs(self, worker: int, share: NDArray[np.void], since: int, patience_s: float) -> bool:
        """Whether it has had its next query for so long and done nothing."""
        progress, now = progress_of(self._own.memory, share.reshape(-1), since), time.monotonic()
        num_done, when = self._seen.get(worker, (-1, now))
        if progress.waits_for_queries or progress.num_done != num_done:
            self._seen[worker] = progress.num_done, now
            return False
        return now - when > patience_s

    def _give_up_worker(self, channel: Channel) -> None:
        failure = None if channel.lost else channel.failure
        if failure is None:
            channel.end_process()
        else:  # it has said so and works no more
            self.fault = failure

    def _end(self, waiting: dict[int, Channel]) -> None:
        """Let nobody write any more."""
        self._stop_here[0] = 1
        for channel in waiting.values():
            channel.end_process()
        if self._here is not None:
            self._here.exception()
