"""The directory that tests of this folder write to."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """Use a directory in memory if the machine has one: these tests flush thousands of files."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(name)
