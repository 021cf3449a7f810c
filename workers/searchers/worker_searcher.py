"""The engine's interface to its search workers: sends queries, collects selections, and survives lost workers."""

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np

from csattn.artifact import Artifact
from csattn.cpus import available_cpus
from csattn.errors import ConfigError, SearchLostError
from csattn.search import SearchPool
from offload.shared_memory import SharedMemory
from workers.background import BackgroundThread
from workers.engine.cpu.pool_searcher import RowSearch
from workers.searchers.channel import Channel
from workers.searchers.layer_step import LayerStep, kind_of, layer_memory
from workers.searchers.mail import ATTACH, LOAD, UNLOAD
from workers.searchers.process import ChildProcess
from workers.searchers.step_run import StepRun
from workers.searchers.step_searches import MAX_PLANS, StepPlan, StepSearches
from workers.searchers.supervisor import Contexts, Launch, Supervisor, broadcast
from workers.searchers.words import compile_words
from workers.searchers.worker import WorkerSpec

# A worker counts as hung if it makes no progress for HUNG_S, plus SLOWEST_NS for each key and query row of a record:
# about ten times what a thread needs.
HUNG_S = 1.0
SLOWEST_NS = 25.0
OWN_SPIN_US, WORKER_SPIN_US = 1000.0, 200.0  # how long client and workers spin before they sleep, given spare cores


@dataclass(frozen=True, slots=True)
class SearchersHealth:
    num_workers: int
    num_alive: int
    num_losses: int  # workers that have died or hung since the start
    num_searched_here: int  # shares that this process searched in a worker's place
    fault: str  # a recent error


class WorkerSearcher:
    """Searches like `PoolSearcher` and `StepSearches`, by workers in their own processes. For one thread at a time.

    While a lost worker is being restarted, this process searches its share: the selections are the same, only later.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        threads_per_worker: int = 1,
        cpus: Sequence[int] | None = None,  # a CPU for each of the workers' threads to be pinned to
        spin_us: float | None = None,  # how long both sides spin before they sleep; None: `choose_spins`
        launch: Launch = ChildProcess,
    ) -> None:
        """Start the workers, and wait until all are up. Raises SearchLostError if one does not come up."""
        num_threads = num_workers * threads_per_worker
        _require_sizes(num_workers, threads_per_worker, cpus)
        spins_us = (spin_us, spin_us) if spin_us is not None else choose_spins(available_cpus(), num_threads)
        compile_words()
        self._artifacts: dict[int, Artifact] = {}
        self._contexts = Contexts()
        self._own = StepSearches(SearchPool(threads_per_worker))
        self._memory: SharedMemory | None = None  # for searches of single layers, made at the first of them
        self._layers: dict[tuple[Any, ...], tuple[LayerStep, float]] = {}  # by `kind_of`; with patience_s
        self._under_way: tuple[StepRun, LayerStep, float, Sequence[RowSearch]] | None = None
        self._background = BackgroundThread("searches-in-place")  # shares of workers lost during a step
        self._num_searched_here, self._fault = 0, ""
        self.worked_ns = 0  # the longest time that a worker spent on the last layer or step
        self._supervisors: list[Supervisor] = []
        # also if it is garbage-collected without `close`, or one of the supervisors cannot be started
        self._close = weakref.finalize(self, _close, os.getpid(), self._supervisors, self._own)
        for number in range(num_workers):
            make_spec = partial(_spec, number, threads_per_worker, cpus, spins_us[1])
            self._supervisors.append(Supervisor(launch, make_spec, int(spins_us[0] * 1e3), self._contexts))
        self._await_workers()

    def load(self, context_id: int, artifact: Artifact) -> None:
        """Load a context in all workers and in this process. The artifact must stay open until `unload`."""
        assert self._under_way is None, "a search is under way; finish it first"
        if context_id in self._artifacts:
            self.unload(context_id)
        self._own.load(context_id, artifact)
        with self._contexts.lock:
            failure = broadcast(self._channels(), LOAD, f"{context_id} {artifact.path}")
            if failure is None:
                self._contexts.paths[context_id] = artifact.path
                self._artifacts[context_id] = artifact
                return
        self.unload(context_id)
        raise SearchLostError(f"a search worker cannot load {artifact.path}: {failure}")

    def unload(self, context_id: int) -> None:
        assert self._under_way is None, "a search is under way; finish it first"
        with self._contexts.lock:
            self._contexts.paths.pop(context_id, None)
            self._artifacts.pop(context_id, None)
            broadcast(self._channels(), UNLOAD, str(context_id))
        self._own.unload(context_id)
        self._layers.clear()

    def attach(self, memory: SharedMemory) -> None:
        """Use this step memory from now on; it must outlive the searches in it.

        A worker that cannot map it would search in other memory, so it is killed and restarted.
        """
        self._own.attach(memory)
        with self._contexts.lock:
            self._contexts.step_memory = memory
            channels = self._channels()
            self._fault = broadcast(channels, ATTACH, memory=memory, patience_s=HUNG_S) or self._fault
        for channel in channels:
            if channel.mail.failure is not None:
                channel.end_process()

    def run_step(self, plan: StepPlan, since: int) -> bool:
        """`StepSearches.run_step`, divided among the workers. It blocks, so call it on a thread of its own."""
        return self._finish_run(self._start_run(plan, 0, since), self._patience_s(plan))

    def start(self, layer_idx: int, searches: Sequence[RowSearch]) -> None:
        """Send each worker its share. The results of an earlier `start` without `finish` are discarded."""
        self._finish_under_way()
        step, patience_s = self._step_of(searches)
        step.write(searches)
        try:
            self._under_way = self._start_run(step.plan, layer_idx, 0), step, patience_s, searches
        except BaseException:
            self._abandon_memory()  # some workers have their request, and may write
            raise

    def finish(self) -> None:
        """Wait until every `out` is filled. Raises SearchLostError if this process cannot search either."""
        if (under_way := self._finish_under_way()) is not None:
            step, searches = under_way
            step.collect(searches)

    def health(self) -> SearchersHealth:
        """Counts of workers, losses and searches in their place. May be called from any thread."""
        supervisors = self._supervisors
        return SearchersHealth(
            num_workers=len(supervisors),
            num_alive=sum(not channel.lost for channel in self._channels()),
            num_losses=sum(supervisor.num_losses for supervisor in supervisors),
            num_searched_here=self._num_searched_here,
            fault=self._fault or next((supervisor.fault for supervisor in supervisors if supervisor.fault), ""),
        )

    def close(self) -> None:
        """End the workers."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _await_workers(self) -> None:
        for supervisor in self._supervisors:
            supervisor.came_up.wait()
            if supervisor.channel is None and not supervisor.num_losses:
                fault = supervisor.fault
                self.close()
                raise SearchLostError(f"the search workers do not start: {fault}")

    def _channels(self) -> list[Channel]:
        return [channel for supervisor in self._supervisors if (channel := supervisor.channel) is not None]

    def _start_run(self, plan: StepPlan, layer_idx: int, since: int) -> StepRun:
        channels = [supervisor.channel for supervisor in self._supervisors]
        return StepRun(plan, layer_idx, since, channels, self._own, self._background)

    def _finish_run(self, run: StepRun, patience_s: float) -> bool:
        """Wait for a run, and record its losses and errors."""
        try:
            return run.finish(patience_s)
        finally:
            self._num_searched_here += len(run.left)
            self._fault = run.fault or self._fault
            self.worked_ns = run.worked_ns

    def _finish_under_way(self) -> tuple[LayerStep, Sequence[RowSearch]] | None:
        """Wait for the run that is under way, if any, and return its step and searches."""
        if self._under_way is None:
            return None
        (run, step, patience_s, searches), self._under_way = self._under_way, None
        try:
            self._finish_run(run, patience_s)
        finally:
            if run.lost_any:
                self._abandon_memory()
        return step, searches

    def _abandon_memory(self) -> None:
        """Abandon the memory: if a process could not be killed for certain, it may still write there."""
        self._memory = None
        self._layers.clear()

    def _step_of(self, searches: Sequence[RowSearch]) -> tuple[LayerStep, float]:
        """Return the LayerStep for these searches, placed in memory that has room for it, and its patience_s."""
        kind = kind_of(searches)
        if kind not in self._layers:
            for search in searches:
                assert search.context_id in self._artifacts, f"context {search.context_id} is not loaded"
            step = LayerStep(searches, len(self._supervisors))
            if self._memory is None or step.num_bytes > len(self._memory.array):
                self._abandon_memory()  # there is none until all workers have mapped the new one
                memory = layer_memory(2 * step.num_bytes)
                self.attach(memory)
                self._memory = memory
            elif len(self._layers) >= MAX_PLANS:
                self._layers.clear()
            step.place_in(self._memory)
            self._layers[kind] = step, self._patience_s(step.plan)
        return self._layers[kind]

    def _patience_s(self, plan: StepPlan) -> float:
        records = plan.records
        num_rows = records["num_rows"] * records["num_heads"] * records["group_size"]
        lens = {int(c): self._artifacts[int(c)].spec.context_len for c in np.unique(records["context"])}
        num_keys = max((length * num_rows[records["context"] == c].max() for c, length in lens.items()), default=0)
        return HUNG_S + float(num_keys) * SLOWEST_NS * 1e-9


def choose_spins(num_cpus: int, num_threads: int) -> tuple[float, float]:
    """Choose how long client and workers spin for each other's words before they sleep, in us.

    The client spins only while it has nothing else to do, so one core besides the workers' is enough. Workers spin also
    while the client computes, so they must leave it at least half of the cores.
    """
    own_us = OWN_SPIN_US if num_cpus > num_threads else 0.0
    return own_us, WORKER_SPIN_US if num_cpus >= 2 * num_threads else 0.0


def _require_sizes(num_workers: int, threads_per_worker: int, cpus: Sequence[int] | None) -> None:
    if num_workers < 1 or threads_per_worker < 1:
        raise ConfigError(
            f"{num_workers} search workers of {threads_per_worker} threads cannot search; ask for 1 or more of each"
        )
    if cpus is not None and len(cpus) != num_workers * threads_per_worker:
        raise ConfigError(
            f"got {len(cpus)} CPUs for {num_workers} search workers of {threads_per_worker} threads; name one for each"
        )


def _spec(number: int, num_threads: int, cpus: Sequence[int] | None, spin_us: float, address: str) -> WorkerSpec:
    own = tuple(cpus[number * num_threads : (number + 1) * num_threads]) if cpus is not None else None
    return WorkerSpec(number=number, address=address, num_threads=num_threads, cpus=own, spin_us=spin_us)


def _close(pid: int, supervisors: list[Supervisor], own: StepSearches) -> None:
    if pid != os.getpid():
        return  # a forked process, to which the workers do not belong
    for supervisor in supervisors:
        supervisor.close()
    own.close()
