"""Models of the Hugging Face hub, with and without a connection to it."""

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import filter_repo_objects

from csattn.errors import ModelError
from csattn.models import load_model, loader
from csattn.models.hub import fetched, hub_source
from tests.tiny import save


class NoAnswer(Exception):
    """An error of a class that csattn does not know, as HTTP clients raise."""


@pytest.fixture(autouse=True)
def not_asked_before() -> Iterator[None]:
    hub_source.cache_clear()
    yield
    hub_source.cache_clear()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def timeouts_of_hub(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Simulate a hub that does not answer. Returns the list of each request's timeout, in seconds."""
    timeouts: list[float] = []

    def ask(self: HfApi, repo_id: str, *, timeout: float) -> None:
        timeouts.append(timeout)
        raise NoAnswer("name or service not known\nand more")

    monkeypatch.setattr(HfApi, "model_info", ask)
    return timeouts


def test_offline_a_model_that_was_not_downloaded_is_refused_after_one_short_timeout(
    cache: Path, timeouts_of_hub: list[float]
) -> None:
    with pytest.raises(
        ModelError,
        match=r"some/model could not be loaded: it has not been downloaded .*\(name or service not known\); connect",
    ):
        load_model("some/model")
    assert len(timeouts_of_hub) == 1 and timeouts_of_hub[0] < 10


def test_offline_a_model_that_was_downloaded_before_is_loaded(
    cache: Path, timeouts_of_hub: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "multiplies_bfloat16", lambda: True)  # so its config is read for its dtype, too
    of = cache / "models--some--model"
    save(of / "snapshots" / ("0" * 40))
    (of / "refs").mkdir()
    (of / "refs" / "main").write_text("0" * 40)
    loaded = load_model("some/model")
    assert loaded.name == "some/model" and len(timeouts_of_hub) == 1


def test_weights_are_downloaded_in_one_layout_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistral's repositories hold their weights in two layouts."""
    there = ["config.json", "model-1.safetensors", "consolidated.safetensors", "README.md", "pytorch_model.bin"]

    def names(hub_id: str, **patterns: list[str]) -> str:
        return " ".join(filter_repo_objects(there, **patterns))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", names)
    assert fetched("some/model") == "config.json model-1.safetensors"


def test_if_the_hub_answers_even_with_an_error_the_hub_id_is_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HfApi, "model_info", lambda *_, **__: None)
    assert hub_source("some/model") == "some/model"

    def refuse(*_: object, **__: object) -> None:
        raise HfHubHTTPError.__new__(HfHubHTTPError)

    monkeypatch.setattr(HfApi, "model_info", refuse)
    assert hub_source("some/other") == "some/other"
    assert hub_source("some/ model ") == "some/ model "
