"""Answers whose beginning is in the prompt: how the template writes it, and how the continuation is parsed."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from csattn.artifact import open_artifact
from tests.chat_models import chat_model
from tests.workers.serving.artifacts import build, text_of
from tests.workers.serving.test_local import answer, ask
from tests.workers.serving.test_tools import ADD, CALL, backend_of, saying, whole
from workers.serving.chat_template import ChatTemplate
from workers.serving.contexts import name_artifact
from workers.serving.messages import BadRequestError, TokenizeAsk, Turn
from workers.serving.prompts import prompt_ids, tokenize, whole_ids

KINDS = ("hermes", "thinking", "may_think", "llama")


def begun(text: str) -> tuple[Turn, ...]:
    return (Turn("user", "Who?"), Turn("assistant", text))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("continuing")
    for kind in KINDS:
        name_artifact(store, kind, build(store, text_of("heron"), model=chat_model(kind)), "float32")
    bare = build(store, text_of("bare"), chat=False, model=chat_model("hermes"))
    name_artifact(store, "bare", bare, "float32")
    return store


def test_a_continued_prompt_ends_where_the_given_answer_stops(store: Path) -> None:
    model = chat_model("hermes")
    turns = begun("A he")
    closed = "ron<|im_end|>\n"  # the rest of the whole answer, and its end token
    want = whole(model, [*begun("A heron")])
    prompt = model.tokenizer.decode(want).removesuffix("<|im_start|>assistant\n").removesuffix(closed)
    assert prompt.endswith("assistant\nA he")
    ids = model.tokenizer(prompt, add_special_tokens=False).input_ids
    asked = ask("hermes", turns=turns, continues=True)
    assert whole_ids(model.tokenizer, asked) == ids
    told = tokenize(model.tokenizer, ChatTemplate(model.tokenizer), TokenizeAsk(turns=turns, continues=True), 9)
    assert list(told.ids) == ids
    with open_artifact(store / build(store, text_of("heron"), model=model)) as artifact:
        assert prompt_ids(model.tokenizer, artifact, asked) == ids


@pytest.mark.parametrize(
    ("kind", "said", "text", "want"),
    [
        ("hermes", "A he", " ron", (" ron", "", 0)),
        ("hermes", "Well.", f"\n<tool_call>{CALL}</tool_call>", ("\n", "", 1)),
        ("llama", "{", '"a": 1}', ('"a": 1}', "", 0)),
        ("llama", "As JSON: ", CALL, (CALL, "", 0)),  # not at the beginning of the answer, so no call
        ("may_think", "A he", "<think>ron", ("<think>ron", "", 0)),
        ("thinking", "A he", "ron", ("ron", "", 0)),
        ("thinking", "<think>\nA he", " ron</think>\n\nIt is.", ("It is.", " ron", 0)),
        ("thinking", "<think>Hm.</think>A he", "ron", ("ron", "", 0)),
    ],
)
def test_the_continuation_is_parsed_in_the_state_of_the_given_beginning(
    store: Path, kind: str, said: str, text: str, want: Any
) -> None:
    pieces, _ = saying(store, kind, text, turns=begun(said), continues=True, tools=(ADD,))
    calls = [part.name for piece in pieces for part in piece.calls if part.name]
    told = "".join(piece.text for piece in pieces), "".join(piece.reasoning for piece in pieces), len(calls)
    assert told == want


def test_a_schema_constrains_the_continuation_alone(store: Path) -> None:
    pieces, _ = saying(store, "thinking", "7", turns=begun("It is "), continues=True, schema={"enum": [7, 8]})
    assert "".join(piece.text for piece in pieces) == "7"


def test_continuing_an_answer_is_refused_for_a_context_without_a_template(store: Path) -> None:
    async def main() -> None:
        async with backend_of(chat_model("hermes"), store) as backend:
            with pytest.raises(BadRequestError, match="got an answer to continue"):
                await answer(backend, ask("bare", turns=begun("A he")[1:], continues=True))

    asyncio.run(main())
