"""Constrained decoding: which tokens may come next in JSON of a schema, or in tool calls in the template's format."""

import asyncio
import json
import math
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from itertools import takewhile
from string import punctuation
from threading import Lock
from typing import Any
from unicodedata import is_normalized
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from csattn.models import LoadedModel
from workers.serving.chat_template import THINK, THOUGHT, CallFormat, ChatTemplate
from workers.serving.messages import Ask, BadRequestError, Tool

_NUM_THREADS = 2
_NUM_COMPILED = 32  # grammars that are kept compiled: agents send the same tools at every turn
_MAX_MESSAGE_CHARS = 300  # characters of the library's error message
# JSON on one line, as in most of what models were trained on; with free whitespace, small models never end an answer
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_OF_A_PATTERN, _OF_BOUNDS, _DEAD_END = "regex parse error:", "Failed to generate regex for", "NoExtensionBias"
_OF_ONE = "oneOf constraints are not supported"
_ANYTHING = "/(?s:.*)/"
_UNFORCED = '%llguidance {"no_forcing": true}\n'
# limits beyond which the library takes seconds or minutes
_MAX_CHARS = 1 << 16  # of all schemas of a request
_MAX_COUNT = 10_000
_MAX_PATTERNS = 100  # of names of properties, which are compared with each other
_MAX_MULTIPLE = 100_000  # least common multiple of all `multipleOf` of a schema
# if an object's schema has only these keys, `properties` names everything that the object may have
_ALL_NAMED = {"$defs", "$schema", "definitions", "description", "properties", "required", "title", "type"}
_VALUES = {"const", "default", "enum", "examples"}  # keys whose values are instances, not schemas
_NAMED = {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}  # keys of maps name -> schema
_NEUTRAL = {"propertyNames": ({"type": "string"},), "uniqueItems": (False,)}  # zod writes the first for its records
_BOUNDS = "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"
_COUNTS = {"minItems", "maxItems", "minProperties", "maxProperties"}


class Grammars:
    """Makes grammars over one model's vocabulary. Thread-safe."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._compiled = lru_cache(_NUM_COMPILED)(self._compile)
        self._lock = Lock()
        self._tokenizer: Any = None
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="csattn-masks")
        self._makers = ThreadPoolExecutor(
            1, thread_name_prefix="csattn-grammars"
        )  # a costly grammar delays other grammars, not steps

    async def make(self, ask: Ask, template: ChatTemplate) -> "Grammar | None":
        """Return the grammar of a request's answer; None if the answer is unconstrained. Raises BadRequestError for a
        schema that is not supported."""
        if ask.schema is None and not ask.must_call and not any(tool.strict for tool in ask.tools):
            return None
        return await asyncio.get_running_loop().run_in_executor(self._makers, self.make_now, ask, template)

    def make_now(self, ask: Ask, template: ChatTemplate) -> "Grammar":
        """`make` on the calling thread, for a constrained answer."""
        schemas, field = _schemas_of(ask), "tools" if ask.schema is None else ask.schema_field
        _require_moderate(schemas)
        try:
            self._require_enforced(schemas)
            matcher = self._compiled(self._options(schemas) + grammar_text(ask, template)).deep_copy()
        except ImportError:
            raise BadRequestError(
                "this service cannot constrain answers to a schema: llguidance is not installed where it runs (pip "
                "install 'csattn[serve]'); leave the schema out",
                field,
            ) from None
        except _NotCompiledError as error:
            for name, schema in schemas:  # one by one, to name the one at fault
                self._require_compiled(schema, name)
            raise _refusal(error, field) from None
        sizes = self._tokenizer.vocab_size, self._loaded.geometry.vocab_size
        return Grammar(matcher, *sizes, self._loaded.stop_ids, self._pool)

    def close(self) -> None:
        for pool in (self._pool, self._makers):
            pool.shutdown(wait=False, cancel_futures=True)

    def _options(self, schemas: list[tuple[str, dict[str, Any] | bool]]) -> str:
        """Text that must come next is written by the tokenizer. For <|im_end|>, that would be the special token, which
        must not come, and some write é for e and an accent: then nothing is forced, and other tokens write the text."""
        texts = json.dumps([schema for _, schema in schemas], ensure_ascii=False)
        is_special = self._tokens().is_special_token
        added = self._loaded.tokenizer.get_added_vocab().items()
        is_named = any(is_special(id) and json.dumps(text, ensure_ascii=False)[1:-1] in texts for text, id in added)
        return _UNFORCED if is_named or not is_normalized("NFC", texts) else ""

    def _require_enforced(self, schemas: list[tuple[str, dict[str, Any] | bool]]) -> None:
        """Raise BadRequestError for what the library ignores in silence, or rounds."""
        for field, schema in schemas:
            for inner in _schemas(schema):
                if "prefixItems" in inner and ("additionalItems" in inner or isinstance(inner.get("items"), list)):
                    raise _refusal("prefixItems beside additionalItems, or beside a list of items", field)
                bounds = [inner.get(key, 0) for key in _BOUNDS if "multipleOf" in inner]
                if any(isinstance(bound, int | float) and bound < 0 for bound in bounds):
                    raise _refusal("multipleOf of negative numbers", field)
                values = [inner.get("const"), inner.get("enum")]
                if json.loads(json.dumps(values), parse_int=float) != values:
                    raise _refusal("a whole number beyond 2^53 in const or enum", field)
                names, patterns = inner.get("properties"), inner.get("patternProperties")
                if isinstance(names, dict) and isinstance(patterns, dict) and self._is_any_match(patterns, names):
                    raise _refusal("a pattern of patternProperties that matches a name in properties", field)

    def _is_any_match(self, patterns: Iterable[str], names: Iterable[str]) -> bool:
        """Whether a name matches a pattern, by the library, as some patterns would take Python's forever."""
        try:
            self._compile(f"start: {_json({'enum': [*names], 'anyOf': [{'pattern': one} for one in patterns]})}")
        except _NotCompiledError:
            return False
        return True

    def _require_compiled(self, schema: dict[str, Any] | bool, field: str) -> None:
        try:
            self._compile(f"start: {_json(schema)}")
        except _NotCompiledError as error:
            raise _refusal(error, field) from None

    def _compile(self, text: str) -> Any:
        """Return the library's matcher for a grammar, which is not to be advanced: copies of it are."""
        import llguidance

        matcher = llguidance.LLMatcher(self._tokens(), text, log_level=0)
        if matcher.is_error():
            raise _NotCompiledError(_reason(matcher.get_error()))
        return matcher

    def _tokens(self) -> Any:
        """The library's tokenizer of the vocabulary, made once, which takes up to a second."""
        from llguidance import LLTokenizer

        with self._lock:
            if self._tokenizer is None:
                tokenizer, stop_ids = self._loaded.tokenizer, self._loaded.stop_ids
                vocab_size = max(int(self._loaded.model.config.vocab_size), len(tokenizer))
                end = tokenizer.eos_token_id if tokenizer.eos_token_id in stop_ids else min(stop_ids, default=None)
                if end is None:  # a model that never ends its turn: add an id that is never drawn
                    end, vocab_size = vocab_size, vocab_size + 1
                self._tokenizer = LLTokenizer(_plain(tokenizer), n_vocab=vocab_size, eos_token=end)
            return self._tokenizer


class _NotCompiledError(Exception):
    """The library does not support a grammar, for this reason."""


def _refusal(error: _NotCompiledError | str, field: str) -> BadRequestError:
    return BadRequestError(
        f"answers cannot be constrained to the schema in {field}: {error}; leave that part out", field
    )


class Grammar:
    """The grammar of one request's answer and its state, which tokens advance."""

    def __init__(
        self,
        matcher: Any,
        vocab_size: int,
        num_embedded: int,  # tokens that the model can be fed
        stop_ids: set[int],
        pool: ThreadPoolExecutor,
    ) -> None:
        self._matcher, self._more = matcher, (vocab_size, num_embedded, stop_ids, pool)
        self._num_embedded, self._stop_ids, self._pool = num_embedded, sorted(stop_ids), pool
        self._bits = np.zeros((vocab_size + 31) // 32, np.uint32)
        self._computing: Future[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether the answer is complete and no token may follow."""
        return bool(self._matcher.is_stopped())

    def begin(self) -> None:
        """Start to compute the result of `allowed`, beside the step."""
        if self._computing is None:
            self._computing = self._pool.submit(self._compute)

    def allowed(self, vocab_size: int) -> NDArray[np.bool_]:
        """Return which tokens may come next, [vocab_size]. Raises BadRequestError if a limit of the library is hit."""
        self.begin()
        assert self._computing is not None
        self._computing.result()
        self._computing = None
        self._require_no_error()
        allowed = np.unpackbits(self._bits.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)
        if self._stop_ids:
            allowed[self._stop_ids] = self._matcher.is_accepting()
        return allowed

    def forced(self) -> list[int]:
        """Return how the tokenizer writes the text that must come next: the model may write it in other tokens."""
        forced: list[int] = self._matcher.compute_ff_tokens()
        return forced

    def possible(self, token_ids: list[int]) -> list[int]:
        """Return those of the first tokens that may come next, one after the other, before the answer ends."""
        text = [*takewhile(lambda x: x < self._num_embedded and x not in self._stop_ids, token_ids)]
        return text[: self._matcher.validate_tokens(text)]

    def after(self, token_id: int) -> "Grammar":
        """Return this grammar as it will be after a token, which has to be possible."""
        ahead = Grammar(self._matcher.deep_copy(), *self._more)
        ahead.accept(token_id)
        return ahead

    def accept(self, token_id: int) -> None:
        """Advance by a token that was drawn from those allowed."""
        if token_id not in self._stop_ids:
            self._matcher.consume_token(token_id)
            self._require_no_error()

    def _compute(self) -> None:
        """Compute the bit mask of allowed tokens. The library releases the GIL, so the step goes on."""
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)

    def _require_no_error(self) -> None:
        if self._matcher.is_error():
            reason = _reason(self._matcher.get_error())
            if reason == _DEAD_END:
                raise BadRequestError(
                    "no answer fits the schema: it refers only to itself, or contradicts itself; say in it what an "
                    "answer holds"
                )
            raise BadRequestError(
                f"constraining the answer to the schema became too costly: {reason}; ask for a simpler one"
            )


def grammar_text(ask: Ask, template: ChatTemplate) -> str:
    """The grammar of an answer for llguidance, in its variant of Lark's syntax."""
    tools = _constrained_tools(ask)
    rules = _call_rules(ask, template, tools) if tools else []
    if not ask.must_call and ask.schema is not None:
        rules += [f"answer: {'calls | ' if tools else ''}told", f"told: {_json(ask.schema)}"]
    elif ask.must_call:
        rules.append("answer: calls")
    else:
        rules += _free_rules(ask, template, tools)
    if ask.turns and template.thinks:
        thought = _marker(template, THOUGHT)
        rules.append(f"thought: {_ANYTHING} {thought} gap" if thought[0] == "<" else "thought: hidden gap")
        rules += [r"gap: /[ \t\r\n]{0,2}/", f"hidden[suffix={json.dumps(THOUGHT)}]: {_ANYTHING}"]
        begun = "thought" if template.is_thinking else f"({_marker(template, THINK)} thought)?"
        return "\n".join([f"start: {begun} answer", *rules]) + "\n"
    return "\n".join(["start: answer", *rules]) + "\n"


def _require_moderate(schemas: list[tuple[str, dict[str, Any] | bool]]) -> None:
    """Raise BadRequestError for schemas that would be too costly."""
    num_chars = sum(len(json.dumps(schema, ensure_ascii=False)) for _, schema in schemas)
    if num_chars > _MAX_CHARS:
        raise BadRequestError(
            f"the schemas have {num_chars:,} characters, wanted at most {_MAX_CHARS:,}; leave out the parts that "
            "answers do not need",
            schemas[0][0],
        )
    for name, schema in schemas:
        numbers = list(_numbers(schema))
        counts = [value for key, value in numbers if key in _COUNTS]
        multiples = [Fraction(str(value)) for key, value in numbers if key == "multipleOf" and value > 0]
        scale = math.lcm(*(multiple.denominator for multiple in multiples))
        together = math.lcm(*(int(multiple * scale) for multiple in multiples))
        patterns = [inner.get("patternProperties") for inner in _schemas(schema)]
        num_patterns = sum(len(one) for one in patterns if isinstance(one, dict))
        if max(counts, default=0) > _MAX_COUNT or together > _MAX_MULTIPLE or num_patterns > _MAX_PATTERNS:
            raise BadRequestError(
                f"the schema in {name} is too costly: wanted counts of at most {_MAX_COUNT:,}, multipleOf whose least "
                f"common multiple is at most {_MAX_MULTIPLE:,}, and at most {_MAX_PATTERNS} patternProperties",
                name,
            )


def _numbers(schema: object) -> Iterator[tuple[str, float]]:
    """All (key, number) pairs anywhere in a schema."""
    if isinstance(schema, list):
        for item in schema:
            yield from _numbers(item)
    elif isinstance(schema, dict):
        for key, value in schema.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield key, value
            yield from _numbers(value)


def _schemas(value: object, key: str = "") -> Iterator[dict[str, Any]]:
    """A schema and all within it."""
    if isinstance(value, list) and key not in _VALUES:
        for item in value:
            yield from _schemas(item)
    if isinstance(value, dict) and key not in _VALUES:
        if key not in _NAMED:
            yield value
        for name, item in value.items():
            yield from _schemas(item, "" if key in _NAMED else name)


def _constrained_tools(ask: Ask) -> list[Tool]:
    """The tools that may be called, with the schemas that their arguments are held to."""
    if ask.must_call:
        return [replace(tool, parameters=_closed(tool.parameters)) for tool in ask.tools if tool.name in ask.must_call]
    anything = {"type": "object"}
    return [replace(tool, parameters=_closed(tool.parameters) if tool.strict else anything) for tool in ask.tools]


def _closed(parameters: dict[str, Any]) -> dict[str, Any]:
    """Forbid arguments that the schema does not name, if it certainly names all: functions take no others, and small
    models make some up."""
    named, required = parameters.get("properties"), parameters.get("required", [])
    if named is None or not isinstance(required, list) or not set(parameters) <= _ALL_NAMED:
        return parameters
    is_all = all(isinstance(name, str) and name in named for name in required)
    return {**parameters, "additionalProperties": False} if is_all else parameters


def _call_rules(ask: Ask, template: ChatTemplate, tools: list[Tool]) -> list[str]:
    """The rules of calls: `calls` begins with the marker that announces them, `run` after it."""
    format = template.calls
    assert format is not None, "tools were refused where calls have no form"
    opening = _marker(template, format.opening)
    call = " | ".join(f"call{i}" for i in range(len(tools)))
    # If calls and answer both begin with an object, a call is one JSON schema, like the answer: else the one would rule
    # out the other.
    is_object = not format.is_announced and ask.schema is not None
    rules = [f"call{i}: {(_call_object if is_object else _call)(tool, format)}" for i, tool in enumerate(tools)]
    ends = ""
    if format.closing:  # each call has its own opening and closing; some models end the line before they end the turn
        one, again = (
            f'"\\n" ({call}) "\\n" {_marker(template, format.closing)}',
            f"{json.dumps(format.joint)} {opening} one",
        )
        ends = '"\\n"?'
    else:
        one, again = call, f"{json.dumps(format.joint)} one"
    before, after = map(_text, format.run)
    more = f"({again})*" if ask.parallel_calls else ""
    announced = f"{opening} run" if format.is_announced else "run"
    return [*rules, f"one: {one}", f"run: {before} one {more} {after} {ends}", f"calls: {announced}"]


def _free_rules(ask: Ask, template: ChatTemplate, tools: list[Tool]) -> list[str]:
    """The rules of `answer`: any text, in which the opening marker must be followed by a call; or calls without it."""
    assert template.calls is not None
    opening = _marker(template, template.calls.opening)
    if not template.calls.is_announced:  # an answer that begins with an object is a call
        return ["answer: run | said", "said: /[^{](?s:.*)/"]
    rules, alone, other = list[str](), "", _ANYTHING
    if not ask.continues:
        # An answer that begins with the head of a call of these tools, without a marker, is read as a call if it has
        # nothing else. So it must not match as text, where the longest lexeme wins.
        space, key, number = r"[ \t\r\n]", template.calls.arguments_key, range(len(tools))
        begun, fence = rf'{space}*\{{{space}*"name"{space}*:{space}*"', f"{space}*```json{space}+"
        names = "|".join(tool.name for tool in tools)
        other += rf' & ~/({fence})?{begun}({names})"{space}*,{space}*"(arguments|parameters)"(?s:.*)/'
        if template.thinks and THINK not in template.marker_ids:
            other += rf" & ~/{space}*{THINK}(?s:.*)/"  # a thought is parsed by its own rule, and an answer follows it
        for i, tool in enumerate(tools):
            head = rf'{begun}{tool.name}"{space}*,{space}*"{key}"{space}*:{space}*'
            rules += [
                f"HEAD{i}: /{head}/",
                f"FENCED{i}: /{fence}{head}/",
                f"args{i}: %json {json.dumps(_adapted(tool.parameters))}",
            ]
        bare = f"({' | '.join(f'HEAD{i} args{i}' for i in number)}) BEHIND"
        rules.append(f"alone: ({bare})+ | {bare.replace('HEAD', 'FENCED')} ({bare})* FENCE")
        rules += [f"BEHIND: /{space}*\\}}{space}*/", f"FENCE: /```{space}*/"]
        alone = "alone | "
    rules.append(f"OTHER: {other}")
    if opening[0] == "<":
        return [f"answer: {alone}OTHER ({opening} run)?", *rules]
    return [f"answer: {alone}OTHER | heard run", f"heard[suffix={opening}]: {other}", *rules]


def _call(tool: Tool, format: CallFormat) -> str:
    head = f'{{"name": {json.dumps(tool.name)}, "{format.arguments_key}": '
    return f'{json.dumps(head)} {_json(tool.parameters)} "}}"'


def _call_object(tool: Tool, format: CallFormat) -> str:
    """A call as one JSON schema. Its $id keeps references in the tool's parameters within these."""
    parameters = {"$id": f"urn:tool:{tool.name}", **tool.parameters}
    names = ["name", format.arguments_key]
    properties = dict(zip(names, ({"const": tool.name}, parameters), strict=True))
    return _json({"type": "object", "properties": properties, "required": names, "additionalProperties": False})


def _schemas_of(ask: Ask) -> list[tuple[str, dict[str, Any] | bool]]:
    """The schemas that the answer is held to, with the request's fields that they came in."""
    named: list[tuple[str, dict[str, Any] | bool]] = []
    if ask.schema is not None and not ask.must_call:
        named.append((ask.schema_field, ask.schema))
    return named + [(f"tools: {tool.name}", tool.parameters) for tool in _constrained_tools(ask)]


def _json(schema: dict[str, Any] | bool) -> str:
    if schema is True:  # allows what {} does, which can take the library's options
        schema = {}
    extended = {**_adapted(schema), "x-guidance": _ONE_LINE} if isinstance(schema, dict) else schema
    return f"%json {json.dumps(extended)}"


def _adapted(value: Any, key: str = "") -> Any:
    """Percent-encode references, as the library takes only URIs: a class 日期 is referred to as `#/$defs/日期`. Leave
    out what allows everything, but is refused by the library."""
    if key == "$ref" and isinstance(value, str):
        return quote(value, safe=punctuation)
    if isinstance(value, list) and key not in _VALUES:
        return [_adapted(item) for item in value]
    if isinstance(value, dict) and key not in _VALUES:
        if key in _NAMED:
            return {name: _adapted(item) for name, item in value.items()}
        return {name: _adapted(item, name) for name, item in value.items() if item not in _NEUTRAL.get(name, ())}
    return value


def _text(text: str) -> str:
    return json.dumps(text) if text else ""


def _marker(template: ChatTemplate, marker: str) -> str:
    """A marker in the grammar: a token if the vocabulary has it, else a string."""
    return f"<[{template.marker_ids[marker]}]>" if marker in template.marker_ids else json.dumps(marker)


def _plain(tokenizer: Any) -> str:
    """The tokenizer as JSON, without padding and truncation.

    Some releases of transformers give tokenizers from GGUF files a sequence of decoders that ends with the byte-level
    one. Only that one is kept: because of the others, the library would take tokens for plain text.
    """
    config = json.loads(tokenizer.backend_tokenizer.to_str())
    *_, last = (config["decoder"] or {}).get("decoders") or [config["decoder"]]
    decoder = last if last and last["type"] == "ByteLevel" else config["decoder"]
    return json.dumps({**config, "padding": None, "truncation": None, "decoder": decoder})


def _reason(error: str) -> str:
    """The library's error message without positions, the grammar's text and the matcher's state."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    reason = lines[0] if lines else "no reason was given"
    if reason.endswith(_OF_A_PATTERN):  # followed by the pattern, marks below it, and the error
        reason += " " + ": ".join([*lines[1:2], *(line[7:] for line in lines if line.startswith("error: "))])
    if _OF_BOUNDS in reason:
        bounds = reason.partition("range: ")[2].replace("Some(", "").replace(")", "").replace("None", "none")
        reason = f"its bounds of numbers are too large ({bounds}), wanted from -10^18 to 10^18"
    if _OF_ONE in reason:
        reason = "oneOf of schemas that may overlap is not supported, but anyOf is"
    return reason.partition("failed to compile JSON schema: ")[2][:_MAX_MESSAGE_CHARS] or reason[:_MAX_MESSAGE_CHARS]
