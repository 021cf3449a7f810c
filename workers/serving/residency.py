"""Which artifacts the engine holds: loaded when they are asked for, unloaded when the engine has no room left."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from csattn.artifact import Artifact
from csattn.config import SearchConfig
from csattn.errors import ConfigError, CsattnError
from offload.errors import MemoryPlanError, OffloadError, is_out_of_memory
from workers.serving.messages import BadRequestError, OverloadedError, Selector, ServingError, WorkerLostError
from workers.serving.scheduler import Scheduler
from workers.serving.step_engine import NO_CONTEXT, StepEngine
from workers.serving.usable import Usable

_RETRY_S = 5.0


@dataclass(slots=True, eq=False)
class Resident:
    """An artifact that the engine holds, or nothing."""

    context_id: int
    artifact: Artifact | None
    num_users: int = 0
    last_used: int = 0
    is_forgotten: bool = False  # unload it when its last user leaves


class Residency:
    """For one event loop. Artifacts are opened, checked and prepared on other threads; loaded between two steps."""

    def __init__(self, scheduler: Scheduler, engine: StepEngine, usable: Usable) -> None:
        self._scheduler, self._engine, self._usable = scheduler, engine, usable
        self._residents: dict[Path, Resident] = {}
        self._loading: dict[Path, asyncio.Task[Resident]] = {}
        self._one_at_a_time = asyncio.Lock()  # else two could unload for each other
        self._preparing: set[asyncio.Task[None]] = set()
        self._preparer = ThreadPoolExecutor(1, thread_name_prefix="csattn-prepare")
        self._uses = count(1)

    def __repr__(self) -> str:
        in_use = sum(resident.num_users > 0 for resident in self._residents.values())
        return f"<Residency {len(self._residents)} loaded, {in_use} in use>"

    @asynccontextmanager
    async def using(self, path: Path | None, config: SearchConfig, selector: Selector) -> AsyncIterator[Resident]:
        """The artifact at that path, loaded until the block ends, and prepared for such requests; None: no context."""
        if path is None:
            yield Resident(NO_CONTEXT, None)
            return
        resident = await self._resident(path)
        try:
            await self._prepare(path, resident, config, selector)
            yield resident
        finally:
            await self._leave(path, resident)

    async def forget(self, path: Path) -> None:
        """Unload when nobody uses it any more."""
        if resident := self._residents.get(path):
            resident.is_forgotten = True
            if not resident.num_users:
                await self._unload(path)

    def is_used(self, path: Path) -> bool:
        """By a request, or one that is coming."""
        return path in self._loading or (path in self._residents and self._residents[path].num_users > 0)

    def close(self) -> None:
        """Prepare nothing more, and let those who wait for it know. Steps have ended: nothing is unloaded any more."""
        self._preparer.shutdown(wait=False, cancel_futures=True)
        for task in self._preparing:
            task.cancel()

    async def _resident(self, path: Path) -> Resident:
        """Counted as used already: between two awaits, nothing can unload it."""
        while (resident := self._residents.get(path)) is None:
            if path not in self._loading:
                task = asyncio.create_task(self._load(path))
                self._loading[path] = task
                task.add_done_callback(lambda task: self._loading.pop(path))
            await asyncio.shield(self._loading[path])  # one who leaves does not end it for the others
        resident.num_users += 1
        resident.last_used = next(self._uses)
        resident.is_forgotten = False
        return resident

    async def _prepare(self, path: Path, resident: Resident, config: SearchConfig, selector: Selector) -> None:
        try:
            work = self._engine.preparation(resident.context_id, config, selector)
        except ConfigError as error:
            raise BadRequestError(str(error)) from error
        if work is None:
            return
        resident.num_users += 1  # it cannot be stopped: one who leaves does not unload what is being read
        task = asyncio.create_task(self._make(path, resident, work))
        self._preparing.add(task)
        task.add_done_callback(self._prepared)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and not asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise WorkerLostError("the service is shutting down; send the request again when it is back") from None
            raise
        except Exception as error:
            raise _as_serving_error(error, "prepared") from error

    async def _make(self, path: Path, resident: Resident, work: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        try:
            await self._with_room(lambda: loop.run_in_executor(self._preparer, work))
        finally:
            await self._leave(path, resident)

    def _prepared(self, task: "asyncio.Task[None]") -> None:
        self._preparing.discard(task)
        if not task.cancelled():
            task.exception()  # of which those who wait are told, if any still do

    async def _leave(self, path: Path, resident: Resident) -> None:
        resident.num_users -= 1
        if resident.is_forgotten and not resident.num_users:
            await asyncio.shield(self._unload(path))

    async def _load(self, path: Path) -> Resident:
        scheduler = self._scheduler
        artifact = await asyncio.to_thread(self._usable.open, path)
        async with self._one_at_a_time:
            context_id = next(i for i in count() if i not in {r.context_id for r in self._residents.values()})
            try:
                await self._with_room(
                    lambda: asyncio.wrap_future(scheduler.inbox.call(lambda: scheduler.load(context_id, artifact)))
                )
            except Exception as error:
                artifact.close()
                raise _as_serving_error(error, "loaded") from error
            resident = Resident(context_id, artifact, last_used=next(self._uses))
            self._residents[path] = resident
        return resident

    async def _with_room(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do what takes memory, again and again while there is too little and a context that can be unloaded."""
        while True:
            try:
                return await work()
            except Exception as error:
                if not (isinstance(error, MemoryPlanError) or is_out_of_memory(error)):
                    raise
                if not await self._make_room():
                    why = "all contexts that are loaded are in use, and " if self._residents else ""
                    raise OverloadedError(
                        f"{why}there is no room for more ({error}); ask again later", retry_after_s=_RETRY_S
                    ) from error

    async def _make_room(self) -> bool:
        """Unload the least recently used context that nobody uses; False if there is none."""
        idle = [path for path, resident in self._residents.items() if not resident.num_users]
        if not idle:
            return False
        await self._unload(min(idle, key=lambda path: self._residents[path].last_used))
        return True

    async def _unload(self, path: Path) -> None:
        resident = self._residents.pop(path)
        scheduler = self._scheduler
        with suppress(WorkerLostError):  # the engine has ended, and its contexts with it
            await asyncio.wrap_future(scheduler.inbox.call(lambda: scheduler.unload(resident.context_id)))
        assert resident.artifact is not None
        resident.artifact.close()


def _as_serving_error(error: Exception, done: str) -> ServingError:
    if isinstance(error, ServingError):
        return error
    told = str(error) if isinstance(error, CsattnError | OffloadError) else f"{type(error).__name__}: {error}"
    return ServingError(f"the context could not be {done}: {told[:300]}")
