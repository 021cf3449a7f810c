"""What clients send becomes an Ask, or a sentence that names the field at fault."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.api.asking import read_chat, read_completion, read_new_context
from workers.api.errors import error_body
from workers.api.names import checked_context_name, context_of, short_model_name
from workers.serving.messages import BadRequestError, ServingError, Turn, UnknownContextError
from workers.settings import LimitSettings

MODEL = "smollm2-135m"
LIMITS = LimitSettings(max_new_tokens=1000, max_question_chars=500)
CHAT = {"model": f"{MODEL}@handbook", "messages": [{"role": "user", "content": "Why?"}]}
TEXT = {"model": f"{MODEL}@handbook", "prompt": "And so"}


def chat(**fields: Any) -> Any:
    return read_chat({**CHAT, **fields}, "id", MODEL, LIMITS)


def completion(**fields: Any) -> Any:
    return read_completion({**TEXT, **fields}, "id", MODEL, LIMITS)


def test_a_plain_chat() -> None:
    asked = chat()
    assert (asked.ask.context, asked.ask.turns, asked.ask.prompt) == ("handbook", (Turn("user", "Why?"),), None)
    sampling = asked.ask.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.stop) == (0.0, 1.0, None, ())
    assert (sampling.max_new_tokens, sampling.top_logprobs) == (512, None)
    assert (asked.ask.keep, asked.ask.lookahead, asked.ask.rest, asked.ask.selector) == (None, None, None, None)
    assert (asked.stream, asked.include_usage, asked.is_chat) == (False, False, True)


def test_a_plain_completion() -> None:
    asked = completion()
    assert (asked.ask.turns, asked.ask.prompt, asked.ask.sampling.max_new_tokens) == ((), "And so", 16)
    assert completion(prompt=["one"]).ask.prompt == "one"


def test_every_field_arrives() -> None:
    asked = chat(
        max_completion_tokens=1000, temperature=2, top_p=0.5, seed=-1, stop=["a", "b", "c", "d"], logprobs=True,
        top_logprobs=20, stream=True, stream_options={"include_usage": True, "include_obfuscation": False}, n=1,
        keep=1, lookahead=0, rest="none", selector="full", user="u", metadata={"a": "b"}, store=False, tools=[],
        logit_bias={},
        response_format={"type": "text"}, frequency_penalty=0.0, presence_penalty=0, tool_choice="auto",
        modalities=["text"], service_tier="auto", parallel_tool_calls=True,
    )  # fmt: skip
    sampling = asked.ask.sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p) == (1000, 2.0, 0.5)
    assert (sampling.seed, sampling.stop, sampling.top_logprobs) == (2**63 - 1, ("a", "b", "c", "d"), 20)
    assert (asked.ask.keep, asked.ask.lookahead, asked.ask.rest, asked.ask.selector) == (1.0, 0, "none", "full")
    assert asked.stream and asked.include_usage


def test_null_counts_as_absent() -> None:
    nothing = {"temperature": None, "stop": None, "seed": None, "n": None, "stream": None, "keep": None, "xyz": None}
    assert chat(**nothing) == chat()


def test_conversations() -> None:
    turns = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
        {"role": "assistant", "content": "", "refusal": None, "tool_calls": [], "annotations": None},
        {"role": "user", "content": "c"},
    ]
    assert [(turn.role, turn.content) for turn in chat(messages=turns).ask.turns] == [
        ("system", "Be short."), ("user", "ab"), ("assistant", ""), ("user", "c"),
    ]  # fmt: skip


BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"model": None}, "model", "is missing"),
    ({"model": 3}, "model", "is 3, wanted text"),
    ({"messages": None}, "messages", "is missing"),
    ({"messages": []}, "messages", "is an empty list, wanted a list of one"),
    ({"messages": "hello"}, "messages", 'is "hello", wanted a list'),
    ({"messages": [3]}, "messages[0]", "is a whole number, wanted an object"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "is missing, wanted one of system"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", 'is "tool"'),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role", "is a list"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "is 5, wanted text"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "an empty list"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]", "wanted an object"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type", "only text"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls", "tools are not"),
    ({"messages": [{"role": "user", "content": "x", "audio": {}}]}, "audio", "messages[0].audio is not a field"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "messages", "end with one of role assistant"),
    ({"messages": [{"role": "user", "content": "x" * 501}]}, "messages[0].content", "501 characters, wanted at most"),
    ({"messages": [{"role": "user", "content": "x" * 300}] * 2}, "messages", "have 600 characters"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "half a surrogate pair"),
    ({"max_tokens": 0}, "max_tokens", "between 1 and 1000, got 0"),
    ({"max_tokens": 10**9}, "max_tokens", "between 1 and 1000, got 1000000000"),
    ({"max_tokens": 1.5}, "max_tokens", "wanted a whole number"),
    ({"max_tokens": True}, "max_tokens", "is true, wanted a whole number"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "differ"),
    ({"temperature": 2.01}, "temperature", "at least 0 and at most 2"),
    ({"temperature": -0.1}, "temperature", "at least 0"),
    ({"temperature": "hot"}, "temperature", 'is "hot", wanted a number'),
    ({"temperature": 10**400}, "temperature", "at most 2"),
    ({"top_p": 0}, "top_p", "more than 0 and at most 1"),
    ({"n": 2}, "n", "one answer is given"),
    ({"n": "1"}, "n", "one answer is given"),
    ({"n": True}, "n", "one answer is given"),
    ({"stop": ["a"] * 5}, "stop", "5 entries, wanted at most 4"),
    ({"stop": [1]}, "stop", "is 1, wanted text"),
    ({"stop": ""}, "stop", "empty text"),
    ({"stop": "x" * 257}, "stop", "257 characters"),
    ({"seed": 2**63}, "seed", "must lie between"),
    ({"seed": 1.0}, "seed", "wanted a whole number"),
    ({"stream": 1}, "stream", "wanted true or false"),
    ({"stream_options": {}}, "stream_options", "stream is not true"),
    ({"stream": True, "stream_options": {"x": 1}}, "x", "stream_options.x is not a field"),
    ({"stream": True, "stream_options": 1}, "stream_options", "wanted an object"),
    ({"logprobs": 3}, "logprobs", "wanted true or false"),
    ({"top_logprobs": 3}, "top_logprobs", "logprobs is not true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
    ({"keep": 0}, "keep", "more than 0"),
    ({"keep": 1.01}, "keep", "at most 1"),
    ({"lookahead": 2}, "lookahead", "between 0 and 1"),
    ({"rest": True}, "rest", "is true, wanted one of sketch, moments, none"),
    ({"selector": "best"}, "selector", "wanted one of csattn, exact, top_p, quest"),
    ({"tools": [{"type": "function"}]}, "tools", "tools are not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format", "only text is written"),
    ({"frequency_penalty": 0.5}, "frequency_penalty", "penalties are not supported"),
    ({"logit_bias": {"1": 5}}, "logit_bias", "not supported"),
    ({"max_token": 5}, "max_token", "did you mean max_tokens?"),
    ({"prompt": "x"}, "prompt", "is not a field"),
    ({"x" * 5000: 5}, "x", "is not a field"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "words"), BAD_CHATS)
def test_a_chat_that_cannot_be_answered(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        chat(**fields)
    assert words in refused.value.message
    assert refused.value.param is not None and param in refused.value.param
    assert len(json.dumps(error_body(refused.value))) < 4096


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": None}, "prompt is missing or empty"),
        ({"prompt": ""}, "prompt is missing or empty"),
        ({"prompt": [1, 2]}, "prompt has 2 entries, wanted at most 1"),
        ({"prompt": [[1, 2]]}, "prompt is a list, wanted text"),
        ({"prompt": "x" * 501}, "prompt has 501 characters"),
        ({"echo": True}, "echo is true"),
        ({"suffix": "x"}, 'suffix is "x"'),
        ({"best_of": 2}, "best_of is 2"),
        ({"logprobs": True}, "logprobs is true, wanted a whole number"),
        ({"messages": []}, "messages is not a field"),
    ],
)
def test_a_completion_that_cannot_be_answered(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequestError, match=words.replace("[", r"\[")):
        completion(**fields)


@pytest.mark.parametrize("asked", ["handbook", "gpt-4", f"{MODEL}@", f"{MODEL}@a/b", "other@handbook", f"{MODEL}@a\n"])
def test_models_that_cannot_be(asked: str) -> None:
    with pytest.raises(UnknownContextError) as refused:
        chat(model=asked)
    assert refused.value.param == "model"
    assert context_of(f"{MODEL}@a.b-C_9", MODEL) == "a.b-C_9"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "a@b", "é", "-a", "a" * 65, "a\n", "a%2f", "\x00"])
def test_names_that_contexts_cannot_have(name: str) -> None:
    with pytest.raises(BadRequestError, match="wanted 1 to 64 letters"):
        checked_context_name(name)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (None, "smollm2-135m"),
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("/models/My Model (v2).GGUF", "my-model-v2"),
        ("///", "model"),
    ],
)
def test_short_names_of_models(name: str | None, short: str) -> None:
    assert short_model_name(name) == short


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([], "the body is a list, wanted an object"),
        ({"text": "x"}, "name is missing"),
        ({"name": "a"}, "text is missing"),
        ({"name": "a", "text": " \n"}, "text is empty"),
        ({"name": "a", "text": "\udfff"}, "half a surrogate pair"),
        ({"name": "a", "text": "x", "path": "/etc/passwd"}, "path is not a field"),
    ],
)
def test_a_context_that_cannot_be_registered(body: Any, words: str) -> None:
    with pytest.raises(BadRequestError, match=words):
        read_new_context(body)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELD_NAMES = sorted({name for fields, _, _ in BAD_CHATS for name in fields} | {"prompt", "echo", "model", "metadata"})


@given(st.dictionaries(st.sampled_from(FIELD_NAMES), json_values, max_size=4), st.booleans())
def test_whatever_comes_is_read_or_refused_shortly(fields: dict[str, Any], is_chat: bool) -> None:
    said = ""
    try:
        chat(**fields) if is_chat else completion(**fields)
    except ServingError as error:
        said = json.dumps(error_body(error))
    assert len(said) < 4096
