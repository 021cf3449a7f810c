"""Request bodies become an Ask, or an error that names the field at fault."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.api.app import read_detokenize
from workers.api.errors import HttpError, error_body
from workers.api.parsing import ParsedRequest, read_chat, read_completion, read_new_context
from workers.serving.messages import Ask, BadRequestError, ServingError, Tool, ToolCall, Turn
from workers.settings import LimitSettings

MODEL = "smollm2-135m"
LIMITS = LimitSettings(max_new_tokens=1000, max_question_chars=500)
CHAT = {"model": f"{MODEL}@handbook", "messages": [{"role": "user", "content": "Why?"}]}
TEXT = {"model": f"{MODEL}@handbook", "prompt": "And so"}


def chat(**fields: Any) -> Any:
    return read_chat({**CHAT, **fields}, "id", MODEL, LIMITS)


def completion(**fields: Any) -> Any:
    return read_completion({**TEXT, **fields}, "id", MODEL, LIMITS)


def ask_of(asked: ParsedRequest) -> Ask:
    """Return the only Ask of a request."""
    [ask] = asked.asks
    return ask


def test_a_minimal_chat_gets_the_defaults() -> None:
    asked = chat()
    ask = ask_of(asked)
    assert (ask.context, ask.turns, ask.prompt) == ("handbook", (Turn("user", "Why?"),), None)
    sampling = ask.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.stop) == (0.0, 1.0, None, ())
    assert (sampling.max_new_tokens, sampling.top_logprobs) == (LIMITS.max_new_tokens, None)
    assert (ask.keep, ask.lookahead, ask.rest, ask.selector) == (None, None, None, None)
    assert (asked.stream, asked.include_usage, asked.kind) == (False, False, "chat")


def test_a_minimal_completion_gets_the_defaults() -> None:
    ask = ask_of(completion())
    assert (ask.turns, ask.prompt, ask.sampling.max_new_tokens) == ((), "And so", 16)
    assert ask_of(completion(prompt=["one"])).prompt == "one"


def test_every_chat_field_is_parsed() -> None:
    asked = chat(
        max_completion_tokens=1000, temperature=2, top_p=0.5, seed=-1, stop=["a", "b", "c", "d"], logprobs=True,
        top_logprobs=20, stream=True, stream_options={"include_usage": True, "include_obfuscation": False}, n=1,
        keep=1, lookahead=0, rest="none", selector="full", user="u", metadata={"a": "b"}, store=False, tools=[],
        logit_bias={},
        response_format={"type": "text"}, frequency_penalty=0.0, presence_penalty=0, tool_choice="auto",
        modalities=["text"], service_tier="auto", parallel_tool_calls=True,
    )  # fmt: skip
    ask, sampling = ask_of(asked), ask_of(asked).sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p) == (1000, 2.0, 0.5)
    assert (sampling.seed, sampling.stop, sampling.top_logprobs) == (2**63 - 1, ("a", "b", "c", "d"), 20)
    assert (ask.keep, ask.lookahead, ask.rest, ask.selector) == (1.0, 0, "none", "full")
    assert asked.stream and asked.include_usage


def test_numbers_of_sampling_and_the_salt_arrive_unchanged() -> None:
    numbers = {"temperature": 0.7, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "presence_penalty": -0.5}
    numbers |= {"frequency_penalty": 0.25, "repetition_penalty": 1.5, "min_tokens": 2, "seed": 3}
    ask = ask_of(chat(**numbers, cache_salt="mine"))
    assert {name: getattr(ask.sampling, name) for name in numbers} == numbers
    assert ask.cache_salt == "mine"


def test_stop_token_ids_min_tokens_and_ignore_eos_are_parsed() -> None:
    given = {"stop_token_ids": [5, 0], "min_tokens": 9, "ignore_eos": True}
    for asked in (chat(**given), completion(**given)):
        sampling = ask_of(asked).sampling
        assert (sampling.stop_token_ids, sampling.min_tokens, sampling.ignore_eos) == ((5, 0), 9, True)
    for usage, continuous in ((True, True), (True, False), (False, True)):
        options = {"include_usage": usage, "continuous_usage_stats": continuous}
        assert ask_of(chat(stream=True, stream_options=options)).reports_usage == (usage and continuous)


def test_chat_template_kwargs_and_reasoning_effort_are_parsed() -> None:
    ask = ask_of(chat(chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low"))
    assert (ask.template_options, ask.reasoning_effort) == ({"enable_thinking": False}, "low")
    assert (ask_of(chat()).template_options, ask_of(chat()).reasoning_effort) == ({}, None)


def test_continue_final_message_is_parsed() -> None:
    for more in ({}, {"add_generation_prompt": False}):
        ask = ask_of(chat(messages=BEGUN, continue_final_message=True, **more))
        assert ask.continues and ask.turns[-1] == Turn("assistant", "Because")
    assert chat(add_generation_prompt=True, continue_final_message=False) == chat()


def test_other_servers_fields_with_neutral_values_are_ignored() -> None:
    assert chat(cache_prompt=True, id_slot=-1, length_penalty=1.0, skip_special_tokens=True, grammar="") == chat()


@pytest.mark.parametrize(("asked", "given"), [(999, 999), (1000, 1000), (1001, 1000), (2**31 - 1, 1000)])
def test_max_tokens_is_capped_at_the_services_limit(asked: int, given: int) -> None:
    assert ask_of(chat(max_tokens=asked)).sampling.max_new_tokens == given
    assert ask_of(completion(max_tokens=asked)).sampling.max_new_tokens == given


def test_prompt_caching_hints_are_ignored() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    turns = [{"role": "user", "content": [{"type": "text", "text": "Why?", **mark}], **mark}]
    kept = {"messages": turns, "tools": [{**TOOL, **mark}], "prompt_cache_options": {"mode": "explicit"}}
    assert chat(**kept, **mark, verbosity="low") == chat(tools=[TOOL])


def test_null_fields_count_as_absent() -> None:
    nothing = {"temperature": None, "stop": None, "seed": None, "n": None, "stream": None, "keep": None, "xyz": None}
    assert chat(**nothing) == chat()


def test_messages_become_turns() -> None:
    turns = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
        {"role": "assistant", "content": "", "refusal": None, "tool_calls": [], "annotations": None},
        {"role": "user", "content": "c"},
    ]
    assert [(turn.role, turn.content) for turn in ask_of(chat(messages=turns)).turns] == [
        ("system", "Be short."), ("user", "a\nb"), ("assistant", ""), ("user", "c"),
    ]  # fmt: skip


TOOL = {"type": "function", "function": {"name": "look_up", "description": "d", "parameters": {"type": "object"}}}
BEGUN = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because"}]
CALLING = {"role": "assistant", "content": None, "tool_calls": []}


def tool_with(**changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **changes}}


def call_with(**changes: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}", **changes}}


def test_tools_tool_calls_and_tool_results_become_turns() -> None:
    turns = [
        {"role": "user", "content": "a"},
        {**CALLING, "tool_calls": [call_with(arguments='{"x": 1}')], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "2"}, {"type": "image_url"}]},
    ]
    ask = ask_of(chat(messages=turns, tools=[TOOL, tool_with()], parallel_tool_calls=False))
    assert ask.turns[1:] == (
        Turn("assistant", "", (ToolCall("1", "f", {"x": 1}),), reasoning="hm"),
        Turn("tool", "2\n[image: not shown, because this service reads only text]", call_id="1"),
    )
    assert ask.tools[0] == Tool("look_up", {"type": "object"}, "d") and ask.tools[1].parameters["properties"] == {}
    assert (ask.must_call, ask.parallel_calls) == ((), False)


def test_text_of_an_assistant_may_repeat_the_messages_fields() -> None:
    """OpenAI's Agents SDK for JavaScript sends it back so."""
    call = call_with()
    told = {"type": "text", "text": "Yes.", "role": "assistant", "refusal": None, "reasoning_content": "Hm.",
            "tool_calls": [call]}  # fmt: skip
    messages: Any = [{"role": "user", "content": "?"}, {"role": "assistant", "content": [told], "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": call["id"], "content": "x"})
    turn = ask_of(chat(messages=messages, tools=[TOOL])).turns[1]
    assert (turn.content, len(turn.calls), turn.reasoning) == ("Yes.", 1, "")
    with pytest.raises(BadRequestError, match=r"messages\[0\].content\[0\].role is not a field"):
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": "?", "role": "user"}]}])


def test_truncated_tool_calls_and_empty_answers_are_accepted_as_messages() -> None:
    half = '{"x": "\\ud83d"}'
    calls = [call_with(arguments=written) for written in ('{"x": ', "[]", half, "")]
    turns = [CHAT["messages"][0], {**CALLING, "tool_calls": calls}, CALLING, CHAT["messages"][0]]
    said = ask_of(chat(messages=turns)).turns
    assert [call.arguments for call in said[1].calls] == ['{"x": ', "[]", half, {}], "templates write no halves"
    assert said[2] == Turn("assistant", "")


def test_arguments_with_lone_surrogates_are_kept_as_written() -> None:
    written = '{"x": "\\ud800"}'
    turns = [CHAT["messages"][0], {**CALLING, "tool_calls": [call_with(arguments=written)]}, CHAT["messages"][0]]
    assert ask_of(chat(messages=turns)).turns[1].calls[0].arguments == written


def test_a_tools_schema_keeps_its_key_order() -> None:
    written = {"properties": {"x": {"type": "integer"}}, "required": ["x"], "title": "f", "type": "object"}
    [tool] = ask_of(chat(tools=[tool_with(parameters=written)])).tools
    assert list(tool.parameters.items()) == list(written.items())


def test_tool_choice_sets_which_tools_must_be_called() -> None:
    tools = [TOOL, tool_with()]
    named = {"type": "function", "function": {"name": "f"}}
    assert ask_of(chat(tools=tools, tool_choice="required")).must_call == ("look_up", "f")
    ask = ask_of(chat(tools=tools, tool_choice=named))
    assert ask.must_call == ("f",) and not ask.parallel_calls, "OpenAI's service calls it once, too"
    assert ask_of(chat(tools=tools, tool_choice="none")).tools == ()


def test_response_format_sets_the_answers_schema() -> None:
    schema = {"type": "integer"}
    assert ask_of(chat(response_format={"type": "text"})).schema is None
    assert ask_of(chat(response_format={"type": "json_object"})).schema == {"type": "object"}
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    assert ask_of(chat(response_format=form)).schema == schema
    assert ask_of(completion(response_format=form)).schema == schema


def test_each_choice_has_its_own_seed_and_request_id() -> None:
    asked = chat(n=3, seed=2**63 - 1)
    assert [ask.sampling.seed for ask in asked.asks] == [2**63 - 1, 0, 1]
    assert [ask.request_id for ask in asked.asks] == ["id", "id-1", "id-2"]
    asked = completion(prompt=["a", [1, 2]], n=2)
    assert [ask.prompt for ask in asked.asks] == ["a", "a", (1, 2), (1, 2)]
    assert ask_of(completion(prompt=[5, 6])).prompt == (5, 6)


BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"model": None}, "model", "is missing"),
    ({"model": 3}, "model", "is 3, wanted text"),
    ({"messages": None}, "messages", "is missing"),
    ({"messages": []}, "messages", "is an empty list, wanted a list of one"),
    ({"messages": "hello"}, "messages", 'is "hello", wanted a list'),
    ({"messages": [3]}, "messages[0]", "is a whole number, wanted an object"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "is missing, wanted one of system"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", 'is "function"'),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "is missing"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages", "must not answer a tool call"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role", "is a list"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "is 5, wanted text"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "an empty list"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]", "wanted an object"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type",
     'is "image_url", wanted "text": only text'),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls", "only an assis"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "tool_calls[0].function", "missing"),
    ({"messages": [CALLING | {"tool_calls": [call_with(name="a b")]}]}, "function.name", "characters other than"),
    ({"messages": [CALLING | {"tool_calls": [call_with()]}]}, "messages", "messages must end with one of"),
    ({"messages": [{"role": "user", "content": "x", "audio": {}}]}, "audio", "messages[0].audio is not a field"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "messages", "to continue it, set continue_final_message"),
    ({"continue_final_message": True}, "continue_final_message", "the last message is not the text of an assistant"),
    (
        {"continue_final_message": True, "messages": [CALLING | {"tool_calls": [call_with()]}]},
        "continue_final_message", "is not the text of an assistant",
    ),
    (
        {"continue_final_message": True, "add_generation_prompt": True, "messages": BEGUN},
        "add_generation_prompt", "and so is continue_final_message",
    ),
    ({"add_generation_prompt": False}, "add_generation_prompt", "no answer would be generated"),
    ({"add_generation_prompt": 1}, "add_generation_prompt", "is 1, wanted true or false"),
    ({"messages": [{"role": "user", "content": "x" * 501}]}, "messages[0].content", "501 characters, wanted at most"),
    ({"messages": [{"role": "user", "content": "x" * 300}] * 2}, "messages", "in all, got 600"),
    ({"messages": [{"role": "assistant", "content": "x" * 300, "reasoning_content": "x" * 300}, *CHAT["messages"]]},
     "messages", "in all, got 604"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "half a surrogate pair"),
    ({"max_tokens": 0}, "max_tokens", "between 1 and 2147483647, got 0"),
    ({"max_tokens": 2**31}, "max_tokens", "between 1 and 2147483647, got 2147483648"),
    ({"max_tokens": 1.5}, "max_tokens", "wanted a whole number"),
    ({"max_tokens": True}, "max_tokens", "is true, wanted a whole number"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "differ"),
    ({"temperature": 2.01}, "temperature", "at least 0 and at most 2"),
    ({"temperature": -0.1}, "temperature", "at least 0"),
    ({"temperature": "hot"}, "temperature", 'is "hot", wanted a number'),
    ({"temperature": 10**400}, "temperature", "at most 2"),
    ({"top_p": 0}, "top_p", "more than 0 and at most 1"),
    ({"n": 0}, "n", "between 1 and 96"),
    ({"n": 97}, "n", "between 1 and 96"),
    ({"n": "1"}, "n", "wanted a whole number"),
    ({"n": True}, "n", "wanted a whole number"),
    ({"stop": ["a"] * 17}, "stop", "17 entries, wanted at most 16"),
    ({"stop": [1]}, "stop", "is 1, wanted text"),
    ({"stop": ""}, "stop", "empty text"),
    ({"stop": "x" * 257}, "stop", "257 characters"),
    ({"seed": 2**63}, "seed", "must lie between"),
    ({"seed": 1.0}, "seed", "wanted a whole number"),
    ({"stream": 1}, "stream", "wanted true or false"),
    ({"stream_options": {}}, "stream_options", "stream is not true"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "stream_options.x is not a field"),
    ({"stream": True, "stream_options": 1}, "stream_options", "wanted an object"),
    ({"logprobs": 3}, "logprobs", "wanted true or false"),
    ({"top_logprobs": 3}, "top_logprobs", "logprobs is not true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
    ({"keep": 0}, "keep", "more than 0"),
    ({"keep": 1.01}, "keep", "at most 1"),
    ({"lookahead": 2}, "lookahead", "between 0 and 1"),
    ({"rest": True}, "rest", "is true, wanted one of sketch, moments, none"),
    ({"selector": "best"}, "selector", "wanted one of csattn, exact, quest"),
    ({"top_k": -2}, "top_k", "between -1"),
    ({"min_p": 1.5}, "min_p", "at most 1"),
    ({"frequency_penalty": 2.5}, "frequency_penalty", "at least -2 and at most 2"),
    ({"presence_penalty": "x"}, "presence_penalty", "wanted a number"),
    ({"repetition_penalty": 0}, "repetition_penalty", "0.01"),
    ({"logit_bias": [1]}, "logit_bias", "is not an object"),
    ({"logit_bias": {"a": 5}}, "logit_bias", "key that is not a token id"),
    ({"logit_bias": {"\u0661": 5}}, "logit_bias", "key that is not a token id"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "number from -100 to 100"),
    ({"logit_bias": {"1": True}}, "logit_bias", "number from -100 to 100"),
    ({"prediction": "text"}, "prediction", "is text, wanted an object"),
    ({"prediction": {"content": "text"}}, "prediction.type", "is missing, wanted content"),
    ({"prediction": {"type": "text", "content": "text"}}, "prediction.type", "wanted one of content"),
    ({"prediction": {"type": "content"}}, "prediction.content", "is missing, wanted text"),
    ({"prediction": {"type": "content", "content": [{"type": "image"}]}}, "prediction.content[0].type", "only text"),
    ({"prediction": {"type": "content", "content": "x", "more": 1}}, "prediction.more", "is not a field"),
    ({"tools": {}}, "tools", "is not a list"),
    ({"tools": [TOOL] * 513}, "tools", "at most 512"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "is missing"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "runs no tools of its own"),
    ({"tools": [tool_with(name="a.b")]}, "tools[0].function.name", "characters other than"),
    ({"tools": [tool_with(parameters=[])]}, "tools[0].function.parameters", "not a JSON schema"),
    ({"tools": [tool_with(parameters={"type": "string"})]}, "tools[0].function.parameters", "not a JSON schema"),
    ({"tools": [tool_with(parameters={"properties": []})]}, "tools[0].function.parameters", "properties"),
    ({"tools": [tool_with(strict=1)]}, "tools[0].function.strict", "wanted true or false"),
    ({"tools": [TOOL, TOOL]}, "tools", "repeat a name"),
    ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"tool_choice": "often", "tools": [TOOL]}, "tool_choice", "is not one of none"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, "tool_choice", "not among"),
    ({"tool_choice": {"type": "allowed_tools"}, "tools": [TOOL]}, "tool_choice.type", "is not"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
    ({"functions": [{}]}, "functions", "replaced by tools"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "wanted one of text"),
    ({"response_format": {}}, "response_format.type", "is missing"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema", "missing"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"\ud83d": {}}}}}]},
     "tools[0].function.parameters", "half a surrogate pair"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["\ud83d"]}}}},
     "response_format.json_schema.schema", "half a surrogate pair"),
    ({"modalities": ["audio"]}, "modalities", "only text is written"),
    ({"audio": {"voice": "x"}}, "audio", "only text is written"),
    ({"reasoning_effort": "much"}, "reasoning_effort", 'is "much", wanted one of none, minimal'),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "is not an object of at most 16"),
    ({"chat_template_kwargs": {f"a{n}": n for n in range(17)}}, "chat_template_kwargs", "is not an object of at most"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "has tools, which the service itself passes"),
    ({"chat_template_kwargs": {"a": "b" * 4096}}, "chat_template_kwargs", "has more than 4096 characters, or half"),
    ({"chat_template_kwargs": {"a": "\ud800"}}, "chat_template_kwargs", "or half a surrogate pair"),
    ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs", 'has "a b", which is not a name that a template'),
    ({"max_token": 5}, "max_token", "did you mean max_tokens?"),
    ({"cache_prompts": 5}, "cache_prompts", "is not a field that this service knows"),
    ({"guided_json": {}}, "guided_json", "is an object: use response_format to constrain answers"),
    ({"n_predict": 5}, "n_predict", "is 5: it is called max_tokens here"),
    ({"skip_special_tokens": False}, "skip_special_tokens", "special tokens have no text"),
    ({"stop_token_ids": 5}, "stop_token_ids", "is not a list"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "something other than token ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids", "something other than token ids"),
    ({"min_tokens": -1}, "min_tokens", "must lie between 0"),
    ({"ignore_eos": 1}, "ignore_eos", "wanted true or false"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": 1}}, "continuous_usage_stats", "true or false"),
    ({"prompt": "x"}, "prompt", "is not a field"),
    ({"x" * 5000: 5}, "x", "is not a field"),
    ({"x\ud83d": 5}, "x?", "x? is not a field"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "words"), BAD_CHATS)
def test_invalid_chat_fields_are_refused_with_the_field_and_reason(
    fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(BadRequestError) as refused:
        chat(**fields)
    assert words in error_body(refused.value)["error"]["message"]
    assert "did you mean" in words or "did you mean" not in refused.value.message
    assert param in error_body(refused.value)["error"]["param"]
    assert len(json.dumps(error_body(refused.value))) < 4096


def test_the_type_of_an_error_follows_its_status() -> None:
    kinds = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
    kinds |= {409: "conflict_error", 413: "invalid_request_error", 429: "rate_limit_error"}
    kinds |= {499: "invalid_request_error", 500: "server_error", 503: "server_error"}
    assert {status: error_body(HttpError(status, "code", "why"))["error"]["type"] for status in kinds} == kinds


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": "x" * 500}]},
        {"messages": [{"role": "user", "content": "x" * 250}] * 2},
        {"max_tokens": 1},
        {"temperature": 0, "top_p": 1, "min_p": 0},
        {"temperature": 2, "min_p": 1},
        {"top_k": -1},
        {"top_k": 2**31 - 1},
        {"frequency_penalty": -2, "presence_penalty": -2, "repetition_penalty": 0.01},
        {"frequency_penalty": 2, "presence_penalty": 2, "repetition_penalty": 2},
        {"n": 96},
        {"stop": ["x" * 256] * 16},
        {"stop_token_ids": [0] * 1024},
        {"seed": -(2**63)},
        {"logprobs": True, "top_logprobs": 0},
        {"keep": 1, "lookahead": 1},
        {"min_tokens": 0},
        {"logit_bias": {f"{n}": 100 - n % 201 for n in range(1024)}},
        {"tools": [tool_with(name=f"f{n}") for n in range(512)]},
        {"chat_template_kwargs": {f"a{n}": n for n in range(16)}},
        {"chat_template_kwargs": {"a": "b" * (4096 - len('{"a": ""}'))}},
    ],
)
def test_chat_fields_at_their_limits_are_accepted(fields: dict[str, Any]) -> None:
    assert chat(**fields).asks


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "x" * 500},
        {"prompt": [[1]] * 96},
        {"prompt": ["a"] * 48, "n": 2},
        {"logprobs": 0},
        {"logprobs": 20},
        {"max_tokens": 0, "echo": True},
    ],
)
def test_completion_fields_at_their_limits_are_accepted(fields: dict[str, Any]) -> None:
    assert completion(**fields).asks


def test_token_ids_are_those_of_int32_from_0_on() -> None:
    ids = 0, 2**31 - 1
    assert ask_of(completion(prompt=[*ids])).prompt == ids == read_detokenize({"tokens": [*ids]}, MODEL)
    sampling = ask_of(chat(stop_token_ids=[*ids], logit_bias={"0": 1, "2147483647": 2})).sampling
    assert (sampling.stop_token_ids, sampling.logit_bias) == (ids, ((0, 1.0), (2**31 - 1, 2.0)))
    for token_id in (-1, 2**31):
        with pytest.raises(BadRequestError, match="prompt holds something other than"):
            completion(prompt=[token_id])
        with pytest.raises(BadRequestError, match="tokens is not a list of token ids"):
            read_detokenize({"tokens": [token_id]}, MODEL)
        with pytest.raises(BadRequestError, match="stop_token_ids holds something other than"):
            chat(stop_token_ids=[token_id])
        with pytest.raises(BadRequestError, match="logit_bias has a key that is not"):
            chat(logit_bias={str(token_id): 1})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": None}, "prompt is missing or empty"),
        ({"prompt": ""}, "prompt is missing or empty"),
        ({"prompt": []}, "prompt is missing or empty"),
        ({"prompt": ["a", ""]}, "prompt is missing or empty"),
        ({"prompt": [1, "a"]}, "prompt holds something other than"),
        ({"prompt": [["a"]]}, "prompt holds something other than"),
        ({"prompt": [[-1]]}, "prompt holds something other than"),
        ({"prompt": [[1]] * 97}, "prompt and n ask for more than 96"),
        ({"prompt": ["a"] * 49, "n": 2}, "prompt and n ask for more than 96"),
        ({"prompt": {}}, "prompt is an object"),
        ({"max_tokens": 0}, "max_tokens must lie between 1"),
        ({"prompt": "x" * 501}, "prompt has 501 characters"),
        ({"echo": 1}, "echo is 1, wanted true or false"),
        ({"suffix": "x"}, 'suffix is "x"'),
        ({"best_of": 2}, "best_of is 2"),
        ({"logprobs": True}, "logprobs is true, wanted a whole number"),
        ({"messages": []}, "messages is not a field"),
        ({"reasoning_effort": "low"}, "a completion's prompt does not use a chat template"),
        ({"chat_template_kwargs": {"a": 1}}, "a completion's prompt does not use a chat template"),
    ],
)
def test_invalid_completion_fields_are_refused_with_the_reason(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequestError, match=words.replace("[", r"\[")):
        completion(**fields)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([], "the body is a list, wanted an object"),
        ({"text": "x"}, "name is missing"),
        ({"name": "a"}, "text is missing"),
        ({"name": "a", "text": "\udfff"}, "half a surrogate pair"),
        ({"name": "a", "text": "x", "path": "/etc/passwd"}, "path is not a field"),
    ],
)
def test_invalid_context_registrations_are_refused_with_the_reason(body: Any, words: str) -> None:
    with pytest.raises(BadRequestError, match=words):
        read_new_context(body)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELD_NAMES = sorted({name for fields, _, _ in BAD_CHATS for name in fields} | {"prompt", "echo", "model", "metadata"})


@given(st.dictionaries(st.sampled_from(FIELD_NAMES), json_values, max_size=4), st.booleans())
def test_arbitrary_fields_are_parsed_or_refused_with_a_short_error(fields: dict[str, Any], is_chat: bool) -> None:
    said = ""
    try:
        chat(**fields) if is_chat else completion(**fields)
    except ServingError as error:
        said = json.dumps(error_body(error))
    assert len(said) < 4096
