"""A model on disk, and a service in one process over it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chat_models import chat_model
from tests.tiny import save
from tests.workers.service.serving import Service, serving

TEXT = "".join(f"Lamp {lamp} is lit at {lamp % 12}. " for lamp in range(16))


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, and a store that the services of these tests share."""
    place = tmp_path_factory.mktemp("service")
    save(place / "model")
    return place


@pytest.fixture(scope="session", params=["cpu", pytest.param("host", marks=pytest.mark.gpu)])
def options(request: pytest.FixtureRequest, place: Path) -> tuple[str, ...]:
    """Of services that decode in that placement."""
    own = f"engine.placement={request.param}", "engine.max_context_len=2000"
    own_options = [part for setting in own for part in ("--set", setting)]
    store = str(place / f"store-{request.param}")
    return "--store", store, "--model", str(place / "model"), "--keep", "0.2", "--threads", "1", *own_options


@pytest.fixture(scope="session")
def local(options: tuple[str, ...]) -> Iterator[Service]:
    with serving("--local", *options) as service:
        service.register("lamps", TEXT)
        yield service


@pytest.fixture(scope="session")
def talking_options(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Of services with a model whose template has tools and thoughts."""
    place = tmp_path_factory.mktemp("talking")
    model = chat_model("may_think")
    model.model.save_pretrained(place / "chat")
    model.tokenizer.save_pretrained(place / "chat")
    settings = "engine.tail_capacity=8000", "limits.max_concurrent_requests=64", "kept.context_tokens=600"
    own = [part for setting in settings for part in ("--set", setting)]
    return "--store", str(place / "store"), "--model", str(place / "chat"), "--keep", "0.2", "--threads", "1", *own


@pytest.fixture(scope="session")
def talking(talking_options: tuple[str, ...]) -> Iterator[Service]:
    with serving("--local", *talking_options) as service:
        service.register("lamps", TEXT)
        yield service
