"""The names by which requests ask for the model and a context."""

import pytest

from tests.workers.api.test_parsing import MODEL, ask_of, chat
from workers.api.names import context_or_own, short_model_name
from workers.serving.messages import UnknownModelError


@pytest.mark.parametrize(
    ("asked", "context"),
    [
        ("SmolLM2-135M", ""),
        ("smollm2-135m-instruct", ""),  # as `csattn ls` shows it
        ("HuggingFaceTB/SmolLM2-135M-Instruct@handbook", "handbook"),
        ("/models/SmolLM2-135M-Instruct.gguf", ""),
    ],
)
def test_the_model_is_recognised_by_its_usual_names(asked: str, context: str) -> None:
    assert (ask_of(chat(model=asked)).context, chat(model=asked).model) == (context, asked)


@pytest.mark.parametrize(
    "asked",
    [
        "handbook",
        "gpt-4",
        f"{MODEL}@",
        f"{MODEL}@a/b",
        "other@handbook",
        f"{MODEL}@a\n",
        "",
        "@handbook",
        f"{MODEL}-base",
    ],
)
def test_unknown_model_names_are_refused(asked: str) -> None:
    with pytest.raises(UnknownModelError) as refused:
        chat(model=asked)
    assert refused.value.param == "model"
    assert context_or_own(f"{MODEL}@a.b-C_9", MODEL) == "a.b-C_9"


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (None, "smollm2-135m"),
        ("smollm2-135m-instruct", "smollm2-135m"),
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("/models/My Model (v2).GGUF", "my-model-v2"),
        ("/hub/models--meta-llama--Llama-3.1-8B/snapshots/0e9e39f249", "llama-3.1-8b"),
        ("/hub/models--o--a--b/snapshots/0e9e39f249", "a--b"),
        ("/hub/models--gpt2/snapshots/0e9e39f249", "gpt2"),
        ("/runs/snapshots/0e9e39f249", "0e9e39f249"),
        ("///", "model"),
    ],
)
def test_short_model_name_of_names_and_paths(name: str | None, short: str) -> None:
    assert short_model_name(name) == short


@pytest.mark.parametrize("asked", ["日本語", "///", "..", "", "gpt/中文", "llama-3.1-8b-instruct", "llama"])
@pytest.mark.parametrize("model", ["model", "llama-3.1-8b", "smollm2-135m"])
def test_another_models_name_is_not_taken_for_the_served_model(asked: str, model: str) -> None:
    with pytest.raises(UnknownModelError):
        context_or_own(asked, model)
