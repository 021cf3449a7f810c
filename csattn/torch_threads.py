"""torch by one of many threads: its sums, and those of the libraries below it, depend on how many there are."""

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

_had_many: int | None = None  # the process


def require_threads() -> None:
    """A process that is forked has none of its parent's threads, and torch waits for them without end: refused."""
    global _had_many
    if torch.get_num_threads() == 1:
        return
    if _had_many not in (None, os.getpid()):
        raise ConfigError(
            "this process was forked from one that has built a context, and torch's threads do not survive a fork: "
            'start it with multiprocessing.get_context("spawn"), or call torch.set_num_threads(1) in it first'
        )
    _had_many = os.getpid()


@contextmanager
def threads_kept() -> Iterator[None]:
    """Afterwards the calling thread has as many threads as before, and so have those that begin later: they are told
    what any thread said last."""
    num_threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@contextmanager
def one_thread() -> Iterator[None]:
    """What the calling thread asks of torch, it computes by itself."""
    with threads_kept():
        torch.set_num_threads(1)
        yield


def alone(work: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`work` by one thread, without gradients. Whoever has the threads of a pool do it waits in `threads_kept`."""

    @wraps(work)
    def by_itself(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        with one_thread(), torch.inference_mode():
            return work(*arguments, **named)

    return by_itself
