"""Options of chat templates: the prompt that they give, and how the answer is parsed with them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from csattn.artifact import open_artifact
from tests.chat_models import chat_model
from tests.tiny import byte_tokenizer
from tests.workers.serving.artifacts import build, text_of
from tests.workers.serving.test_local import answer, ask
from tests.workers.serving.test_tools import backend_of, saying, whole
from workers.serving.chat_template import ChatTemplate
from workers.serving.contexts import name_artifact
from workers.serving.messages import BadRequestError, TokenizeAsk, Turn
from workers.serving.prompts import prompt_ids, tokenize, whole_ids

OFF = {"enable_thinking": False}
ASKED = Turn("user", "Add.")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store, model = tmp_path_factory.mktemp("options"), chat_model("switched")
    name_artifact(store, "switched", build(store, text_of("heron"), model=model), "float32")
    name_artifact(store, "bare", build(store, text_of("bare"), chat=False, model=model), "float32")
    return store


@pytest.mark.parametrize("options", [{}, OFF, {"enable_thinking": True}])
def test_template_options_reach_the_prompt_with_and_without_a_context(store: Path, options: dict[str, Any]) -> None:
    model = chat_model("switched")
    asked = ask("switched", turns=(ASKED,), template_options=options)
    with open_artifact(store / build(store, text_of("heron"), model=model)) as artifact:
        got = artifact.token_ids.tolist() + prompt_ids(model.tokenizer, artifact, asked)
    assert got == whole(model, [Turn("system", text_of("heron")), ASKED], **options)
    assert whole_ids(model.tokenizer, asked) == whole(model, [ASKED], **options)
    told = tokenize(
        model.tokenizer, ChatTemplate(model.tokenizer), TokenizeAsk(turns=(ASKED,), template_options=options), 9
    )
    assert list(told.ids) == whole(model, [ASKED], **options)


def test_reasoning_effort_sets_the_templates_own_switch() -> None:
    template = ChatTemplate(chat_model("switched").tokenizer)
    for effort, on in (("none", False), ("minimal", True), ("high", True)):
        assert template.with_effort(ask(reasoning_effort=effort)) == ask(template_options={"enable_thinking": on})
    with_both = ask(reasoning_effort="high", template_options=OFF)
    assert template.with_effort(with_both) == ask(template_options=OFF), "the option itself says more"
    by_level = ChatTemplate(byte_tokenizer("{{ messages }} Reasoning: {{ reasoning_effort }}"))
    assert by_level.with_effort(ask(reasoning_effort="low")) == ask(template_options={"reasoning_effort": "low"})
    tokens = tokenize(
        chat_model("switched").tokenizer, template, TokenizeAsk(turns=(ASKED,), reasoning_effort="none"), 9
    )
    assert list(tokens.ids) == whole(chat_model("switched"), [ASKED], **OFF)


@pytest.mark.parametrize("kind", ["hermes", "thinking", "may_think"])
def test_reasoning_effort_is_refused_for_templates_without_a_switch(kind: str) -> None:
    template = ChatTemplate(chat_model(kind).tokenizer)
    for effort in ("none", "high"):
        if kind == "hermes" and effort == "none":
            assert template.with_effort(ask(reasoning_effort=effort)) == ask()
            continue
        with pytest.raises(BadRequestError, match="no switch for reasoning effort") as refused:
            template.with_effort(ask(reasoning_effort=effort))
        assert refused.value.param == "reasoning_effort"
        with pytest.raises(BadRequestError, match=r"leave reasoning\.effort out"):
            template.with_effort(ask(reasoning_effort=effort, effort_field="reasoning.effort"))


@pytest.mark.parametrize(
    ("options", "text", "want"),
    [({}, "Add.</think>\n\nNo.", ("Add.", "No.")), (OFF, "No.", ("", "No.")), (OFF, "</think>", ("", "</think>"))],
)
def test_an_answer_is_parsed_according_to_enable_thinking(
    store: Path, options: dict[str, Any], text: str, want: Any
) -> None:
    pieces, _ = saying(store, "switched", text, template_options=options)
    assert ("".join(piece.reasoning for piece in pieces), "".join(piece.text for piece in pieces)) == want


@pytest.mark.parametrize(("options", "text"), [({}, "Hm</think>7"), (OFF, "7")])
def test_a_schema_applies_after_reasoning_or_from_the_start(store: Path, options: dict[str, Any], text: str) -> None:
    pieces, _ = saying(store, "switched", text, template_options=options, schema={"enum": [7, 8]})
    assert "".join(piece.text for piece in pieces) == "7"


@pytest.mark.parametrize(
    ("context", "more", "words"),
    [
        ("switched", {"template_options": {"enable": 1}}, "has no enable; leave it out"),
        ("switched", {"template_options": {"today": "Monday"}}, "or give the template no options"),
        ("bare", {"template_options": OFF}, "got template options"),
        ("bare", {"reasoning_effort": "none"}, "got template options"),
    ],
)
def test_unknown_or_unusable_template_options_are_refused(
    store: Path, context: str, more: dict[str, Any], words: str
) -> None:
    async def main() -> None:
        async with backend_of(chat_model("switched"), store) as backend:
            with pytest.raises(BadRequestError, match=words):
                await answer(backend, ask(context, **more))

    asyncio.run(main())
