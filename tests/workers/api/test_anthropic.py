"""Anthropic's own client against /v1/messages."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.workers.api.fake_backend import CONTEXT_TOKENS, Script
from tests.workers.api.running import KEY, Running, serving
from tests.workers.api.test_choices import CALLS
from workers.api.anthropic import SIGNATURE, UNREAD, MessageForm, read_count, read_message
from workers.serving.messages import (
    BadRequestError,
    CallPart,
    ContextNotReadyError,
    Done,
    OverloadedError,
    Piece,
    Tool,
    ToolCall,
    Turn,
    WorkerLostError,
)
from workers.settings import LimitSettings

MODEL = "smollm2-135m@handbook"
ASK: list[Any] = [{"role": "user", "content": "?"}]
TOOL: Any = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}

CALL = {"type": "tool_use", "id": "1", "name": "f"}


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    with serving() as running:
        yield running


@pytest.fixture
def claude(service: Running) -> Iterator[anthropic.Anthropic]:
    service.backend.scripts.clear()
    with anthropic.Anthropic(base_url=service.url, api_key=KEY, max_retries=0, timeout=10) as client:
        yield client


def read(**fields: Any) -> Any:
    body = {"model": MODEL, "max_tokens": 9, "messages": ASK, **fields}
    return read_message(body, "id", "smollm2-135m", LimitSettings(max_question_chars=500)).asks[0]


def turns(*messages: tuple[str, Any], **fields: Any) -> tuple[Turn, ...]:
    read_turns: tuple[Turn, ...] = read(
        messages=[{"role": role, "content": content} for role, content in messages], **fields
    ).turns
    return read_turns


def test_a_message_has_text_reason_and_usage(service: Running, claude: anthropic.Anthropic) -> None:
    answer = claude.messages.create(
        model=MODEL, max_tokens=9, messages=ASK, system="Be short.", extra_body={"top_k": 3}
    )
    [block] = answer.content
    assert block.type == "text" and block.text == "The answer is 42."
    assert (answer.role, answer.model, answer.stop_reason, answer.stop_sequence) == (
        "assistant",
        MODEL,
        "end_turn",
        None,
    )
    used = answer.usage
    assert (used.input_tokens, used.cache_read_input_tokens, used.output_tokens) == (7, CONTEXT_TOKENS, 4)
    asked = service.backend.asks[-1]
    assert answer._request_id == asked.request_id
    assert asked.turns == (Turn("system", "Be short."), Turn("user", "?"))
    assert (asked.sampling.max_new_tokens, asked.sampling.top_k) == (9, 3)
    assert claude.messages.create(model=MODEL, max_tokens=2, messages=ASK).stop_reason == "max_tokens"


def test_a_stop_sequence_is_named(service: Running, claude: anthropic.Anthropic) -> None:
    service.backend.scripts = {"?": Script(stop="END")}
    answer = claude.messages.create(model=MODEL, max_tokens=9, messages=ASK, stop_sequences=["END", "x"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "END")
    assert service.backend.asks[-1].sampling.stop == ("END", "x")


def test_a_streamed_message_equals_the_unstreamed_one(service: Running, claude: anthropic.Anthropic) -> None:
    service.backend.scripts = {"?": Script(CALLS, reason="tool_calls")}
    whole = claude.messages.create(model=MODEL, max_tokens=9, messages=ASK, tools=[TOOL])
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    events = list(claude.messages.create(model=MODEL, max_tokens=9, messages=ASK, tools=[TOOL], stream=True))
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    assert events[0].type == "message_start" and events[0].message.usage.cache_read_input_tokens == CONTEXT_TOKENS
    assert events[0].message.content == [] and events[0].message.usage.output_tokens == 0
    with claude.messages.stream(model=MODEL, max_tokens=9, messages=ASK, tools=[TOOL]) as stream:
        final = stream.get_final_message()
    for one, other in zip(whole.content, final.content, strict=True):
        assert other.to_dict() == one.to_dict()
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    calls = [block for block in whole.content if block.type == "tool_use"]
    assert [(call.id, call.name, call.input) for call in calls] == [
        ("123456789", "add", {"a": 1}), ("abcdefghi", "add", {}),
    ]  # fmt: skip
    assert whole.stop_reason == "tool_use" and whole.content[0].type == "thinking"
    assert (whole.content[0].thinking, whole.content[0].signature) == ("Hm.", SIGNATURE)


def test_an_answer_and_the_results_of_its_calls_can_be_sent_back(service: Running, claude: anthropic.Anthropic) -> None:
    service.backend.scripts = {"?": Script(CALLS, reason="tool_calls")}
    answer = claude.messages.create(model=MODEL, max_tokens=9, messages=ASK, tools=[TOOL])
    result = {"type": "tool_result", "is_error": False}
    results: list[Any] = [
        {**result, "tool_use_id": "123456789", "content": "one"},
        {**result, "tool_use_id": "abcdefghi", "content": [{"type": "text", "text": "two"}]},
        {"type": "text", "text": "Go on."},
    ]  # fmt: skip
    conversation: list[Any] = [
        *ASK, {"role": "assistant", "content": answer.content}, {"role": "user", "content": results},
    ]  # fmt: skip
    claude.messages.create(model=MODEL, max_tokens=9, messages=conversation, tools=[TOOL])
    calls = (ToolCall("123456789", "add", {"a": 1}), ToolCall("abcdefghi", "add", {}))
    assert service.backend.asks[-1].turns == (
        Turn("user", "?"),
        Turn("assistant", "See: ", calls, reasoning="Hm."),
        Turn("tool", "one", call_id="123456789"), Turn("tool", "two", call_id="abcdefghi"), Turn("user", "Go on."),
    )  # fmt: skip
    assert service.backend.asks[-1].tools == (Tool("add", {"type": "object", "properties": {}}, "Adds."),)


@pytest.mark.parametrize("arguments", ['{"a": "rm', '{"a": NaN}', '{"a": [1e999]}'])
def test_a_call_that_is_cut_off_or_no_json_is_left_out_of_the_whole_message(
    service: Running, claude: anthropic.Anthropic, arguments: str
) -> None:
    cut = Piece("", calls=(CallPart(0, arguments, call_id="123456789", name="add"),))
    service.backend.scripts = {"?": Script((Piece("So: "), cut), reason="tool_calls")}
    answer = claude.messages.create(model=MODEL, max_tokens=9, messages=ASK, tools=[TOOL])
    assert [block.type for block in answer.content] == ["text"] and answer.stop_reason == "end_turn"
    service.backend.scripts = {"?": Script((Piece("So: "), cut, "more"))}
    answer = claude.messages.create(model=MODEL, max_tokens=2, messages=ASK, tools=[TOOL])
    assert [block.type for block in answer.content] == ["text"] and answer.stop_reason == "max_tokens"


def test_a_piece_can_end_a_call_and_hold_the_text_after_it() -> None:
    form = MessageForm(read_message({"model": MODEL, "messages": ASK}, "id", "smollm2-135m", LimitSettings()))
    call = Piece("", calls=(CallPart(0, '{"b": "\n", "a": ', call_id="123456789", name="add"),))
    done = Done(reason="tool_calls", context_tokens=0, question_tokens=1, cached_tokens=0, new_tokens=9)
    one, other = form.whole([[call, Piece("So.", calls=(CallPart(0, "1}"),))]], [done])["content"]
    assert (one["input"], other["text"]) == ({"b": "\n", "a": 1}, "So.")


def test_errors_have_anthropics_form_and_classes(service: Running, claude: anthropic.Anthropic) -> None:
    def refused(kind: type[anthropic.APIStatusError], **fields: Any) -> Any:
        with pytest.raises(kind) as error:
            claude.messages.create(**{"model": MODEL, "max_tokens": 9, "messages": ASK, **fields})
        body: Any = error.value.body
        assert body["type"] == "error"
        return body["error"]

    assert refused(anthropic.NotFoundError, model="other")["type"] == "not_found_error"
    told = refused(anthropic.BadRequestError, extra_body={"temperature": 3})
    assert told["type"] == "invalid_request_error" and told["message"].startswith("temperature must be")
    for error, kind, type_ in (
        (OverloadedError("full", retry_after_s=1), anthropic.RateLimitError, "rate_limit_error"),
        (ContextNotReadyError("not yet"), anthropic.ConflictError, "invalid_request_error"),
        (WorkerLostError("gone"), anthropic.InternalServerError, "overloaded_error"),
    ):
        service.backend.scripts = {"?": Script(fail_at=0, error=error)}
        assert refused(kind)["type"] == type_
    stranger = claude.with_options(api_key="wrong")
    with pytest.raises(anthropic.AuthenticationError, match="not an API key"):
        stranger.messages.create(model=MODEL, max_tokens=9, messages=ASK)
    with anthropic.Anthropic(base_url=service.url, auth_token=KEY, api_key=None, max_retries=0) as by_bearer:
        assert by_bearer.messages.count_tokens(model=MODEL, messages=ASK).input_tokens


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_tool_runner_goes_on_without_a_thread(service: Running, claude: anthropic.Anthropic, is_stream: bool) -> None:
    @anthropic.beta_tool
    def add(a: int = 0) -> str:
        return f"sum {a}"

    service.backend.scripts = {"?": Script(CALLS, reason="tool_calls")}
    runner: Any = claude.beta.messages.tool_runner(
        model=MODEL, max_tokens=9, messages=ASK, tools=[add], **({"stream": True} if is_stream else {})
    )
    told = [message.get_final_message() if is_stream else message for message in runner]
    assert [message.stop_reason for message in told] == ["tool_use", "end_turn"]
    results = [turn.content for turn in service.backend.asks[-1].turns if turn.role == "tool"]
    assert results == ["sum 1", "sum 0"]
    with pytest.raises(anthropic.BadRequestError, match="no conversation is stored here") as error:
        claude.beta.messages.create(model=MODEL, max_tokens=9, messages=ASK, thread={"type": "create"})
    assert error.value.error_code == "thread_unsupported_request"


def test_a_failure_in_mid_stream_is_sent_as_an_error_event(service: Running, claude: anthropic.Anthropic) -> None:
    service.backend.scripts = {"?": Script(fail_at=2, error=WorkerLostError("gone"))}
    said: list[Any] = []
    stream = claude.messages.create(model=MODEL, max_tokens=9, messages=ASK, stream=True)
    with pytest.raises(anthropic.APIStatusError, match="gone"):
        said.extend(stream)
    assert said[-1].type == "content_block_delta"


def test_tokens_are_counted_with_those_of_the_context(service: Running, claude: anthropic.Anthropic) -> None:
    def count(**fields: Any) -> int:
        return claude.messages.count_tokens(messages=[{"role": "user", "content": "four"}], **fields).input_tokens

    assert count(model="smollm2-135m") == 4 and count(model=MODEL) == CONTEXT_TOKENS + 4
    assert count(model="smollm2-135m", system="six is", tools=[TOOL], thinking={"type": "disabled"}) == 10
    with pytest.raises(anthropic.NotFoundError, match="no context"):
        count(model="smollm2-135m@other")
    service.backend.add("draft", state="building", num_tokens=None)
    with pytest.raises(anthropic.ConflictError, match="the context 'draft' is building"):
        count(model="smollm2-135m@draft")
    with pytest.raises(BadRequestError, match="max_tokens is not a field"):
        read_count({"model": MODEL, "messages": ASK, "max_tokens": 3}, "smollm2-135m", LimitSettings())


def test_contexts_are_models_of_anthropics_client_too(claude: anthropic.Anthropic) -> None:
    listed = claude.models.list()
    assert [model.id for model in listed.data] == ["smollm2-135m", MODEL] and not listed.has_more
    model = claude.models.retrieve(MODEL)
    assert (model.type, model.display_name, model.created_at.timestamp()) == ("model", MODEL, 1.7e9)
    assert (model.lifecycle, model.max_input_tokens) == ("active", 2048)


def test_system_messages_within_a_conversation_join_the_users(service: Running) -> None:
    """Templates of most models refuse a system message that is not the first."""
    told = turns(("user", "a"), ("system", "s"), ("assistant", "b"), ("system", [{"type": "text", "text": "t"}]))
    assert told == (Turn("user", "a\n\ns"), Turn("assistant", "b"), Turn("user", "t"))
    assert turns(("system", "s"), ("user", "a"), system="r") == (Turn("system", "r\n\ns"), Turn("user", "a"))
    assert turns(("system", "s"), ("user", "a")) == (Turn("system", "s"), Turn("user", "a"))


def test_documents_are_read_as_text() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "All of it."}
    block = {"type": "document", "title": "T", "context": "C", "source": source, "citations": {"enabled": False}}
    assert turns(("user", [block, {"type": "text", "text": "?"}])) == (Turn("user", "T\nC\nAll of it.\n?"),)


def test_results_of_searches_are_read_as_text() -> None:
    block = {"type": "search_result", "title": "T", "source": "U", "content": [{"type": "text", "text": "Found."}]}
    assert turns(("user", [block])) == (Turn("user", "T\nU\nFound."),)


def test_a_tools_result_may_have_more_than_text() -> None:
    """Clients send it with all later turns: a refusal would end the conversation."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}
    parts = [{"type": "text", "text": "Seen:"}, image, {"type": "tool_reference", "tool_name": "f"}]
    result = {"type": "tool_result", "tool_use_id": "1", "content": parts}
    call = ("assistant", [{**CALL, "input": {}}])
    assert turns(call, ("user", [result]))[-1] == Turn("tool", f"Seen:\n{UNREAD.format('image')}\nf", call_id="1")
    pages = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}}
    with_pages = turns(call, ("user", [{**result, "content": "Read."}, pages, image]))
    assert with_pages[1:] == (
        Turn("tool", "Read.", call_id="1"), Turn("user", f"{UNREAD.format('document')}\n{UNREAD.format('image')}"),
    )  # fmt: skip
    for nothing in ({}, {"content": []}, {"content": ""}):
        empty = {"type": "tool_result", "tool_use_id": "1", **nothing}
        assert turns(call, ("user", [empty]))[-1] == Turn("tool", "", call_id="1")


def test_an_empty_answer_can_be_sent_back() -> None:
    assert turns(("user", "a"), ("assistant", []), ("user", "b"))[1] == Turn("assistant", "")


def test_tools_may_have_long_names_and_be_called_directly() -> None:
    long = {**TOOL, "name": "mcp__" + "x" * 123, "allowed_callers": ["direct"]}
    ask = read(tools=[long], tool_choice={"type": "tool", "name": long["name"]})
    assert ask.must_call == (long["name"],) == (ask.tools[0].name,)


def test_blocks_about_the_clients_accounting_are_not_shown_to_the_model() -> None:
    system = [{"type": "text", "text": text} for text in ("x-anthropic-billing-header: cch=1f2a;", "Be short.")]
    assert turns(("user", "?"), system=system) == (Turn("system", "Be short."), Turn("user", "?"))
    assert turns(("user", "?"), system=system[:1]) == (Turn("user", "?"),)


def test_a_last_message_of_the_assistant_is_continued() -> None:
    assert read(messages=[*ASK, {"role": "assistant", "content": "Well,"}]).continues and not read().continues
    for nothing in ("", []):
        ask = read(messages=[*ASK, {"role": "assistant", "content": nothing}])
        assert ask.turns == (Turn("user", "?"),) and not ask.continues


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, None),
        ({"thinking": {"type": "adaptive"}}, "medium"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, "medium"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, "xhigh"),
        ({"output_config": {"effort": "low"}}, "low"),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, "none"),
    ],
)
def test_thinking_is_a_wish(fields: dict[str, Any], effort: str | None) -> None:
    """Clients send it to every model, also to those that cannot think."""
    ask = read(**fields)
    assert (ask.reasoning_effort, ask.needs_effort) == (effort, False)


def test_tool_choices() -> None:
    def choice(**fields: Any) -> Any:
        ask = read(tools=[TOOL], tool_choice=fields)
        return len(ask.tools), ask.must_call, ask.parallel_calls

    assert choice(type="auto") == (1, (), True) and choice(type="none") == (0, (), True)
    assert choice(type="any") == (1, ("add",), True) and choice(type="tool", name="add") == (1, ("add",), False)
    assert choice(type="auto", disable_parallel_tool_use=True) == (1, (), False)


def test_an_output_format_sets_the_schema() -> None:
    form = {"format": {"type": "json_schema", "schema": {"type": "integer"}}}
    assert read(output_config=form).schema == {"type": "integer"} and read().schema is None
    older = read(output_format=form["format"])
    assert (older.schema, older.schema_field) == ({"type": "integer"}, "output_format")
    assert read(output_config=form).schema_field == "output_config.format"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "messages is an empty list"),
        ({"messages": [{"content": "x"}]}, r"messages\[0\].role is missing, wanted one of user, assistant, system"),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\].role is \"tool\""),
        ({"messages": [{"role": "user", "content": []}]}, r"messages\[0\].content is missing or empty"),
        ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\].content.text is 3, wanted text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            r"content\[0\].type is \"image\", wanted one of text, document, search_result, tool_result: other content",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]},
            r"content\[0\].source is not of type .*only plain text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]},
            "must not answer a tool call that no earlier message has made",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{**CALL, "input": {}}]}]},
            "messages must end with one of role user or tool",
        ),
        (
            {"messages": [{"role": "assistant", "content": [CALL]}]},
            r"content\[0\].input is missing",
        ),
        ({"messages": [{"role": "user", "content": "x" * 501}]}, "501 characters"),
        ({"system": [{"type": "image"}]}, r"system\[0\].type .*only text"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[0\].type .*that the client runs"),
        ({"tools": [{**TOOL, "allowed_callers": ["code_execution_20260120"]}]}, "callers .*only the model itself"),
        ({"tools": [{**TOOL, "name": "x" * 129}]}, "name has 129 characters, wanted at most 128"),
        ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, r"tools\[0\].input_schema is not a JSON"),
        ({"tools": [TOOL, TOOL]}, "tools repeat a name"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice names a tool that is not among the tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice is any, but there are no tools"),
        ({"thinking": {"type": "much"}}, "thinking.type is"),
        ({"output_config": {"effort": "none"}}, "output_config.effort is"),
        ({"mcp_servers": [{}]}, "mcp_servers is a list: the service runs no tools of its own"),
        ({"stop_sequences": [""]}, "stop_sequences holds an empty text"),
        ({"max_tokens": 0}, "max_tokens must lie"),
        ({"n": 2}, "n is not a field"),
    ],
)  # fmt: skip
def test_invalid_fields_of_messages_are_refused_with_the_reason(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequestError, match=words):
        read(**fields)
