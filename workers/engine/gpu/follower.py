"""A follower: the process of one of several devices, except the first. It repeats the first one's calls with its heads.

Nothing is decided here: the same calls in the same order leave all engines in the same state.
"""

import os
import pickle
import select
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from csattn.artifact import Artifact, open_artifact
from csattn.config import SearchConfig
from csattn.cpus import available_cpus
from csattn.errors import CsattnError
from csattn.share import Share
from workers.engine.gpu.engine import GpuEngine
from workers.engine.gpu.step_model import StepModel
from workers.model.devices import Devices
from workers.serving.step_engine import Fidelity, StepRow

SPIN_S = 0.002  # that it polls for the next step before it sleeps: waking up can take longer than a step
EXPECTED = (CsattnError, torch.OutOfMemoryError)  # reported to the first process; the follower goes on


@dataclass(frozen=True, slots=True)
class FollowerSpec:
    """The first message to a follower: what it makes its engine from."""

    share: Share
    device: torch.device
    rendezvous: Path
    model: StepModel  # the follower replaces `take` and `devices`
    config: SearchConfig
    placement: str
    options: dict[str, Any]  # of `GpuEngine`


class Follower:
    """Its methods are called by name, each in place of a method of its `GpuEngine`, and so are all others of that."""

    def __init__(self, spec: FollowerSpec) -> None:
        self._devices = devices = Devices(spec.share, spec.device, spec.rendezvous)
        model = replace(spec.model, take=lambda device: devices.receive(), devices=devices)
        self._engine = GpuEngine(model, spec.config, spec.placement, device=spec.device, **spec.options)
        self._artifacts: dict[int, Artifact] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add_context(self, context_id: int, path: Path) -> None:
        with ExitStack() as undo:
            with self._devices.all_or_none():
                artifact = undo.enter_context(open_artifact(path))
            self._engine.add_context(context_id, artifact)
            undo.pop_all()
        self._artifacts[context_id] = artifact

    def remove_context(self, context_id: int) -> None:
        self._engine.remove_context(context_id)
        self._artifacts.pop(context_id).close()

    def step(self, fed: Sequence[tuple[int, int, bool]], watch: tuple[int, int] | None) -> Fidelity | None:
        """fed: of each row the request slot, the token, and whether it is a draft."""
        rows = [StepRow(request_slot, token_id, is_draft=is_draft) for request_slot, token_id, is_draft in fed]
        return self._engine.step(rows, watch=watch).fidelity

    def close(self) -> None:
        self._engine.close()
        for artifact in self._artifacts.values():
            artifact.close()
        self._devices.close()


class Answers:
    """Sends answers to the first process, from any thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, Lock()

    def __call__(self, number: int | None, answer: object) -> None:
        """number: of the call that is answered; None: the follower ends with this message, an error."""
        data = pickle.dumps((number, answer))
        with self._lock:
            self._connection.send_bytes(data)


def follow(connection: Connection) -> None:
    """Run a follower until the first process closes it, or is gone."""
    answer = Answers(connection)
    try:
        spec: FollowerSpec = pickle.loads(connection.recv_bytes())
        torch.set_num_threads(max(1, available_cpus() // spec.share.num_devices))
        answer(0, None)
        follower, copying = Follower(spec), ThreadPoolExecutor(1, "rows")
        while True:
            number, name, arguments = pickle.loads(_next(connection))
            if name == "close":
                copying.shutdown()
            try:
                result = getattr(follower, name)(*arguments)
            except EXPECTED as error:
                if number is None:
                    raise
                result = error
            if callable(result):  # rows that are being copied
                copying.submit(_answer_copied, answer, number, result)
            elif number is not None:
                answer(number, result)
            if name == "close":
                return
    except EOFError:
        return
    except Exception as error:
        answer(None, f"{type(error).__name__}: {error}")
        raise


def _answer_copied(answer: Answers, number: int, copied: Callable[[], Tensor]) -> None:
    """Send rows when they are there. If that fails, end this process: the first one, which waits for them, sees it."""
    try:
        answer(number, copied())
    except BaseException as error:
        traceback.print_exc()
        with suppress(OSError):  # the first process may be gone
            answer(None, f"{type(error).__name__}: {error}")
        os._exit(1)


def _next(connection: Connection) -> bytes:
    poll, until = select.poll(), time.monotonic() + SPIN_S
    poll.register(connection.fileno(), select.POLLIN)
    while not poll.poll(0) and time.monotonic() < until:
        pass
    return connection.recv_bytes()
