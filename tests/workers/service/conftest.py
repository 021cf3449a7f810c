"""A model on disk, and a service in one process over it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny import save
from tests.workers.service.serving import Service, serving

TEXT = "".join(f"Lamp {lamp} is lit at {lamp % 12}. " for lamp in range(16))


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, and a store that the services of these tests share."""
    place = tmp_path_factory.mktemp("service")
    save(place / "model")
    return place


@pytest.fixture(scope="session")
def options(place: Path) -> tuple[str, ...]:
    return "--store", str(place / "store"), "--model", str(place / "model"), "--keep", "0.2", "--threads", "1"


@pytest.fixture(scope="session")
def local(options: tuple[str, ...]) -> Iterator[Service]:
    with serving("--local", *options) as service:
        service.register("lamps", TEXT)
        yield service
