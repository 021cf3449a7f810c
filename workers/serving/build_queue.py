"""A queue of builds that run in the background, one after another."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from workers.serving.messages import closing

MAX_BUILDS = 1  # at the same time


@dataclass(frozen=True, slots=True)
class BuildCounts:
    """Builds of one kind: those under way, and those that have failed since the service began."""

    num_waiting: int = 0  # waiting for another build to end
    num_building: int = 0
    num_failed: int = 0


@dataclass(slots=True, eq=False)
class Build:
    """A build that waits for its turn, or is under way."""

    task: asyncio.Task[Any] = field(init=False)
    has_begun: bool = field(init=False, default=False)


Key = TypeVar("Key", bound=Hashable)
AnyBuild = TypeVar("AnyBuild", bound=Build)


class BuildQueue(Generic[Key, AnyBuild]):
    """Runs builds in the order of `add`, at most one for each key. For one event loop."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(MAX_BUILDS)
        self._builds: dict[Key, AnyBuild] = {}
        self._is_closed = False
        self.num_failed = 0

    @property
    def counts(self) -> BuildCounts:
        num_begun = sum(build.has_begun for build in self._builds.values())
        return BuildCounts(len(self._builds) - num_begun, num_begun, self.num_failed)

    def get(self, key: Key) -> AnyBuild | None:
        return self._builds.get(key)

    def add(self, key: Key, build: AnyBuild, run: Callable[[], Awaitable[Any]]) -> AnyBuild:
        """Queue a build, whose `task` is done when `run` is. Raises the closing error after `close`."""
        if self._is_closed:
            raise closing()

        async def take_turn() -> Any:
            async with self._turns:
                build.has_begun = True
                return await run()

        build.task = asyncio.create_task(take_turn())
        self._builds[key] = build
        build.task.add_done_callback(lambda task: self._forget(key, build))
        return build

    def cancel(self, key: Key, build: AnyBuild) -> None:
        """Cancel a build. Another one of its key may be added at once."""
        self._forget(key, build)
        build.task.cancel()

    async def end(self, key: Key) -> None:
        """Cancel the key's build, if there is one, and wait for its end."""
        if (build := self._builds.get(key)) is not None:
            self.cancel(key, build)
            await asyncio.wait([build.task])

    async def close(self) -> None:
        """Cancel all builds and wait for their end; from now on none is added."""
        self._is_closed = True
        tasks = [build.task for build in self._builds.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _forget(self, key: Key, build: AnyBuild) -> None:
        if self._builds.get(key) is build:
            del self._builds[key]
        if build.task.done() and not build.task.cancelled():
            build.task.exception()  # marks it as retrieved; those who still wait get it
