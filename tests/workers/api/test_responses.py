"""OpenAI's own client against /v1/responses."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.workers.api.fake_backend import CONTEXT_TOKENS, Script
from tests.workers.api.running import Running, serving
from tests.workers.api.test_choices import CALLS
from workers.api.responses import ResponseForm, read_response
from workers.serving.messages import (
    BadRequestError,
    CallPart,
    Done,
    Piece,
    TokenScore,
    Tool,
    ToolCall,
    Turn,
    WorkerLostError,
)
from workers.settings import LimitSettings

MODEL = "smollm2-135m@handbook"
TOOL: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    with serving() as running:
        yield running


def read(**fields: Any) -> Any:
    body = {"model": MODEL, "input": "?", **fields}
    return read_response(body, "id", "smollm2-135m", LimitSettings(max_question_chars=500)).asks[0]


def test_a_response_has_text_status_usage_and_metadata(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model=MODEL, input="?", instructions="Be short.", max_output_tokens=9, metadata={"a": "b"}
    )
    assert answer.output_text == "The answer is 42." and answer.status == "completed"
    assert answer.usage is not None and answer.usage.input_tokens_details.cached_tokens == CONTEXT_TOKENS
    assert (answer.usage.output_tokens, answer.usage.total_tokens) == (4, CONTEXT_TOKENS + 11)
    assert (answer.instructions, answer.max_output_tokens, answer.previous_response_id) == ("Be short.", 9, None)
    assert answer.metadata == {"a": "b"}
    cut = client.responses.create(model=MODEL, input="?", max_output_tokens=2)
    assert cut.status == "incomplete" and cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens" and cut.output_text == "The answer "


def test_a_response_repeats_what_was_asked_or_its_default(client: openai.OpenAI) -> None:
    asked: Any = {"tools": [TOOL], "tool_choice": "none", "text": {"format": {"type": "json_object"}}, "metadata": {}}
    defaults = {"tools": [], "tool_choice": "auto", "text": {"format": {"type": "text"}}, "metadata": {}}
    for given, want in ((asked, asked), ({}, defaults)):
        told = client.responses.create(model=MODEL, input="?", **given).to_dict()
        assert {name: told[name] for name in want} == want


def test_errors_of_the_decoding_side_name_fields_of_the_responses_api() -> None:
    assert read().field == read(input=[{"role": "user", "content": "?"}]).field == "input"
    assert (read().schema_field, read().effort_field) == ("text.format", "reasoning.effort")


def test_a_streamed_response_equals_the_unstreamed_one(service: Running, client: openai.OpenAI) -> None:
    service.backend.scripts = {"?": Script(CALLS, reason="tool_calls")}
    whole = client.responses.create(model=MODEL, input="?", tools=[TOOL])
    events = list(client.responses.create(model=MODEL, input="?", tools=[TOOL], stream=True))
    assert events[-1].type == "response.completed"
    with client.responses.stream(model=MODEL, input="?", tools=[TOOL]) as stream:
        assert stream.get_final_response().output_text == whole.output_text == "See: "
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    told, again = (json.loads(item.to_json()) for item in (whole, events[-1].response))
    for one, other in zip(told["output"], again["output"], strict=True):
        assert {key: other[key] for key in one if key != "id"} == {key: one[key] for key in one if key != "id"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 4
    calls = [item for item in whole.output if item.type == "function_call"]
    assert [(call.call_id, call.name, call.arguments) for call in calls] == [
        ("123456789", "add", '{"a": 1}'), ("abcdefghi", "add", "{}"),
    ]  # fmt: skip


def test_responses_logprobs_cover_every_token_when_included(service: Running, client: openai.OpenAI) -> None:
    service.backend.scripts = {"?": Script((Piece("A", (TokenScore(1, "A", -0.5, (("B", b"B", -1.0),)),)),))}
    asked: Any = {"model": MODEL, "input": "?", "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    answer = client.responses.create(**asked)
    [item] = answer.output
    assert item.type == "message" and item.content[0].type == "output_text"
    [score] = item.content[0].logprobs or []
    assert (score.token, score.logprob, score.top_logprobs[0].token) == ("A", -0.5, "B")
    assert service.backend.asks[-1].sampling.top_logprobs == 1
    events = {event.type: event for event in client.responses.create(**asked, stream=True)}
    assert events["response.output_text.delta"].logprobs[0].token == "A"
    assert events["response.content_part.added"].part.logprobs == [], "it has no text yet"
    words = Piece("", (TokenScore(1, "\ufffd", -0.1),)), Piece("é", (TokenScore(2, "\ufffd", -0.2),))
    service.backend.scripts = {"?": Script((*words, Piece("", (TokenScore(3, "", -0.3),))))}
    answer = client.responses.create(model=MODEL, input="?", include=["message.output_text.logprobs"])
    item = answer.output[0]
    assert item.type == "message" and item.content[0].type == "output_text"
    told = [score.logprob for score in item.content[0].logprobs or []]
    assert told == [-0.1, -0.2, -0.3], "of every token, also where it ends no character"
    thought = Piece("", (TokenScore(1, "Hm", -0.1),), reasoning="Hm")
    service.backend.scripts = {"?": Script((thought, Piece("A", (TokenScore(2, "A", -0.2),))))}
    item = client.responses.create(model=MODEL, input="?", include=["message.output_text.logprobs"]).output[1]
    assert item.type == "message" and item.content[0].type == "output_text"
    assert [score.logprob for score in item.content[0].logprobs or []] == [-0.2], "not of a thought"


def test_an_empty_answer_is_an_empty_message(service: Running, client: openai.OpenAI) -> None:
    service.backend.scripts = {"?": Script((Piece(""),))}
    answer = client.responses.create(model=MODEL, input="?")
    assert answer.output_text == "" and [item.type for item in answer.output] == ["message"]


def test_a_failure_in_mid_stream_is_sent_as_an_error_event(service: Running, client: openai.OpenAI) -> None:
    service.backend.scripts = {"?": Script(fail_at=2, error=WorkerLostError("gone"))}
    said: list[Any] = []
    stream = client.responses.create(model=MODEL, input="?", stream=True)
    with pytest.raises(openai.APIError, match="gone"):
        said.extend(stream)
    assert [event.type for event in said][-1] == "response.output_text.delta"


def test_a_piece_can_end_a_call_and_hold_the_text_after_it() -> None:
    """Such a piece arrives after all of its text was held back as the possible start of a stop string."""
    body = {"model": MODEL, "input": "?", "tools": [TOOL]}
    form = ResponseForm(read_response(body, "id", "smollm2-135m", LimitSettings()))
    call = Piece("", calls=(CallPart(0, '{"a": ', call_id="123456789", name="add"),))
    done = Done(reason="tool_calls", context_tokens=0, question_tokens=1, cached_tokens=0, new_tokens=9)
    one, other = form.whole([[call, Piece("So.", calls=(CallPart(0, "1}"),))]], [done])["output"]
    assert (one["type"], one["arguments"], other["content"][0]["text"]) == ("function_call", '{"a": 1}', "So.")


def test_input_items_become_turns() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "m", "status": "completed",
         "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x": 1}', "id": "fc"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "c"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "d"}]},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_image", "image_url": "data:"}]},
    ]  # fmt: skip
    ask = read(input=items, instructions="i", tools=[TOOL], tool_choice={"type": "function", "name": "add"})
    assert ask.turns == (
        Turn("system", "i"), Turn("user", "a"),
        Turn("assistant", "b", (ToolCall("1", "f", {"x": 1}), ToolCall("2", "g", {})), reasoning="hm"),
        Turn("tool", "c", call_id="1"), Turn("tool", "d", call_id="2"),
        Turn("tool", "[image: not shown, because this service reads only text]", call_id="2"),
    )  # fmt: skip
    assert ask.tools == (Tool("add", {"type": "object"}, None, True),) and ask.must_call == ("add",)


def test_functions_in_namespaces_are_called_by_both_names_and_returned_apart() -> None:
    """As Codex sends those of sub-agents and of MCP servers."""
    group = {"type": "namespace", "name": "mcp__sky", "description": "Weather.", "tools": [TOOL]}
    body: dict[str, Any] = {"model": MODEL, "input": "?", "tools": [TOOL, group]}
    parsed = read_response(body, "id", "smollm2-135m", LimitSettings())
    assert [tool.name for tool in parsed.asks[0].tools] == ["add", "mcp__sky__add"]
    calls = [CallPart(0, "{}", "1", "mcp__sky__add"), CallPart(1, "{}", "2", "add")]
    done = Done(reason="tool_calls", context_tokens=0, question_tokens=1, cached_tokens=0, new_tokens=9)
    items = ResponseForm(parsed).whole([[Piece("", calls=tuple(calls))]], [done])["output"]
    assert [(item["name"], item.get("namespace")) for item in items] == [("add", "mcp__sky"), ("add", None)]
    outputs = [{"type": "function_call_output", "call_id": call, "output": "x"} for call in "12"]
    again = read(input=[{"role": "user", "content": "?"}, *items, *outputs], tools=body["tools"])
    assert [call.name for call in again.turns[1].calls] == ["mcp__sky__add", "add"]
    empty = [{"type": "namespace", "name": "a"}, {"type": "namespace", "name": "b", "tools": None}]
    assert read(tools=empty).tools == ()


@pytest.mark.parametrize(
    ("reason", "want"), [("stop", "incomplete"), ("length", "incomplete"), ("tool_calls", "completed")]
)
def test_a_call_that_is_cut_off_is_incomplete(reason: Any, want: str) -> None:
    parsed = read_response({"model": MODEL, "input": "?"}, "id", "smollm2-135m", LimitSettings())
    done = Done(reason=reason, context_tokens=0, question_tokens=1, cached_tokens=0, new_tokens=9)
    told = ResponseForm(parsed).whole([[Piece("", calls=(CallPart(0, '{"a": ', "1", "add"),))]], [done])
    assert told["output"][0]["status"] == want


def test_by_default_answers_have_as_many_tokens_as_the_service_allows() -> None:
    assert read().sampling.max_new_tokens == LimitSettings().max_new_tokens


def test_what_codex_tells_every_server_changes_nothing() -> None:
    search = {"type": "web_search", "external_web_access": True}
    assert read(tools=[TOOL, search], client_metadata={"session_id": "x"}) == read(tools=[TOOL])


def test_reasoning_between_a_message_and_a_call_is_kept() -> None:
    def thought(*texts: str) -> dict[str, Any]:
        parts = [{"type": "reasoning_text", "text": text} for text in texts]
        return {"type": "reasoning", "summary": [], "content": parts}

    said, call = {"role": "assistant", "content": "b"}, {"type": "function_call", "call_id": "1", "name": "f"}
    output = {"type": "function_call_output", "call_id": "1", "output": "c"}
    calls = (ToolCall("1", "f", {}),)
    assert read(input=[said, thought("hm"), call, output]).turns[0] == Turn("assistant", "b", calls, reasoning="hm")
    twice = read(input=[thought("o"), said, thought("hm"), call, output])
    assert twice.turns[0] == Turn("assistant", "b", calls, reasoning="ohm")
    empty = read(input=[thought(), call, output])
    assert empty.turns[0] == Turn("assistant", "", calls), "OpenAI's items may have an empty list"


def test_options_that_match_the_default_behaviour_are_accepted() -> None:
    assert read(truncation="auto", reasoning={"summary": "auto"}) == read()


def test_text_format_sets_the_answers_schema() -> None:
    form = {"format": {"type": "json_schema", "name": "x", "strict": True, "schema": {"type": "integer"}}}
    assert read(text=form).schema == {"type": "integer"}
    assert read(text={"format": {"type": "json_object"}, "verbosity": "low"}).schema == {"type": "object"}
    assert read(text={}).schema is None and read().schema is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input": None}, "input is missing"),
        ({"input": []}, "input has no message"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input has no message"),
        ({"input": 3}, "input is 3"),
        ({"input": "x" * 501}, "501 characters"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            r"input\[0\].content\[0\].type .*only text",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\].type is"),
        (
            {"input": [{"role": "assistant", "content": "x"}]},
            "input must end with one of role user or tool, got one of role assistant",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]},
            "input must not answer a tool call that no earlier message has made",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, r"input\[0\].output is missing, wanted text"),
        (
            {"input": [{"type": "function_call_output", "call_id": "1", "output": [{"type": "input_audio"}]}]},
            r"input\[0\].output\[0\].type .*only text",
        ),
        (
            {"input": [{"type": "function_call", "call_id": f"c{i}", "name": "f"} for i in range(129)]},
            r"input\[128\].call_id exceeds the 128 calls",
        ),
        ({"previous_response_id": "resp_1"}, "previous_response_id is .*nothing is stored here"),
        ({"conversation": "conv_1"}, "nothing is stored here"),
        ({"background": True}, "background is true"),
        ({"truncation": "middle"}, "truncation"),
        ({"max_tokens": 5}, "max_tokens is 5: it is called max_output_tokens here"),
        ({"reasoning": {"effort": "much"}}, 'reasoning.effort is "much", wanted one of none'),
        ({"include": ["file_search_call.results"]}, "include names"),
        ({"tools": [{"type": "web_search"}]}, "runs no tools of its own"),
        ({"tools": [TOOL, {"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice.type is not"),
        ({"tools": [TOOL, {"type": "image_generation"}]}, r"tools\[1\].type .*runs no tools of its own"),
        ({"tools": [{"type": "namespace", "name": "a b", "tools": [TOOL]}]}, r"tools\[0\].name has characters"),
        ({"tools": [{"type": "web_search"}] * 2}, r'tools\[0\].type is "web_search"'),
        (
            {"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "namespace"}]}]},
            r'tools\[0\].tools\[0\].type is "namespace", wanted "function"',
        ),
        (
            {
                "tools": [
                    {"type": "namespace", "name": f"n{i}", "tools": [TOOL, {**TOOL, "name": "b"}]} for i in range(257)
                ]
            },
            "tools have 514 functions, wanted at most 512",
        ),
        ({"tools": [{**TOOL, "name": "a__add"}, {"type": "namespace", "name": "a", "tools": [TOOL]}]}, "repeat a name"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema is missing"),
        ({"max_output_tokens": 0}, "max_output_tokens must lie"),
        ({"n": 2}, "n is not a field"),
        ({"messages": []}, "messages is not a field"),
    ],
)
def test_invalid_responses_fields_are_refused_with_the_reason(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequestError, match=words):
        read(**fields)
    with pytest.raises(BadRequestError, match="the body is a list"):
        read_response([], "id", "smollm2-135m", LimitSettings())
