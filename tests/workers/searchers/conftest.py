"""A fixture of search workers that tests may kill, which checks that nothing is left of them."""

import contextlib
import gc
import os
from collections.abc import Iterator

import pytest

from tests.forks import FORKS
from tests.workers.searchers.children import Children, named_files, num_descriptors, runs
from tests.workers.searchers.searching import wait_until
from workers.searchers import supervisor


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[Children]:
    """Launch worker processes; after the test, no process, descriptor or file may be left of them."""
    monkeypatch.setattr(supervisor, "MOST_DELAY_S", 0.05)
    with contextlib.closing(FORKS.Process(target=os.getpid)) as first:  # starts the fork server, which stays
        first.start()
        first.join()
    children = Children()
    files, descriptors = named_files(), num_descriptors()
    yield children
    wait_until(lambda: not any(runs(child.pid) for child in children.started))
    assert named_files() == files
    gc.collect()
    assert num_descriptors() <= descriptors
