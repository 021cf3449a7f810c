"""What a client asks for, in OpenAI's fields and ours, as an `Ask`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast, get_args

from csattn.config import RestKind
from csattn.selector_names import SELECTOR_NAMES
from workers.api.fields import Fields
from workers.api.names import context_of
from workers.serving.messages import Ask, BadRequestError, Sampling, Selector, Turn
from workers.settings import LimitSettings

CHAT_TOKENS = 512  # where a chat does not say how many; OpenAI's own completions have 16
TEXT_TOKENS = 16
MAX_STOPS, MAX_STOP_CHARS = 4, 256
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# fields that cannot change an answer here
IGNORED = (
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)


@dataclass(frozen=True, slots=True)
class Asked:
    """An `Ask`, and the form its answer is wanted in."""

    ask: Ask
    model: str  # as the client wrote it
    is_chat: bool
    stream: bool
    include_usage: bool


def read_chat(body: object, request_id: str, model: str, limits: LimitSettings) -> Asked:
    """Of a body for /v1/chat/completions."""
    return _read(Fields(body), request_id, model, limits, _chat_part)


def read_completion(body: object, request_id: str, model: str, limits: LimitSettings) -> Asked:
    """Of a body for /v1/completions."""
    return _read(Fields(body), request_id, model, limits, _completion_part)


Part = Callable[[Fields, LimitSettings], dict[str, Any]]


def _read(fields: Fields, request_id: str, model: str, limits: LimitSettings, part: Part) -> Asked:
    asked_model = fields.needed_text("model", 256)
    own = part(fields, limits)
    _refuse_what_is_not_done(fields)
    stream, include_usage = _stream(fields)
    sampling = Sampling(
        max_new_tokens=own.pop("max_new_tokens"),
        temperature=fields.number("temperature", 0.0, 2.0) or 0.0,
        top_p=_or(fields.number("top_p", 0.0, 1.0, above=True), 1.0),
        seed=_seed(fields),
        stop=_stops(fields),
        top_logprobs=own.pop("top_logprobs"),
    )
    extension: dict[str, Any] = {
        "keep": fields.number("keep", 0.0, 1.0, above=True),
        "lookahead": fields.whole("lookahead", 0, 1),
        "rest": cast(RestKind | None, fields.choice("rest", get_args(RestKind))),
        "selector": cast(Selector | None, fields.choice("selector", SELECTOR_NAMES)),
    }
    fields.finish()
    ask = Ask(request_id=request_id, context=context_of(asked_model, model), sampling=sampling, **own, **extension)
    return Asked(ask, asked_model, bool(ask.turns), stream, include_usage)


def _chat_part(fields: Fields, limits: LimitSettings) -> dict[str, Any]:
    turns = tuple(
        _turn(item, f"messages[{index}].", limits.max_question_chars)
        for index, item in enumerate(fields.items("messages"))
    )
    num_chars = sum(len(turn.content) for turn in turns)
    if num_chars > limits.max_question_chars:
        fields.refuse("messages", f"have {num_chars} characters, wanted at most {limits.max_question_chars}")
    if turns[-1].role != "user":
        fields.refuse("messages", f"end with one of role {turns[-1].role}, wanted one of role user")
    top = fields.whole("top_logprobs", 0, 20)
    wants_logprobs = fields.flag("logprobs")
    if top is not None and not wants_logprobs:
        fields.refuse("top_logprobs", "is set, but logprobs is not true; set both")
    return {
        "turns": turns,
        "top_logprobs": (top or 0) if wants_logprobs else None,
        "max_new_tokens": _max_new_tokens(fields, ("max_completion_tokens", "max_tokens"), CHAT_TOKENS, limits),
    }


def _completion_part(fields: Fields, limits: LimitSettings) -> dict[str, Any]:
    prompts = fields.texts("prompt", 1, limits.max_question_chars)
    if not prompts or not prompts[0]:
        fields.refuse("prompt", "is missing or empty, wanted text")
    fields.only("best_of", 1, why="only 1 is done")
    fields.only("echo", False, why="the prompt is not repeated; put it before the answer yourself")
    fields.only("suffix", "", why="text is only added at the end")
    return {
        "prompt": prompts[0],
        "top_logprobs": fields.whole("logprobs", 0, 20),
        "max_new_tokens": _max_new_tokens(fields, ("max_tokens",), TEXT_TOKENS, limits),
    }


def _turn(value: object, where: str, most_chars: int) -> Turn:
    fields = Fields(value, where)
    role = fields.choice("role", tuple(ROLES))
    if role is None:
        fields.refuse("role", f"is missing, wanted one of {', '.join(ROLES)}")
    content = _content(fields, where, most_chars)
    fields.ignore("name")
    for name in ("tool_calls", "annotations"):  # as OpenAI's client writes an answer that is sent back
        fields.only(name, [], why="tools are not supported")
    fields.finish()
    return Turn(cast(Any, ROLES[role]), content)


def _content(fields: Fields, where: str, most_chars: int) -> str:
    """Text, or a list of text parts."""
    value = fields.any_of("content")
    if not isinstance(value, list):
        return Fields({"content": value}, where).needed_text("content", most_chars)
    texts = []
    for index, item in enumerate(value):
        part = Fields(item, f"{where}content[{index}].")
        if part.any_of("type") != "text":
            part.refuse("type", 'is not "text": only text is read here')
        texts.append(part.needed_text("text", most_chars))
        part.finish()
    if not texts:
        fields.refuse("content", "is an empty list, wanted text")
    return "".join(texts)


def _max_new_tokens(fields: Fields, names: tuple[str, ...], default: int, limits: LimitSettings) -> int:
    given = {name: fields.whole(name, 1, limits.max_new_tokens) for name in names}
    said = {name: value for name, value in given.items() if value is not None}
    if len(set(said.values())) > 1:
        fields.refuse(names[0], f"and {names[1]} differ; send one of them")
    return next(iter(said.values()), min(default, limits.max_new_tokens))


def _stream(fields: Fields) -> tuple[bool, bool]:
    stream, options = fields.flag("stream"), fields.inner("stream_options")
    if options is None:
        return stream, False
    if not stream:
        fields.refuse("stream_options", "is set, but stream is not true; set both")
    include_usage = options.flag("include_usage")
    options.ignore("include_obfuscation")
    options.finish()
    return stream, include_usage


def _seed(fields: Fields) -> int | None:
    """Any 64-bit number; negative ones become ones that generators of random numbers take."""
    seed = fields.whole("seed", -(2**63), 2**63 - 1)
    return None if seed is None else seed % 2**63


def _stops(fields: Fields) -> tuple[str, ...]:
    stops = fields.texts("stop", MAX_STOPS, MAX_STOP_CHARS)
    if "" in stops:
        fields.refuse("stop", "holds an empty text, at which every answer would end")
    return stops


def _refuse_what_is_not_done(fields: Fields) -> None:
    """Fields of OpenAI's that would change the answer, if they were done: only values that ask for nothing pass."""
    fields.ignore(*IGNORED)
    fields.only("n", 1, why="one answer is given to a request; send it several times, with seeds")
    for name in ("frequency_penalty", "presence_penalty"):
        fields.only(name, 0, 0.0, why="penalties are not supported")
    fields.only("logit_bias", {}, why="a bias is not supported")
    fields.only("response_format", {"type": "text"}, why="only text is written, no checked format")
    fields.only("modalities", ["text"], why="only text is written")
    for name in ("tools", "functions"):
        fields.only(name, [], why="tools are not supported")
    for name in ("tool_choice", "function_call"):
        fields.only(name, "none", "auto", why="tools are not supported")
    fields.only("parallel_tool_calls", True, False, why="tools are not supported")


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def read_new_context(body: object) -> tuple[str, str]:
    """Name and text of a body for POST /v1/contexts."""
    fields = Fields(body)
    name, text = fields.needed_text("name", 256), fields.needed_text("text", 1 << 62)
    fields.finish()
    if not text.strip():
        raise BadRequestError("text is empty, wanted the context itself", "text")
    return name, text
