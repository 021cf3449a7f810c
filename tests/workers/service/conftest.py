"""A model on disk, and a service in one process over it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chat_models import chat_model
from tests.workers.service.serving import Service, serving

TEXT = "".join(f"Lamp {lamp} is lit at {lamp % 12}. " for lamp in range(16))


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model whose chat template has tools and reasoning, and the stores of these tests' services."""
    place = tmp_path_factory.mktemp("service")
    model = chat_model("may_think")
    model.model.save_pretrained(place / "chat")
    model.tokenizer.save_pretrained(place / "chat")
    return place


@pytest.fixture(scope="session", params=["cpu", pytest.param("host", marks=pytest.mark.gpu)])
def placement(request: pytest.FixtureRequest) -> str:
    """Where services decode."""
    return str(request.param)


@pytest.fixture(scope="session")
def options(placement: str, place: Path) -> tuple[str, ...]:
    """The command-line options of services with that model."""
    settings = f"engine.placement={placement}", "engine.max_context_len=2000", "engine.tail_capacity=8000"
    settings += "limits.max_concurrent_requests=64", "kept.context_tokens=600"
    own = [part for setting in settings for part in ("--set", setting)]
    store = str(place / f"store-{placement}")
    return "--store", store, "--model", str(place / "chat"), "--keep", "0.2", "--threads", "1", *own


@pytest.fixture(scope="session")
def local(options: tuple[str, ...]) -> Iterator[Service]:
    with serving("--local", *options) as service:
        service.register("lamps", TEXT)
        yield service


@pytest.fixture(scope="session")
def on_ray(options: tuple[str, ...], local: Service) -> Iterator[Service]:
    """A service on Ray with search workers, over the store of `local`, whose context has two names here."""
    pytest.importorskip("ray", reason="the package ray is not installed; pip install 'csattn[serve]'")
    artifact_id = local.get("/v1/contexts/lamps").json()["artifact_id"]
    named = "--context", f"other={artifact_id[:6]}"
    with serving(*options, *named, "--set", "engine.num_search_workers=2") as service:
        yield service
    assert service.process.returncode == 0
