"""Random walks through a grammar: whichever allowed tokens are drawn, the answer fits the schema or calls the tools."""

import asyncio
import json
import weakref
from copy import deepcopy
from functools import reduce
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import decoders, normalizers

from tests.chat_models import TEMPLATES, chat_model
from tests.tiny import loaded
from workers.serving.answer_parser import answer_parser_for
from workers.serving.chat_template import ChatTemplate
from workers.serving.grammar import Grammar, Grammars, _require_moderate
from workers.serving.messages import Ask, BadRequestError, Sampling, Tool, Turn
from workers.serving.request import Writer

INT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TREE = {
    "$defs": {"n": {"type": "object", "properties": {"left": {"$ref": "#/$defs/n"}}, "additionalProperties": False}},
    "$ref": "#/$defs/n",
}  # fmt: skip
NAMED = {  # as pydantic names the classes
    "$defs": {"日 期": {"enum": ["七月", {"$ref": "日"}]}}, "type": "object", "required": ["何日"],
    "properties": {name: {"$ref": "#/$defs/日 期"} for name in ("何日", "default")}, "additionalProperties": False,
}  # fmt: skip
TOOLS = (Tool("add", INT, "Adds."), Tool("get-tree", {"type": "object", **TREE}))
SCHEMAS: list[Any] = [
    INT, TREE, NAMED, {"type": "object"}, {"enum": ["a", 1, None, {"é": [True]}]}, {"type": "string", "maxLength": 4},
    {"type": "string", "pattern": "^[a-f]{2,3}-\\d$"}, {"type": "number", "minimum": -2, "exclusiveMaximum": 7.5},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}, {"type": ["null", "integer"]},
    {"anyOf": [{"const": "\"}"}, {"type": "object", "properties": {"ü": {"const": 1}}, "required": ["ü"]}]}, True,
    {"const": ["a</tool_call>", "<|im_end|>"]}, {"required": ["<|im_end|>"], "type": "object", "maxProperties": 1},
    {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"const": 1}, "maxProperties": 2},
    {"type": "array", "uniqueItems": False, "maxItems": 1}, {"type": "object", "properties": {"uniqueItems": False}},
]  # fmt: skip


THOUGHTS = {"thinking": ["Hm.\n</think>\n\n", "Hm</think>"], "may_think": ["<think>\nHm.\n</think>\n\n", "<tool_call>"]}


def ask(**more: Any) -> Ask:
    turns = more.pop("turns", (Turn("user", "?"),))
    return Ask(request_id="1", context="x", turns=turns, sampling=Sampling(max_new_tokens=1), **more)


def walk(
    kind: str, asked: Ask, seed: int, own_tokens: bool = True, begins: str = "", most: int = 6000
) -> tuple[str, str, list[Any]]:
    """Draw an answer after `begins` from all allowed tokens, and return its text, reasoning and calls.

    Tokens that tend to end texts get more weight.
    """
    model = chat_model(kind, own_tokens)
    template, rng = ChatTemplate(model.tokenizer), np.random.default_rng(seed)
    grammar = Grammars(model).make_now(asked, template)
    writer = Writer(model.tokenizer, (), answer_parser_for(asked, template), template.hidden)
    likely = [
        *model.tokenizer('"}],<').input_ids,
        *model.tokenizer("0123456789").input_ids,
        *template.marker_ids.values(),
    ]
    [end] = model.stop_ids
    pieces, given = [], list(model.tokenizer(begins).input_ids)
    for _ in range(most):
        grammar.begin()
        allowed = grammar.allowed(model.model.config.vocab_size)
        assert allowed.any() and not allowed[len(model.tokenizer) :].any()
        weights = allowed.astype(np.float64)
        weights[likely] *= 50
        weights[end] *= 1 if asked.must_call else 20
        token_id = given.pop(0) if given else int(rng.choice(len(weights), p=weights / weights.sum()))
        assert allowed[token_id], f"{begins!r} is not allowed"
        grammar.accept(token_id)
        if token_id == end:
            break
        pieces.append(writer.add(token_id, None))
        if grammar.is_over:
            break
    else:
        raise AssertionError("the answer does not end")
    pieces = [piece for piece in [*pieces, writer.finish()] if piece is not None]
    calls: dict[int, list[str]] = {}
    for part in (part for piece in pieces for part in piece.calls):
        calls.setdefault(part.index, ["", ""])
        calls[part.index][0] += part.name
        calls[part.index][1] += part.arguments
    text = "".join(piece.text for piece in pieces)
    reasoning = "".join(piece.reasoning for piece in pieces)
    return text, reasoning, [(name, json.loads(arguments)) for name, arguments in calls.values()]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:30])
def test_every_answer_fits_its_schema(schema: Any) -> None:
    for seed in range(3):
        text, _, calls = walk("hermes", ask(schema=schema), seed)
        jsonschema.validate(json.loads(text), schema)
        assert not calls and "\n" not in text


def test_a_grammar_names_forced_and_possible_tokens_and_looks_ahead_without_advancing() -> None:
    model = chat_model("hermes", True)
    schema = {"type": "object", "properties": {"id": {"enum": ["ab", "ac"]}}, "required": ["id"]}
    schema["additionalProperties"] = False
    grammar = Grammars(model).make_now(ask(schema=schema), ChatTemplate(model.tokenizer))

    def encoded(text: str) -> list[int]:
        return list(model.tokenizer(text, add_special_tokens=False).input_ids)

    def next_texts(of: Grammar) -> list[str]:
        return [model.tokenizer.decode([i]) for i in np.flatnonzero(of.allowed(model.geometry.vocab_size))]

    assert grammar.forced() == encoded('{"id": "a')
    assert grammar.possible(encoded('{"id": "ab"}')) == encoded('{"id": "ab"}')
    assert grammar.possible(encoded('{"id": "ad"}')) == encoded('{"id": "a')
    assert grammar.possible([*encoded('{"'), *model.stop_ids, *encoded('id"')]) == encoded('{"')
    assert grammar.possible([model.geometry.vocab_size, *encoded("{")]) == []
    assert next_texts(reduce(Grammar.after, encoded('{"id": "a'), grammar)) == ["b", "c"]
    assert reduce(Grammar.after, encoded('{"id": "ab"}'), grammar).is_over
    assert next_texts(grammar) == ["{"] and not grammar.is_over


@pytest.mark.parametrize("schema", [True, {}, {"type": ["array", "object"]}])
def test_an_answer_to_any_schema_is_on_one_line(schema: Any) -> None:
    model = loaded()
    grammar = Grammars(model).make_now(ask(schema=schema), ChatTemplate(model.tokenizer))
    for token_id in model.tokenizer("{").input_ids:
        grammar.accept(token_id)
    follow = {model.tokenizer.decode([token_id]) for token_id in np.flatnonzero(grammar.allowed(256))}
    assert '"' in follow and not follow & set(" \t\r\n")


@pytest.mark.parametrize("own_tokens", [True, False])
@pytest.mark.parametrize("kind", TEMPLATES)
def test_required_tool_calls_have_the_templates_form_and_fit_their_schemas(kind: str, own_tokens: bool) -> None:
    by_name = {tool.name: tool.parameters for tool in TOOLS}
    counts = set()
    for seed in range(4):
        for must_call, parallel in ((("add", "get-tree"), True), (("add", "get-tree"), False), (("add",), False)):
            asked = ask(tools=TOOLS, must_call=must_call, parallel_calls=parallel)
            begins = THOUGHTS.get(kind, [""])[seed % len(THOUGHTS.get(kind, [""]))]
            text, reasoning, calls = walk(kind, asked, seed, own_tokens, begins)
            assert not text.strip() and calls and bool(reasoning) == ("Hm" in begins)
            assert {name for name, _ in calls} <= set(must_call)
            for name, arguments in calls:
                jsonschema.validate(arguments, by_name[name])
            assert len(calls) == 1 or parallel
            counts.add(len(calls))
    assert max(counts) > 1, "several calls are never made"


@pytest.mark.parametrize("own_tokens", [True, False])
@pytest.mark.parametrize(
    ("kind", "opening"),
    [
        ("hermes", "See: <tool_call>"),
        ("mistral", "[TOOL_CALLS]"),
        ("llama", "{"),
        ("may_think", "<think>Hm.</think>\nSee: <tool_call>"),
    ],
)
def test_a_strict_tools_call_fits_its_schema_and_text_stays_allowed(kind: str, opening: str, own_tokens: bool) -> None:
    asked = ask(tools=(Tool("add", INT, strict=True),))
    for seed in range(4):
        _, _, calls = walk(kind, asked, seed, own_tokens, opening)
        assert calls and all(name == "add" for name, _ in calls)
        for _, arguments in calls:
            jsonschema.validate(arguments, INT)
        text, _, calls = walk(kind, asked, seed, own_tokens, "It is <")
        assert text.startswith("It is <")


@pytest.mark.parametrize("own_tokens", [True, False])
@pytest.mark.parametrize("kind", ["hermes", "mistral"])
@pytest.mark.parametrize(
    ("text", "may_be"),  # None: allowed, but the answer may not end there
    [
        ('{"name": "add", "arguments": {"a": 1}}\n{"name":"go-on","arguments":{"何日": "七月"}}', True),
        ('```json\n{\n  "name": "add",\n  "arguments": {\n    "a": 1\n  }\n}\n```', True),
        ('{"name": "add", "arguments": {"b', False),
        ('```json\n{"name": "add", "arguments": {"a": "', False),
        ('```json\n{"name": "add", "arguments": {"a": 1}}\n', None),
        ('{"name": "add", "arguments": {"a": 1}}\n```', False),
        ('{"name": "add", "b": 1}, said she', True),
        ('{"name": "Ann", "b": 1}, said she', True),
        ('So: {"name": "add", "arguments": {"b": 1}}', True),
    ],
)
def test_a_strict_tools_call_without_a_marker_fits_its_schema(
    kind: str, own_tokens: bool, text: str, may_be: bool | None
) -> None:
    model = chat_model(kind, own_tokens)
    asked = ask(tools=(Tool("add", INT, strict=True), Tool("go-on", NAMED, strict=True)))
    grammar = Grammars(model).make_now(asked, ChatTemplate(model.tokenizer))
    allowed = []
    for token_id in model.tokenizer(text).input_ids:
        allowed.append(bool(grammar.allowed(model.model.config.vocab_size)[token_id]))
        if not allowed[-1]:
            break
        grammar.accept(token_id)
    assert all(allowed) == (may_be is not False)
    if all(allowed):
        may_end = grammar.allowed(model.model.config.vocab_size)[sorted(model.stop_ids)]
        assert may_end.all() == bool(may_be)


@pytest.mark.parametrize("own_tokens", [True, False])
@pytest.mark.parametrize("kind", ["hermes", "mistral", "llama"])
def test_an_answer_with_a_schema_may_be_a_tool_call_instead(kind: str, own_tokens: bool) -> None:
    lists = {"type": "object", "properties": {"z": {"type": "null"}}, "required": ["z"], "additionalProperties": False}
    opening = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama": '{"name": '}[kind]
    tools = (Tool("add", INT, strict=True), Tool("go", {"type": "object"}), Tool("get-tree", TOOLS[1].parameters))
    asked = ask(tools=tools, schema=lists)
    for seed in range(4):
        text, _, calls = walk(kind, asked, seed, own_tokens, opening)
        assert calls and not text
        assert all(name != "add" or isinstance(arguments["a"], int) for name, arguments in calls)
        text, _, calls = walk(kind, asked, seed, own_tokens, '{"z"')
        assert json.loads(text) == {"z": None} and not calls


def test_equal_schemas_are_compiled_once_and_each_answer_has_its_own_state(monkeypatch: pytest.MonkeyPatch) -> None:
    model, compiled = chat_model("hermes"), []
    compile_one = Grammars._compile
    monkeypatch.setattr(Grammars, "_compile", lambda self, text: compiled.append(text) or compile_one(self, text))
    grammars, template = Grammars(model), ChatTemplate(model.tokenizer)
    first, second = (grammars.make_now(ask(schema={"const": "one"}), template) for _ in range(2))
    begins = second.allowed(model.model.config.vocab_size)
    for token_id in model.tokenizer('"one"').input_ids:
        first.accept(token_id)
    assert first.is_over and not second.is_over
    assert np.array_equal(second.allowed(model.model.config.vocab_size), begins)
    grammars.make_now(ask(schema={"const": "two"}), template)
    assert len(compiled) == 2


def test_a_line_end_may_follow_the_last_call_before_the_end_token() -> None:
    model = chat_model("hermes")
    grammar = Grammars(model).make_now(ask(tools=TOOLS, must_call=("add",)), ChatTemplate(model.tokenizer))
    called = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    for token_id in model.tokenizer(f"{called}\n").input_ids:
        assert grammar.allowed(model.model.config.vocab_size)[token_id]
        grammar.accept(token_id)
    allowed = np.flatnonzero(grammar.allowed(model.model.config.vocab_size)).tolist()
    assert set(model.stop_ids) < set(allowed), "Qwen2.5-Coder ends its turn there, or calls once more"


@pytest.mark.parametrize(
    ("more", "may_be_open"),
    [
        ({}, False),
        ({"required": ["a"], "$defs": {}}, False),
        ({"properties": {}}, False),
        ({"additionalProperties": True}, True),
        ({"anyOf": [{"required": ["b"]}, {}]}, True),
        ({"required": ["b"]}, True),
    ],
)
def test_undeclared_arguments_are_allowed_only_where_the_schema_is_open(
    more: dict[str, Any], may_be_open: bool
) -> None:
    model = chat_model("hermes")
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, **more}
    required = '"a": 1, ' if more.get("required") == ["a"] else ""
    begins = f'<tool_call>\n{{"name": "f", "arguments": {{{required}"b'
    for is_strict in (True, False):
        asked = ask(tools=(Tool("f", parameters, strict=is_strict),), must_call=() if is_strict else ("f",))
        grammar = Grammars(model).make_now(asked, ChatTemplate(model.tokenizer))
        token_ids = iter(model.tokenizer(begins).input_ids)
        while (token_id := next(token_ids, None)) is not None and grammar.allowed(model.model.config.vocab_size)[
            token_id
        ]:
            grammar.accept(token_id)
        assert (token_id is None) == may_be_open


@pytest.mark.parametrize("required", [5, [[1]], [None]])
def test_required_that_is_not_a_list_of_names_is_refused(required: Any) -> None:
    model = chat_model("hermes")
    parameters = {"type": "object", "properties": {}, "required": required}
    with pytest.raises(BadRequestError, match="tools: f"):
        Grammars(model).make_now(ask(tools=(Tool("f", parameters),), must_call=("f",)), ChatTemplate(model.tokenizer))


def test_a_tool_that_is_not_strict_may_have_an_unsupported_schema() -> None:
    odd = Tool("odd", {"type": "object", "properties": {"a": {"uniqueItems": True}}, "required": ["a"]})
    asked = ask(tools=(Tool("add", INT, strict=True), odd))
    assert walk("hermes", asked, 0, begins='<tool_call>\n{"name": "odd", "arguments": {}}\n</tool_call>')[2] == [
        ("odd", {})
    ]
    walk("hermes", ask(tools=(Tool("add", INT), odd), must_call=("add",)), 0)


@pytest.mark.parametrize("own_tokens", [True, False])
@pytest.mark.parametrize(
    ("kind", "begins"),
    [("thinking", "Hm\n</think>\n\n"), ("may_think", "<think>Hm\n</think>\n"), ("may_think", "{")],
)
def test_reasoning_is_unconstrained_and_the_answer_fits_the_schema(kind: str, begins: str, own_tokens: bool) -> None:
    for seed in range(3):
        text, reasoning, _ = walk(kind, ask(schema=INT), seed, own_tokens, begins)
        jsonschema.validate(json.loads(text), INT)
        assert reasoning == ("Hm\n" if "Hm" in begins else "")


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"uniqueItems": True}, "uniqueItems"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum"),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, r"\(min=-9223372036854775808, max=9223"),
        ({"type": "number", "maximum": 1e30}, r"large \(min=none, max=1e30\), wanted from -10\^18 to 10\^18"),
        ({"type": "what"}, "what"),
        (False, "Unsatisfiable"),
        ({"$ref": "http://example.com/x"}, "example.com"),
        ({"type": "string", "pattern": "(?=a)b"}, r"regex parse error: \(\?=a\)b: look-around.* is not supported;"),
        (
            {"type": "string", "pattern": r"^[\ud83d\ude00]$"},
            r": hexadecimal literal is not a Unicode scalar value;",
        ),
        ({"type": "array", "maxItems": 1_000_000}, "too costly"),
        ({"type": "integer", "multipleOf": 9_999_991}, "too costly"),
        ({"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 991}]}, "too costly"),
        ({"patternProperties": {f"^{i}a*$": {} for i in range(101)}}, "too costly.* at most 100 patternProperties"),
        ({"type": "string", "description": "x" * 70_000}, "characters"),
        ({"properties": {"ab": {}}, "patternProperties": {"^x": {}, "b": {}}}, "a pattern .* matches a name"),
        ({"type": "array", "prefixItems": [{"type": "null"}], "additionalItems": False}, "prefixItems beside"),
        ({"enum": [1, [{"id": 2**53 + 1}]]}, r"beyond 2\^53"),
        ({"type": "number", "multipleOf": 0.5, "minimum": -90}, "multipleOf of negative numbers"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf of schemas .*, but anyOf is; leave"),
    ],
)
def test_unsupported_schemas_are_refused_with_the_reason(schema: Any, words: str) -> None:
    model = chat_model("hermes")
    template = ChatTemplate(model.tokenizer)
    with pytest.raises(BadRequestError, match=words) as refused:
        Grammars(model).make_now(ask(schema=schema), template)
    assert refused.value.param == "response_format" and len(refused.value.message) < 600
    if isinstance(schema, dict):
        tool = Tool("bad", {"type": "object", "properties": {"x": schema}, "required": ["x"]})
        with pytest.raises(BadRequestError, match=f"{words}|tools: bad") as refused:
            Grammars(model).make_now(ask(tools=(TOOLS[0], tool), must_call=("bad",)), template)
        assert refused.value.param == "tools: bad"


def test_a_refused_schema_of_a_response_is_named_as_its_field_there() -> None:
    asked = ask(schema={"uniqueItems": True}, schema_field="text.format")
    with pytest.raises(BadRequestError, match=r"the schema in text\.format") as refused:
        Grammars(loaded()).make_now(asked, ChatTemplate(loaded().tokenizer))
    assert refused.value.param == "text.format"


@pytest.mark.parametrize(("keyword", "most"), [("maxItems", 10_000), ("multipleOf", 100_000)])
def test_too_costly_keywords_are_refused_only_above_the_reported_maximum(keyword: str, most: int) -> None:
    _require_moderate([("x", {keyword: most, "title": "日" * 60_000})])
    with pytest.raises(BadRequestError, match=f"too costly.* {most:,}"):
        _require_moderate([("x", {keyword: most + 1})])


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (None, "no answer fits the schema: it refers only to itself, or contradicts itself; say"),
        ("too many items", "became too costly: too many items; ask for a simpler one"),
    ],
)
def test_a_schema_that_fails_while_an_answer_is_drawn_is_a_bad_request(error, sentence, monkeypatch) -> None:
    grammar = Grammars(loaded()).make_now(ask(schema={"$ref": "#"}), ChatTemplate(loaded().tokenizer))
    if error:
        failed = {"is_error": lambda: True, "get_error": lambda: error, "unsafe_compute_mask_ptr": lambda *of: None}
        monkeypatch.setattr(grammar, "_matcher", SimpleNamespace(**failed))
    with pytest.raises(BadRequestError, match=sentence):
        grammar.allowed(256)


def test_names_that_are_keywords_are_no_keywords() -> None:
    names = {"properties": {"const": 1}, "patternProperties": {"const": 2}, "prefixItems": {}, "additionalItems": {}}
    schema = {"type": "object", "properties": names, "default": {"const": 2**63 - 1}, "patternProperties": {"^x-": {}}}
    Grammars(loaded()).make_now(ask(schema=schema), ChatTemplate(loaded().tokenizer))


@pytest.mark.parametrize("most", [10**18, 1e18])
def test_bounds_of_numbers_are_refused_only_above_the_reported_ones(most: float) -> None:
    for kind in ("integer", "number"):
        for least, greatest in ((-most, most), (most, most), (-most, -most)):
            schema = {"type": kind, "minimum": least, "maximum": greatest}
            Grammars(loaded()).make_now(ask(schema=schema), ChatTemplate(loaded().tokenizer))


def test_a_model_without_an_end_token_generates_while_the_grammar_allows() -> None:
    grammar = Grammars(loaded()).make_now(ask(schema={"type": "integer"}), ChatTemplate(loaded().tokenizer))
    [one] = loaded().tokenizer("1").input_ids
    grammar.accept(one)
    allowed = np.flatnonzero(grammar.allowed(256))
    assert loaded().tokenizer.decode(allowed) == "0123456789" and not grammar.is_over


def test_moderate_multipleof_values_are_enforced() -> None:
    schema = {
        "type": "array",
        "prefixItems": [{"type": "number", "multipleOf": m} for m in (0.25, 60, 100, 7)],
        "minItems": 4,
    }
    text, _, _ = walk("hermes", ask(schema=schema), 0)
    jsonschema.validate(json.loads(text), schema)


def test_a_byte_level_decoder_is_recognised_after_other_decoders() -> None:
    """Some releases of transformers make such a decoder from a GGUF file; tokens are still bytes."""
    model = deepcopy(loaded())
    others = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")]
    model.tokenizer.backend_tokenizer.decoder = decoders.Sequence([*others, decoders.ByteLevel()])
    grammar = Grammars(model).make_now(ask(schema={"const": [1, 2]}), ChatTemplate(model.tokenizer))
    for token_id in model.tokenizer("[1, 2]").input_ids:
        allowed = np.flatnonzero(grammar.allowed(model.geometry.vocab_size))
        assert allowed.tolist() == [token_id]
        grammar.accept(token_id)


def test_an_accent_of_its_own_stays_so_where_the_tokenizer_joins_it_with_its_letter() -> None:
    model, text = deepcopy(loaded()), json.dumps("caf\u0065\u0301", ensure_ascii=False)
    token_ids = model.tokenizer(text).input_ids
    model.tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    grammar = Grammars(model).make_now(ask(schema={"const": json.loads(text)}), ChatTemplate(model.tokenizer))
    assert model.tokenizer(text).input_ids != token_ids == grammar.possible(token_ids)
    for token_id in token_ids:
        assert grammar.allowed(model.geometry.vocab_size)[token_id]
        grammar.accept(token_id)


def test_unconstrained_answers_have_no_grammar() -> None:
    grammars, template = Grammars(loaded()), ChatTemplate(loaded().tokenizer)
    assert asyncio.run(grammars.make(ask(), template)) is None
    assert asyncio.run(grammars.make(ask(tools=(Tool("f", INT),)), template)) is None
    assert asyncio.run(grammars.make(ask(schema=True), template)) is not None


def test_a_grammar_without_references_is_freed() -> None:
    model = chat_model("hermes")
    grammar: Grammar | None = Grammars(model).make_now(ask(schema=INT), ChatTemplate(model.tokenizer))
    assert grammar is not None
    grammar.begin()
    grammar.allowed(300)
    gone = weakref.ref(grammar)
    grammar = None
    assert gone() is None
