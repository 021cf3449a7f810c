"""The engine's way to its search workers: queries down, selections up, and no worry about who is alive."""

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from csattn.artifact import Artifact
from csattn.cpus import available_cpus
from csattn.errors import ConfigError, SearchLostError
from csattn.search import SearchPool
from offload.shared_memory import SharedMemory
from workers.background import BackgroundThread
from workers.searchers.channel import Channel, await_answers
from workers.searchers.letters import Letter, kind_of, write_letters
from workers.searchers.mail import ATTACH, LOAD, UNLOAD, private_mail
from workers.searchers.process import ChildProcess
from workers.searchers.step_run import StepRun
from workers.searchers.step_searches import StepPlan, StepSearches
from workers.searchers.supervisor import Contexts, Launch, Supervisor, tell_all
from workers.searchers.words import compile_words
from workers.searchers.worker import WorkerSpec

if TYPE_CHECKING:  # the engine's package brings in all that decodes
    from workers.engine.searcher import RowSearch

HUNG_S = 1.0  # a worker that is silent for so long is taken for dead; besides, as long as a layer's search may take:
SLOWEST_NS = 25.0  # for each key and query row of the layer, about ten times what a thread needs
OWN_SPIN_US, WORKER_SPIN_US = 1000.0, 200.0  # how long either side looks before it sleeps, where cores are to spare
MAX_PLANS = 256  # kinds of steps whose letters are kept


@dataclass(frozen=True, slots=True)
class SearchersHealth:
    num_workers: int
    num_alive: int
    num_losses: int  # workers that have died or hung since the start
    num_searched_here: int  # shares that this process searched in a worker's place
    fault: str  # one of the last things that went wrong


class WorkerSearcher:
    """`Searcher` and `StepSearcher` over workers in processes of their own. Used by one thread at a time.

    While a worker that was lost is started again, its share is searched here: the selections are the same, only later.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        threads_per_worker: int = 1,
        cpus: Sequence[int] | None = None,  # that the workers' threads keep to, one each
        spin_us: float | None = None,  # how long both sides look before they sleep; None: as there are cores
        launch: Launch = ChildProcess,
    ) -> None:
        """Return when all workers are up. Raises SearchLostError if one does not come up."""
        num_threads = num_workers * threads_per_worker
        _require_sizes(num_workers, threads_per_worker, cpus)
        spins_us = (spin_us, spin_us) if spin_us is not None else choose_spins(available_cpus(), num_threads)
        compile_words()
        self._artifacts: dict[int, Artifact] = {}
        self._contexts = Contexts()
        self._own = StepSearches(SearchPool(threads_per_worker))
        self._own_mail = private_mail(0)
        self._letters: dict[tuple[Any, ...], tuple[list[Letter], float]] = {}
        self._patience_s = 0.0
        self._searches: Sequence[RowSearch] = ()
        self._layer_idx = -1
        self._asked: list[tuple[Channel, Letter]] = []
        self._not_asked: list[Letter] = []
        self._background = BackgroundThread("searches-in-place")  # of workers that are lost during a step
        self._num_searched_here, self._fault = 0, ""
        self.worked_ns = 0  # by the worker that worked longest on the last layer
        self._supervisors = []
        for number in range(num_workers):
            make_spec = partial(_spec, number, threads_per_worker, cpus, spins_us[1])
            self._supervisors.append(Supervisor(launch, make_spec, int(spins_us[0] * 1e3), self._contexts))
        self._close = weakref.finalize(
            self, _close, os.getpid(), self._supervisors, self._own
        )  # also where it is forgotten
        self._await_workers()

    def load(self, context_id: int, artifact: Artifact) -> None:
        """Load in all workers and here. The artifact stays open until `unload`."""
        assert not self._asked, "a search is under way; finish it first"
        if context_id in self._artifacts:
            self.unload(context_id)
        self._own.load(context_id, artifact)
        with self._contexts.lock:
            channels = self._channels()
            tell_all(channels, LOAD, f"{context_id} {artifact.path}")
            failures = [channel.failure for channel in channels if not channel.lost and channel.failure]
            if not failures:
                self._contexts.paths[context_id] = artifact.path
                self._artifacts[context_id] = artifact
                return
        self.unload(context_id)
        raise SearchLostError(f"a search worker cannot load {artifact.path}: {failures[0]}")

    def unload(self, context_id: int) -> None:
        assert not self._asked, "a search is under way; finish it first"
        with self._contexts.lock:
            self._contexts.paths.pop(context_id, None)
            self._artifacts.pop(context_id, None)
            tell_all(self._channels(), UNLOAD, str(context_id))
        self._own.unload(context_id)
        self._own_mail.kept.clear()
        self._letters.clear()
        for channel in self._channels():
            channel.mail.kept.clear()

    def attach(self, memory: SharedMemory) -> None:
        """Steps are searched in that memory from now on; it must live as long as they are."""
        self._own.attach(memory.array)
        with self._contexts.lock:
            self._contexts.step_memory = memory.path
            channels = self._channels()
            tell_all(channels, ATTACH, memory.path)
            failures = [channel.failure for channel in channels if not channel.lost and channel.failure]
        if failures:
            raise SearchLostError(f"a search worker cannot map the memory of the steps: {failures[0]}")

    def run_step(self, plan: StepPlan, since: int) -> bool:
        """`StepSearches.run_step`, shared out among the workers. Called by a thread that does nothing else."""
        specs = [self._artifacts[int(context)].spec for context in np.unique(plan.records["context"])]
        most_keys = max((spec.context_len * spec.model.num_q_heads for spec in specs), default=0)
        run = StepRun([supervisor.channel for supervisor in self._supervisors], self._own, self._background)
        try:
            return run.run(plan, since, HUNG_S + most_keys * SLOWEST_NS * 1e-9)
        finally:
            self._num_searched_here += len(run.left)
            self._fault = run.fault or self._fault

    def start(self, layer_idx: int, searches: Sequence["RowSearch"]) -> None:
        """Hand each worker its share. What was started before and not finished is given up."""
        self._give_up()
        letters, self._patience_s = self._letters_of(searches)
        self._searches, self._layer_idx = searches, layer_idx
        for supervisor, letter in zip(self._supervisors, letters, strict=True):
            channel = supervisor.channel
            if not letter.pieces:
                continue
            if channel is not None and channel.send(layer_idx, letter, searches):
                self._asked.append((channel, letter))
            else:
                self._not_asked.append(letter)

    def finish(self) -> None:
        """Return when every `out` is filled. Raises SearchLostError where not even this process can search."""
        try:
            self.worked_ns = 0
            for letter in self._not_asked:
                self._search_here(letter)
            await_answers([channel for channel, _ in self._asked], self._patience_s)
            for channel, letter in self._asked:
                failure = None if channel.lost else channel.failure
                self._fault = failure or self._fault
                if channel.lost or failure is not None:
                    self._search_here(letter)
                else:
                    letter.collect(channel.mail, self._searches)
                    self.worked_ns = max(self.worked_ns, channel.worked_ns)
            self._asked.clear()
        finally:
            self._give_up()

    def health(self) -> SearchersHealth:
        """May be called from any thread."""
        supervisors = self._supervisors
        return SearchersHealth(
            num_workers=len(supervisors),
            num_alive=sum(supervisor.channel is not None for supervisor in supervisors),
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

    def __repr__(self) -> str:
        health = self.health()
        return f"<WorkerSearcher {health.num_alive}/{health.num_workers} workers, {len(self._artifacts)} contexts>"

    def _await_workers(self) -> None:
        for supervisor in self._supervisors:
            supervisor.came_up.wait()
            if supervisor.channel is None and not supervisor.num_losses:
                fault = supervisor.fault
                self.close()
                raise SearchLostError(f"the search workers do not come up: {fault}")

    def _channels(self) -> list[Channel]:
        return [channel for supervisor in self._supervisors if (channel := supervisor.channel) is not None]

    def _letters_of(self, searches: Sequence["RowSearch"]) -> tuple[list[Letter], float]:
        """The workers' letters, and how long to wait for an answer."""
        kind = kind_of(searches)
        kept = self._letters.get(kind)
        if kept is None:
            for search in searches:
                assert search.context_id in self._artifacts, f"context {search.context_id} is not loaded"
            if len(self._letters) >= MAX_PLANS:
                self._letters.clear()
            lengths = [self._artifacts[search.context_id].spec.context_len for search in searches]
            num_keys = sum(s.q.shape[0] * s.q.shape[1] * length for s, length in zip(searches, lengths, strict=True))
            letters = write_letters(searches, len(self._supervisors))
            kept = self._letters[kind] = letters, HUNG_S + num_keys * SLOWEST_NS * 1e-9
        return kept

    def _search_here(self, letter: Letter) -> None:
        """Search a worker's share in its place."""
        self._num_searched_here += 1
        if letter.num_bytes > self._own_mail.num_bytes:
            self._own_mail = private_mail(2 * letter.num_bytes)
        mail = self._own_mail
        letter.write(mail, self._layer_idx, self._searches)
        try:
            self._own.search_layer(mail.memory, mail.request(), mail.kept)
        except Exception as error:
            raise SearchLostError(
                f"a search worker is lost and its share of layer {self._layer_idx} cannot be searched here "
                f"({type(error).__name__}: {error}); ask again"
            ) from error
        letter.collect(mail, self._searches)

    def _give_up(self) -> None:
        """Let nothing be under way: the next request must not meet the answer of this one."""
        await_answers([channel for channel, _ in self._asked], self._patience_s)
        self._asked.clear()
        self._not_asked.clear()
        self._searches = ()


def choose_spins(num_cpus: int, num_threads: int) -> tuple[float, float]:
    """How long client and workers look for each other's words before they sleep, in us.

    The client looks only while it has nothing else to do: a core besides the workers' will do. Workers look also while
    the client computes: at least half of the cores must be left alone by them.
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
        return  # a forked process: the workers are not its own
    for supervisor in supervisors:
        supervisor.close()
    own.close()
