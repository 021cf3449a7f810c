"""torch on a fixed number of threads: its sums, and those of the libraries below it, depend on that number."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from csattn.errors import ConfigError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Map = Callable[..., Any]  # the builtin, or a pool's

_pid_with_threads: int | None = None  # id of the process that used several threads


def require_threads() -> None:
    """Raise ConfigError in a process forked after torch used its threads: it has none of them, and torch would hang."""
    global _pid_with_threads
    if torch.get_num_threads() == 1:
        return
    if _pid_with_threads not in (None, os.getpid()):
        raise ConfigError(
            "this process was forked from one that has built a context, and torch's threads do not survive a fork: "
            'start it with multiprocessing.get_context("spawn"), or call torch.set_num_threads(1) in it first'
        )
    _pid_with_threads = os.getpid()


@contextmanager
def preserve_num_threads() -> Iterator[None]:
    """Restore torch's number of threads after the block, for the calling thread and for threads that start later.

    A new thread takes the number that any thread set last.
    """
    num_threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on the calling thread alone within the block."""
    with preserve_num_threads():
        torch.set_num_threads(1)
        yield


def on_one_thread(work: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Wrap `work` to run on one thread, without gradients.

    Submit it to a pool, and wait for it, within `preserve_num_threads`.
    """

    @wraps(work)
    def run(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        with one_thread(), torch.inference_mode():
            return work(*arguments, **named)

    return run
