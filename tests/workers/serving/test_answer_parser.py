"""Parsing an answer into reasoning, calls and text: the result does not depend on how the answer is cut."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.api.answers import gathered
from workers.serving.answer_parser import AnswerParser
from workers.serving.chat_template import HERMES, LLAMA, MISTRAL, CallFormat
from workers.serving.messages import Piece

TOOLS = {"look_up", "add"}
FORMATS = {"none": None, "hermes": HERMES, "mistral": MISTRAL, "llama": LLAMA}


def told(pieces: list[str], form: CallFormat | None, thinks: bool = False, is_thinking: bool = False) -> Any:
    """Parse the pieces. Return text, reasoning, and calls as (name, arguments)."""
    parser = AnswerParser("id", form, TOOLS, thinks=thinks, is_thinking=is_thinking)
    *others, last = pieces or [""]
    parts = [*map(parser.add, others), parser.add(last, is_final=True)]
    calls = gathered([Piece("", calls=part.calls) for part in parts])
    assert len({call.call_id for call in calls}) == len(calls) == parser.num_calls
    text, reasoning = ("".join(getattr(part, name) for part in parts) for name in ("text", "reasoning"))
    return text, reasoning, [(call.name, call.arguments) for call in calls]


def call(name: str = "add", key: str = "arguments", **arguments: Any) -> str:
    return json.dumps({"name": name, key: arguments})


ADD, LOOK = call(a=1), call("look_up", text='a "}" \\ {[')
CALLED = [("add", '{"a": 1}'), ("look_up", json.dumps({"text": 'a "}" \\ {['}))]
CASES: list[tuple[str, str, tuple[str, list[tuple[str, str]]]]] = [
    ("none", f"<tool_call>{ADD}</tool_call>", (f"<tool_call>{ADD}</tool_call>", [])),
    ("hermes", f"<tool_call>\n{ADD}\n</tool_call>", ("", CALLED[:1])),
    ("hermes", f"Let me see.\n<tool_call>\n{ADD}\n</tool_call>\n<tool_call>\n{LOOK}\n</tool_call>",
     ("Let me see.\n", CALLED)),
    ("hermes", f"<tool_call>{ADD}</tool_call> So it is. <tool_", ("So it is. <tool_", CALLED[:1])),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', ("", CALLED[:1])),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", CALLED[:1])),
    ("hermes", '<tool_call>{"arguments": {"a": "\\ud83d"}, "name": "add"}</tool_call>',
     ("", [("add", '{"a": "\\ud83d"}')])),  # half a surrogate pair, passed on as it came
    ("hermes", "<tool_call>\n{no JSON}\n</tool_call>", ("<tool_call>\n{no JSON}\n</tool_call>", [])),
    ("hermes", f"<tool_call>{call('rm')}</tool_call> x", (f"<tool_call>{call('rm')}</tool_call> x", [])),
    ("hermes", "<tool_call> not even", ("<tool_call> not even", [])),
    ("hermes", "<tool_call>", ("<tool_call>", [])),
    ("hermes", "<tool_call>\n</tool_call> none", ("<tool_call>\n</tool_call> none", [])),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1', ("", [("add", '{"a": 1')])),
    ("hermes", '<tool_call>{"name": "add", "argu', ('<tool_call>{"name": "add", "argu', [])),
    ("hermes", '<tool_call>{"name": "add", "arguments": 5}</tool_call>',
     ('<tool_call>{"name": "add", "arguments": 5}</tool_call>', [])),
    ("hermes", f"{ADD} is no call", (f"{ADD} is no call", [])),
    ("hermes", f"\n{ADD}\n", ("", CALLED[:1])),
    ("hermes", f"```json\n{ADD}\n{LOOK}\n```", ("", CALLED)),
    ("hermes", f'{ADD}\n{LOOK}\n{{"name": "add", "argu', ('{"name": "add", "argu', CALLED)),
    ("hermes", f"```json\n{ADD}\n", ("", CALLED[:1])),
    ("hermes", f"{ADD}\n[{ADD}", (f"{ADD}\n[{ADD}", [])),
    ("hermes", f"```json\n{ADD}\n``` is one", (f"```json\n{ADD}\n``` is one", [])),
    ("hermes", call("rm"), (call("rm"), [])),
    ("hermes", '{"name": "add", "arguments": {"a": 1e999,  "b": 12345678901234567890.5}}',
     ("", [("add", '{"a": 1e999,  "b": 12345678901234567890.5}')])),
    ("hermes", '{"arguments": {}, "name": "add"}', ('{"arguments": {}, "name": "add"}', [])),
    ("hermes", '{"name": "add", "arguments": {"a": 1', ('{"name": "add", "arguments": {"a": 1', [])),
    ("mistral", f"[TOOL_CALLS][{ADD}, {LOOK}]", ("", CALLED)),
    ("mistral", f"[TOOL_CALLS] {ADD}", ("", CALLED[:1])),
    ("mistral", f"[{ADD}]", (f"[{ADD}]", [])),
    ("mistral", f"[TOOL_CALLS][{ADD}]\n[1], see", ("[1], see", CALLED[:1])),
    ("mistral", f"[TOOL_CALLS][{ADD}], so [", (", so [", CALLED[:1])),
    ("mistral", f"[TOOL_CALLS][{ADD},]", ("", CALLED[:1])),
    ("mistral", f"[TOOL_CALLS][{ADD}]] [TOOL_CALLS] [x", ("] [TOOL_CALLS] [x", CALLED[:1])),
    ("mistral", f"[TOOL_CALLS][{ADD}, {call('rm')}]", (f", {call('rm')}]", CALLED[:1])),
    ("llama", call(key="parameters", a=1), ("", CALLED[:1])),
    ("llama", f"<|python_tag|>{call(key='parameters', a=1)}; {LOOK}", ("", CALLED)),
    ("llama", f"{call(key='parameters', a=1)}; said she", ("; said she", CALLED[:1])),
    ("llama", '{"name": "Ann"}, said she', ('{"name": "Ann"}, said she', [])),
    ("llama", f"I call {ADD}", (f"I call {ADD}", [])),
    ("llama", "\n\u3000\u4ece\u524d", ("\u3000\u4ece\u524d", [])),
    ("hermes", "\n\u3000\u4ece\u524d", ("\u3000\u4ece\u524d", [])),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "want"), CASES)
def test_tool_calls_are_parsed_and_look_alikes_stay_text(
    form: str, text: str, want: tuple[str, list[tuple[str, str]]]
) -> None:
    assert told([text], FORMATS[form]) == (want[0], "", want[1])


@pytest.mark.parametrize("parallel_calls", [True, False])
def test_json_that_is_not_a_call_is_streamed_as_text(parallel_calls: bool) -> None:
    parser = AnswerParser("id", HERMES, TOOLS, thinks=False, is_thinking=False, parallel_calls=parallel_calls)
    assert parser.add('{"name": "An').text == ""
    assert parser.add('n", "age": ').text == '{"name": "Ann", "age": '
    assert parser.add("3}").text == "3}"


@given(st.sampled_from(CASES), st.data())
def test_parsing_does_not_depend_on_how_the_text_is_cut(case: Any, data: st.DataObject) -> None:
    form, text, want = case
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert told(pieces, FORMATS[form]) == (want[0], "", want[1])


@given(st.text('<>{}[]"\\toolcan_/:, \n|', max_size=40), st.sampled_from(sorted(FORMATS)), st.booleans())
def test_arbitrary_text_is_parsed_the_same_whole_and_by_character(text: str, form: str, thinks: bool) -> None:
    whole = told([text], FORMATS[form], thinks=thinks)
    assert told(list(text), FORMATS[form], thinks=thinks) == whole
    if "<think>" not in text:
        assert whole[0].split() == text.split() and not whole[2]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "thinks", "is_thinking", "want"),
    [
        ("<think>\nWell.\n</think>\n\nYes <think>", True, False, ("Yes <think>", "Well.\n")),
        (" <think>Well", True, False, ("", "Well")),
        ("<thin", True, False, ("<thin", "")),
        ("Yes", True, False, ("Yes", "")),
        ("Well.</think> Yes", True, True, ("Yes", "Well.")),
        ("<think>x</think>", False, False, ("<think>x</think>", "")),
        (" spaces stay", False, False, (" spaces stay", "")),
    ],
)
def test_reasoning_is_separated_from_the_answer(
    size: int, text: str, thinks: bool, is_thinking: bool, want: tuple[str, str]
) -> None:
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert told(pieces, None, thinks, is_thinking) == (*want, [])


def test_reasoning_followed_by_a_call() -> None:
    text = f"<think>Add?</think>\n\n<tool_call>\n{ADD}\n</tool_call>"
    assert told([text], HERMES, thinks=True) == ("", "Add?", CALLED[:1])


def test_a_calls_arguments_are_streamed() -> None:
    parser = AnswerParser("id", HERMES, TOOLS, thinks=False, is_thinking=False)
    assert not parser.add('<tool_call>{"name": "add"').calls
    [first] = parser.add(', "arguments": {"a": [1').calls
    assert (first.name, first.arguments) == ("add", '{"a": [1') and len(first.call_id) == 9 and first.call_id.isalnum()
    assert [part.arguments for part in parser.add(', {"b": 2}]').calls] == [', {"b": 2}]']
    assert [part.arguments for part in parser.add("}}</tool_call>").calls] == ["}"]


@pytest.mark.parametrize("before", ["See: <tool_call>", "", "```json\n"])
def test_without_parallel_calls_the_first_call_ends_the_answer(before: str) -> None:
    parser = AnswerParser("id", HERMES, TOOLS, thinks=False, is_thinking=False, parallel_calls=False)
    parts = [parser.add(piece) for piece in (before, ADD[:9], ADD[9:-1])]
    assert not parser.has_ended
    parts += [parser.add("}" + ADD, is_final=True)]
    assert parser.has_ended and parser.num_calls == 1
    assert "".join(call.arguments for part in parts for call in part.calls) == '{"a": 1}'
