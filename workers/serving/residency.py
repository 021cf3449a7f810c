"""An LRU cache of loaded contexts: loads artifacts when requests need them, within a budget, and evicts others.

Contexts that wait for room are loaded one after another, in the order in which they were requested. Unused contexts
are evicted for them, the least recently used first. If all are in use, those that were loaded first take no new
requests once they have had their turn, and are unloaded when their last request ends. A turn is long compared with
loading, so however many contexts take turns, loads do not dominate.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeVar

from csattn.artifact import Artifact, ArtifactSpec
from csattn.artifact.tensor_file import repair_advice
from csattn.config import SearchConfig
from csattn.errors import ArtifactError, ArtifactRoomError, ConfigError, CsattnError
from csattn.selector_names import SelectorName
from offload.errors import DiskError, MemoryPlanError, is_out_of_memory
from workers.capacity import context_bytes
from workers.serving.examiner import Examiner
from workers.serving.messages import (
    BadRequestError,
    ContextNotReadyError,
    ContextTooLongError,
    Held,
    OverloadedError,
    ServingError,
    WorkerLostError,
    closing,
)
from workers.serving.page_cache import drop_pages, read_index, read_rows
from workers.serving.resident import Resident, choose_leaving, files_of, lost_bytes
from workers.serving.scheduler import Scheduler
from workers.serving.step_engine import NO_CONTEXT, StepEngine
from workers.settings import EngineSettings

T = TypeVar("T")
_RETRY_S = 5.0
_CHECK_S = 1.0  # interval at which a loaded context's files are checked for lost bytes, at most


class _Unwanted(Exception):
    """Nobody waits for this context any more, so it is not loaded."""


class Residency:
    """Keeps contexts loaded. For one event loop; it opens, checks and prepares artifacts on other threads, and the
    engine's thread loads them between two steps."""

    def __init__(self, scheduler: Scheduler, engine: StepEngine, examiner: Examiner, settings: EngineSettings) -> None:
        self._scheduler, self._engine, self._examiner, self._settings = scheduler, engine, examiner, settings
        self._reads_in_place = settings.placement == "cpu" and settings.kv_codec is None
        self._maps_rows = settings.placement != "device" and settings.kv_codec is None
        self._residents: dict[Path, Resident] = {}
        self._loading: dict[Path, asyncio.Task[Resident]] = {}
        self._forgotten: set[Path] = set()  # loaded or loading; unloaded with the last user unless requested again
        self._wanted: Counter[Path] = Counter()  # how many requests, or `hold`, wait for a context to be loaded
        self._ahead: set[Path] = set()  # what `hold` waits for
        self._moving_bytes = 0  # of contexts that are being loaded and unloaded
        self._one_at_a_time = asyncio.Lock()  # fair (first come, first served); without it, two could evict each other
        self._room_changed = asyncio.Event()  # or may have: those who wait for room look again
        self._preparing: set[asyncio.Task[None]] = set()
        self._preparer = ThreadPoolExecutor(1, thread_name_prefix="csattn-prepare")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="csattn-read-ahead")
        self._uses = count(1)

    def __repr__(self) -> str:
        in_use = sum(resident.num_users > 0 for resident in self._residents.values())
        return f"<Residency {len(self._residents)} loaded, {in_use} in use, {self.held_bytes:,} bytes>"

    @property
    def held_bytes(self) -> int:
        """Bytes of the contexts that are loaded, being loaded or being unloaded."""
        return sum(resident.num_bytes for resident in self._residents.values()) + self._moving_bytes

    @property
    def has_room(self) -> bool:
        """Whether one more context, as large as the largest loaded one, would fit."""
        largest = max((resident.num_bytes for resident in self._residents.values()), default=0)
        is_full = self._settings.placement != "cpu" and len(self._residents) >= self._settings.num_contexts
        return not is_full and self._fits(largest)

    def require_possible(self, spec: ArtifactSpec) -> int:
        """Return how many bytes such a context takes. Raises ContextTooLongError if the whole budget has fewer."""
        num_bytes, budget = sum(context_bytes(spec, self._settings.kv_format)), self._settings.context_bytes
        if budget is not None and num_bytes > budget:
            raise ContextTooLongError(
                f"the context takes {num_bytes:,} bytes and engine.context_bytes is {budget:,}; use a shorter one, or "
                "start the service with more",
                "model",
            )
        return num_bytes

    def held(self, store: Path) -> tuple[Held, ...]:
        """The loaded contexts, the largest first."""
        now = time.monotonic()
        found = [resident.snapshot(str(path.relative_to(store)), now) for path, resident in self._residents.items()]
        return tuple(sorted(found, key=lambda held: (-held.num_bytes, held.path)))

    @asynccontextmanager
    async def using(
        self, path: Path | None, config: SearchConfig, selector: SelectorName, routing_key: str = ""
    ) -> AsyncIterator[Resident]:
        """Keep the artifact at that path loaded until the block ends, and prepared for such a request.

        path: None for a request without a context. routing_key: `Ask.routing_key`.
        """
        if path is None:
            yield Resident(NO_CONTEXT, None)
            return
        await self._require_whole(path)
        self._forgotten.discard(path)
        is_resident = (known := self._residents.get(path)) is not None and not known.is_leaving
        self._scheduler.metrics.context_requests.labels("memory" if is_resident else "store").inc()
        resident = await self._resident(path)
        resident.last_used = next(self._uses)
        resident.remember(routing_key)
        try:
            await self._prepare(path, resident, config, selector)
            yield resident
        finally:
            await self._release(path, resident)

    async def hold(self, path: Path, held: Held) -> None:
        """Load a context ahead of need, if it fits beside those that are loaded or being loaded."""
        if path not in self._residents and path not in self._loading and self._fits(held.num_bytes):
            self._ahead.add(path)
            try:
                resident = await self._resident(path)
            finally:
                self._ahead.discard(path)
            for name in held.routing_keys:
                resident.remember(name)
            await self._release(path, resident)

    async def forget(self, path: Path) -> None:
        """Unload a context as soon as nobody uses it."""
        if path in self._loading or path in self._residents:
            self._forgotten.add(path)
        if path in self._residents and not self._residents[path].num_users:
            await self._unload(path)

    def loaded_below(self, directory: Path) -> list[Path]:
        return [path for path in self._residents if path.is_relative_to(directory)]

    def is_used(self, path: Path) -> bool:
        """Whether a request uses the artifact or waits for it to be loaded."""
        return path in self._loading or (path in self._residents and self._residents[path].num_users > 0)

    def close(self) -> None:
        """Cancel preparations and loads, which fails the requests that wait. Steps must have ended: nothing is
        unloaded any more."""
        self._preparer.shutdown(wait=False, cancel_futures=True)
        for resident in self._residents.values():
            resident.is_gone = True
        self._reader.shutdown(wait=False, cancel_futures=True)
        for task in [*self._preparing, *self._loading.values()]:
            task.cancel()

    async def _require_whole(self, path: Path) -> None:
        """Raise ContextNotReadyError if the context is loaded and one of its files has been truncated.

        Rows are memory-mapped: reading one that the file has lost would kill the process (SIGBUS). New requests are
        refused until the context has been unloaded, even if its files are restored.
        """
        if (resident := self._residents.get(path)) is None:
            return
        now = time.monotonic()
        if not resident.fault and now - resident.checked_at >= _CHECK_S:
            resident.checked_at = now
            resident.fault = await asyncio.to_thread(lost_bytes, resident.files)
        if resident.fault:
            await self.forget(path)
            raise ContextNotReadyError(
                f"the context's artifact {path} cannot be used: {resident.fault}; {repair_advice(path)}"
            )

    async def _resident(self, path: Path) -> Resident:
        """Return the context, loaded if necessary, with its user already counted: nothing can unload it meanwhile."""
        while (resident := self._residents.get(path)) is None or resident.is_leaving:
            if path not in self._loading:
                task = asyncio.create_task(self._load(path))
                self._loading[path] = task
                task.add_done_callback(lambda task: task.cancelled() or task.exception())  # waiters get the error
            with suppress(_Unwanted):  # earlier waiters gave up; this one starts again
                return await self._loaded(path, self._loading[path])
        resident.num_users += 1
        return resident

    async def _loaded(self, path: Path, loading: "asyncio.Task[Resident]") -> Resident:
        """Wait for a load. `_load` counts everybody who waits as a user of the loaded context."""
        self._wanted[path] += 1
        try:
            return await asyncio.shield(loading)  # if one waiter is cancelled, the load goes on for the others
        except asyncio.CancelledError:
            _require_not_closing(loading)
            if loading.done() and not loading.exception():
                await self._release(path, loading.result())
            raise
        finally:
            self._wanted[path] -= 1
            if not self._wanted[path]:
                del self._wanted[path]
            self._room_changed.set()

    async def _prepare(self, path: Path, resident: Resident, config: SearchConfig, selector: SelectorName) -> None:
        try:
            work = self._engine.preparation(resident.context_id, config, selector)
        except ConfigError as error:
            raise BadRequestError(str(error)) from error
        if work is None:
            return
        resident.num_users += 1  # for the work itself: it cannot be stopped, and reads the context to its end
        task = asyncio.create_task(self._make(path, resident, work))
        self._preparing.add(task)
        task.add_done_callback(self._prepared)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            _require_not_closing(task)
            raise
        except Exception as error:
            raise _as_serving_error(error, "prepared") from error

    async def _make(self, path: Path, resident: Resident, work: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        try:
            await self._with_room(lambda: loop.run_in_executor(self._preparer, work))
        finally:
            await self._release(path, resident)

    def _prepared(self, task: "asyncio.Task[None]") -> None:
        self._preparing.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved; those who still wait get it

    async def _release(self, path: Path, resident: Resident) -> None:
        resident.num_users -= 1
        if resident.num_users:
            return
        resident.released_at = time.monotonic()
        self._room_changed.set()
        if path in self._forgotten:
            await self._unload(path)

    async def _load(self, path: Path) -> Resident:
        """Load a context, after those that were requested before it."""
        try:
            artifact = await self._open(path)
            try:
                resident = await self._load_in_turn(path, artifact)
            except BaseException:
                artifact.close()
                raise
        except Exception as error:
            self._forgotten.discard(path)
            raise error if isinstance(error, _Unwanted) else _as_serving_error(error, "loaded") from error
        finally:
            self._loading.pop(path, None)
        resident.num_users += self._wanted[path]
        if path in self._forgotten and not resident.num_users:  # those who waited for it have left
            await self._unload(path)
        return resident

    async def _open(self, path: Path) -> Artifact:
        """Open the artifact. If the process has no room for its memory maps, evict others first."""

        async def open_wanted() -> Artifact:
            self._require_wanted(path)
            return await asyncio.to_thread(self._examiner.open, path)

        with suppress(ArtifactRoomError):
            return await open_wanted()
        async with self._one_at_a_time:
            return await self._with_room(open_wanted, waits=True)

    async def _load_in_turn(self, path: Path, artifact: Artifact) -> Resident:
        num_bytes = self.require_possible(artifact.spec)
        async with self._one_at_a_time:
            self._require_wanted(path)
            if (resident := self._residents.get(path)) is not None:  # it was not unloaded after all: a new turn begins
                artifact.close()
                resident.begin_turn(time.monotonic(), 0.0)
                return resident
            await self._take_room(path, num_bytes)
            resident = await self._add(path, artifact, num_bytes)
        if self._reads_in_place:  # the index is in memory, chosen rows are paged in by use; read all others ahead
            self._reader.submit(read_rows, artifact.path, lambda: resident.is_gone)
        return resident

    async def _add(self, path: Path, artifact: Artifact, num_bytes: int) -> Resident:
        """Load the artifact into the engine. Its bytes are reserved already."""
        scheduler, started = self._scheduler, time.monotonic()
        context_id = next(i for i in count() if i not in {r.context_id for r in self._residents.values()})
        add = partial(scheduler.load, context_id, artifact)
        try:
            await asyncio.to_thread(self._examiner.require_sound, artifact)
            await asyncio.to_thread(read_index, artifact.path)
            files = await asyncio.to_thread(files_of, path) if self._maps_rows else {}
            if not self._reads_in_place:
                await asyncio.to_thread(read_rows, artifact.path, lambda: False)
            await self._with_room(lambda: asyncio.wrap_future(scheduler.inbox.call(add)), waits=True)
            resident = Resident(context_id, artifact, num_bytes, last_used=next(self._uses), files=files)
            self._residents[path] = resident
        finally:
            self._moving_bytes -= num_bytes
        resident.begin_turn(now := time.monotonic(), now - started)
        return resident

    def _fits(self, num_bytes: int) -> bool:
        budget = self._settings.context_bytes
        return budget is None or self.held_bytes + num_bytes <= budget

    def _require_wanted(self, path: Path) -> None:
        """Raise _Unwanted if nobody waits for this context any more."""
        if not self._wanted[path]:
            raise _Unwanted

    async def _take_room(self, path: Path, num_bytes: int) -> None:
        """Reserve bytes of the budget for a context, as soon as they are free."""
        try:
            while not self._fits(num_bytes):
                if path in self._ahead and self._wanted[path] == 1:  # no request waits for it
                    raise OverloadedError("there is no room to load the context ahead of need")
                if not await self._make_room():
                    await self._wait_for_room(num_bytes)
                self._require_wanted(path)
        finally:
            self._let_stay()
        self._moving_bytes += num_bytes

    async def _with_room(self, work: Callable[[], Awaitable[T]], waits: bool = False) -> T:
        """Do work that takes memory, and return its result. If there is too little, make room, and try again.

        waits: if all contexts are in use, wait for one of them; otherwise that raises OverloadedError.
        """
        while True:
            try:
                result = await work()
            except Exception as error:
                if not (isinstance(error, MemoryPlanError | ArtifactRoomError) or is_out_of_memory(error)):
                    raise
                if await self._make_room():
                    continue
                if not (waits and self._residents):
                    why = "all contexts that are loaded are in use, and " if self._residents else ""
                    raise OverloadedError(
                        f"{why}there is no room for more ({error}); try again later", retry_after_s=_RETRY_S
                    ) from error
                await self._wait_for_room(1)
            else:
                self._let_stay()
                return result

    async def _make_room(self) -> bool:
        """Unload the least recently used of the unused contexts; False if all are in use."""
        idle = [path for path, resident in self._residents.items() if not resident.num_users]
        if not idle:
            return False
        await self._unload(min(idle, key=lambda path: self._residents[path].last_used))
        return True

    async def _wait_for_room(self, num_bytes: int) -> None:
        """Wait until a context loses its last user, having closed enough of those that have had their turn to new
        requests; or until the next one has had its turn."""
        now = time.monotonic()
        until = choose_leaving(self._residents.values(), num_bytes, now)
        self._room_changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(None if until is None else until - now):
                await self._room_changed.wait()

    def _let_stay(self) -> None:
        """Open all contexts to new requests: nobody waits for room now."""
        for resident in self._residents.values():
            resident.is_leaving = False

    async def _unload(self, path: Path) -> None:
        """Unload a context, if it is loaded. If the caller is cancelled, this goes on: the engine has it until then."""
        if (resident := self._residents.pop(path, None)) is None:
            return
        self._forgotten.discard(path)
        resident.is_gone = True
        self._moving_bytes += resident.num_bytes
        await asyncio.shield(self._remove(path, resident))

    async def _remove(self, path: Path, resident: Resident) -> None:
        scheduler = self._scheduler
        try:
            with suppress(WorkerLostError):  # the engine is closed, and so are its contexts
                await asyncio.wrap_future(scheduler.inbox.call(lambda: scheduler.unload(resident.context_id)))
            assert resident.artifact is not None
            resident.artifact.close()
            await asyncio.to_thread(drop_pages, path)
        finally:
            self._moving_bytes -= resident.num_bytes
            self._room_changed.set()


def _require_not_closing(task: "asyncio.Task[object]") -> None:
    """Raise the `closing` error if the task was cancelled, and not the one that waits for it."""
    if task.cancelled() and not asyncio.current_task().cancelling():  # type: ignore[union-attr]
        raise closing() from None


def _as_serving_error(error: Exception, done: str) -> ServingError:
    if isinstance(error, ServingError):
        return error
    why = str(error) if isinstance(error, CsattnError) else f"{type(error).__name__}: {error}"
    prefix = f"the context could not be {done}"
    if isinstance(error, OSError | ArtifactError | DiskError):  # it names files, which clients should not see
        hidden = f"{prefix}: its files cannot be read; the service's log has the details for its operator"
        return ServingError(hidden, detail=f"{prefix}: {why}")
    return ServingError(f"{prefix}: {why[:300]}")
