"""Runs one step's searches on the workers. What a lost worker leaves undone is searched in this process."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from functools import partial

import numpy as np
from numpy.typing import NDArray

from csattn.errors import SearchLostError
from workers.background import BackgroundThread
from workers.searchers.channel import Channel, await_some
from workers.searchers.step_searches import StepPlan, StepSearches, in_layer, progress_of

POLL_S = 0.05  # interval at which running workers are checked


class StepRun:
    """One step in progress. The thread that makes it also waits for it in `finish`; this process's own searches run in
    a background thread.

    If a worker is lost, or makes no progress although its queries are there, its process is killed before anybody else
    writes where it would. Its flags show how far it came, and its share is continued from there.
    """

    def __init__(
        self,
        plan: StepPlan,
        layer_idx: int,  # added to the layers of the plan's records
        since: int,  # added to the records' flag values
        channels: Sequence[Channel | None],  # by worker; None: the worker is away
        own: StepSearches,
        background: BackgroundThread,
    ) -> None:
        """Send the requests to the workers. Raises SearchLostError if there is no memory for them."""
        self._layer_idx, self._since, self._own, self._background = layer_idx, since, own, background
        self._shares = [plan.share(worker, len(channels)) for worker in range(len(channels))]
        self._waiting: dict[int, Channel] = {}  # of the workers that have not answered yet
        self._stop_local = np.zeros(1, np.int64)
        self._local_search: Future[None] | None = None  # the searches in this process
        self._seen: dict[int, tuple[int, float]] = {}  # by worker: number of searches done, and since when it is that
        self.left: set[int] = set()  # workers whose shares are searched in this process
        self.lost_any = False  # a worker was lost during the step
        self.fault = ""
        self.worked_ns = 0  # the longest time that a worker spent
        try:
            for worker, (channel, share) in enumerate(zip(channels, self._shares, strict=True)):
                if not share.size:
                    continue
                if channel is not None and channel.step(plan.number, share, layer_idx, since):
                    self._waiting[worker] = channel
                else:
                    self.left.add(worker)
            self._search_left()
        except BaseException:
            self._end()
            raise

    def finish(self, patience_s: float) -> bool:
        """Wait for the step; false if it was given up. Raises SearchLostError if this process cannot search either.

        patience_s: a worker that makes no progress for so long is lost.
        """
        waiting = self._waiting
        try:
            while waiting:
                answered = await_some(list(waiting.values()), POLL_S)
                self._check_give_up()
                lost = set()
                for worker, channel in list(waiting.items()):
                    if channel not in answered:
                        is_lost = not answered and self._is_hung(worker, patience_s)
                    elif not (is_lost := channel.lost or channel.mail.failure is not None):
                        self.worked_ns = max(self.worked_ns, waiting.pop(worker).mail.worked_ns)
                    if is_lost:
                        lost.add(worker)
                        self._give_up_worker(waiting.pop(worker))
                if lost:
                    self.left |= lost
                    self._search_left()
                if self._local_search is not None and self._local_search.done():
                    self._local_search.result()  # an error in this process's own searches ends the step now
            while self._local_search is not None and not wait([self._local_search], POLL_S).done:
                self._check_give_up()
            if self._local_search is not None:
                self._local_search.result()
        except BaseException:
            self._end()
            raise
        return not self._own.give_up[0]

    def _search_left(self) -> None:
        """Search the shares of all lost workers in the background thread, beside the other workers."""
        if not self.left:
            return
        if self._local_search is not None:
            self._stop_local[0] = 1
            self._local_search.result()
            self._stop_local[0] = 0
        records = np.concatenate([self._shares[worker] for worker in sorted(self.left)], axis=1)
        self._local_search = self._background.start(partial(self._search_locally, in_layer(records, self._layer_idx)))

    def _search_locally(self, records: NDArray[np.void]) -> None:
        try:
            self._own.run_records(records, self._since, self._stop_local)
        except Exception as error:
            raise SearchLostError(
                f"a search worker is lost and its share of the step cannot be searched here "
                f"({type(error).__name__}: {error}); ask again"
            ) from error

    def _check_give_up(self) -> None:
        """Stop this process's own searches if the step was given up. Workers see that by themselves."""
        if self._own.give_up[0]:
            self._stop_local[0] = 1

    def _is_hung(self, worker: int, patience_s: float) -> bool:
        """Whether the worker has made no progress for patience_s although its next query is there, or has finished all
        searches without answering."""
        records, now = self._shares[worker].reshape(-1), time.monotonic()
        num_done, waits_for_queries = progress_of(self._own.memory, records, self._since)
        num_before, when = self._seen.get(worker, (-1, now))
        if waits_for_queries or num_done != num_before:
            self._seen[worker] = num_done, now
            return False
        return now - when > patience_s

    def _give_up_worker(self, channel: Channel) -> None:
        failure = None if channel.lost else channel.mail.failure
        if failure is None:
            self.lost_any = True
            channel.end_process()
        else:  # it reported an error, so it no longer writes
            self.fault = failure

    def _end(self) -> None:
        """Stop all searches: when this returns, nobody writes any more."""
        self._stop_local[0] = 1
        self.lost_any |= bool(self._waiting)
        for channel in self._waiting.values():
            channel.end_process()
        if self._local_search is not None:
            self._local_search.exception()
            self._local_search = None  # its exception's traceback would keep this run alive, and so the channels
