"""Read a request, in OpenAI's fields and csattn's own, as an `Ask`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from csattn.config import RestKind
from csattn.selector_names import ABOUT
from workers.api.fields import Fields
from workers.api.foreign import check_foreign_fields
from workers.api.names import context_or_own
from workers.api.tools import read_format, read_tools
from workers.api.turns import (
    content_of,
    read_continues,
    read_speaks_next,
    read_template,
    read_turns,
    require_answerable,
)
from workers.serving.messages import Ask, Sampling
from workers.settings import LimitSettings

TEXT_TOKENS = 16  # default of a completion, as OpenAI's
MAX_STOPS, MAX_STOP_CHARS = 16, 256  # OpenAI allows 4
MAX_SALT_CHARS = 256
MAX_BIASES, MAX_TOKEN_ID = 1024, 2**31 - 1
MAX_NUM_TOKENS = 2**31 - 1  # most that a request may ask for; clients send any large number for "no limit"
Kind = Literal["chat", "text", "response", "message"]


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """What is to be answered, and the format of the answers."""

    asks: tuple[Ask, ...]  # `num_choices` for each prompt
    num_choices: int
    model: str  # as the client wrote it
    kind: Kind
    stream: bool
    include_usage: bool = False  # in a stream's last chunk


def read_chat(body: object, request_id: str, model: str, limits: LimitSettings) -> ParsedRequest:
    """Read a body for /v1/chat/completions."""
    return _read(Fields(body), request_id, model, limits, "chat", _chat_part)


def read_completion(body: object, request_id: str, model: str, limits: LimitSettings) -> ParsedRequest:
    """Read a body for /v1/completions."""
    return _read(Fields(body), request_id, model, limits, "text", _completion_part)


Part = Callable[[Fields, LimitSettings], dict[str, Any]]


def _read(fields: Fields, request_id: str, model: str, limits: LimitSettings, kind: Kind, part: Part) -> ParsedRequest:
    requested_model = fields.needed_text("model", 256)
    own = part(fields, limits)
    _refuse_unsupported(fields)
    stream, include_usage, reports_usage = _stream(fields)
    most = limits.max_concurrent_requests + limits.max_queued_requests
    num_choices = fields.whole("n", 1, most) or 1
    prompts = own.pop("prompts", None)
    if num_choices * len(prompts or [None]) > most:
        fields.refuse("prompt", f"and n ask for more than {most} answers, for which this service has no room")
    sampling = read_sampling(fields, **{name: own.pop(name) for name in ("max_new_tokens", "top_logprobs")})
    own |= {"request_id": request_id, "sampling": sampling, "reports_usage": reports_usage}
    ask = read_ask(fields, requested_model, model, **own)
    each = [ask] if prompts is None else [replace(ask, prompt=prompt) for prompt in prompts]
    asks = tuple(choice for ask in each for choice in _choices(ask, num_choices))
    named = (replace(ask, request_id=f"{request_id}-{i}" if i else request_id) for i, ask in enumerate(asks))
    return ParsedRequest(tuple(named), num_choices, requested_model, kind, stream, include_usage)


def read_sampling(
    fields: Fields, max_new_tokens: int, top_logprobs: int | None = None, stop_field: str = "stop"
) -> Sampling:
    """Read the fields that say how tokens are drawn, and when to stop."""
    return Sampling(
        max_new_tokens=max_new_tokens,
        temperature=fields.number("temperature", 0.0, 2.0) or 0.0,
        top_p=fields.number("top_p", 0.0, 1.0, above=True) or 1.0,
        top_k=max(0, fields.whole("top_k", -1, MAX_TOKEN_ID) or 0),
        min_p=fields.number("min_p", 0.0, 1.0) or 0.0,
        presence_penalty=fields.number("presence_penalty", -2.0, 2.0) or 0.0,
        frequency_penalty=fields.number("frequency_penalty", -2.0, 2.0) or 0.0,
        repetition_penalty=fields.number("repetition_penalty", 0.01, 2.0) or 1.0,
        logit_bias=_logit_bias(fields),
        seed=_seed(fields),
        stop=_stops(fields, stop_field),
        stop_token_ids=_stop_ids(fields),
        min_tokens=fields.whole("min_tokens", 0, MAX_NUM_TOKENS) or 0,
        ignore_eos=fields.flag("ignore_eos"),
        top_logprobs=top_logprobs,
    )


def read_ask(fields: Fields, requested_model: str, model: str, **own: Any) -> Ask:
    """Read the last fields, those of this service alone and vLLM's `cache_salt`, and refuse those that are left.

    own: the fields of the Ask that have been read.
    """
    own |= {
        "cache_salt": fields.text("cache_salt", MAX_SALT_CHARS) or "",
        "keep": fields.number("keep", 0.0, 1.0, above=True),
        "lookahead": fields.whole("lookahead", 0, 1),
        "rest": fields.choice("rest", get_args(RestKind)),
        "selector": fields.choice("selector", tuple(ABOUT)),
    }
    fields.finish()
    return Ask(context=context_or_own(requested_model, model), **own)


def _choices(ask: Ask, num_choices: int) -> list[Ask]:
    """Return copies of an Ask, each with a seed of its own; the first has the requested one."""
    seed = ask.sampling.seed
    if seed is None:
        return [ask] * num_choices
    return [replace(ask, sampling=replace(ask.sampling, seed=(seed + index) % 2**63)) for index in range(num_choices)]


def _chat_part(fields: Fields, limits: LimitSettings) -> dict[str, Any]:
    top = fields.whole("top_logprobs", 0, 20)
    wants_logprobs = fields.flag("logprobs")
    if top is not None and not wants_logprobs:
        fields.refuse("top_logprobs", "is set, but logprobs is not true; set both")
    turns, speaks_next = read_turns(fields, limits), read_speaks_next(fields)
    continues = read_continues(fields, turns, speaks_next)
    if not continues:
        is_text = turns[-1].role == "assistant" and not turns[-1].calls
        hint = "; to continue it, set continue_final_message" if is_text else ""
        require_answerable(turns, fields, "messages", hint)
        if speaks_next is False:
            fields.refuse("add_generation_prompt", "is false, so no answer would be generated; leave it out")
    return {
        "turns": turns,
        "continues": continues,
        **read_template(fields),
        **read_tools(fields),
        **read_format(fields, "response_format"),
        "prediction": _prediction(fields, limits.max_question_chars),
        "top_logprobs": (top or 0) if wants_logprobs else None,
        # agents and chat programs often do not say how many, and an answer that is cut off is of no use to them
        "max_new_tokens": max_new_tokens(fields, ("max_completion_tokens", "max_tokens"), limits),
    }


def _completion_part(fields: Fields, limits: LimitSettings) -> dict[str, Any]:
    prompts, echo = _prompts(fields, limits.max_question_chars), fields.flag("echo")
    fields.only("best_of", 1, why="only 1 is supported")
    for name in ("chat_template_kwargs", "reasoning_effort"):
        fields.only(name, {}, why="a completion's prompt does not use a chat template")
    fields.only("suffix", "", why="text is only generated after the prompt")
    return {
        "prompts": prompts,
        "echo": echo,
        **read_format(fields, "response_format"),
        "top_logprobs": fields.whole("logprobs", 0, 20),
        "max_new_tokens": max_new_tokens(fields, ("max_tokens",), limits, TEXT_TOKENS, lowest=0 if echo else 1),
    }


def _prompts(fields: Fields, most_chars: int) -> list[str | tuple[int, ...]]:
    """Read `prompt`: a text, a list of token ids, or a list of either."""
    value = fields.any_of("prompt")
    is_list = isinstance(value, list) and not (value and type(value[0]) is int)
    items = value if is_list else [value]
    prompts: list[str | tuple[int, ...]] = []
    for item in items:
        if isinstance(item, list):
            if not all(type(token_id) is int and 0 <= token_id <= MAX_TOKEN_ID for token_id in item):
                fields.refuse("prompt", "holds something other than texts or lists of token ids")
            prompts.append(tuple(item))
        else:
            prompts.append(Fields({"prompt": item}).text("prompt", most_chars) or "")
    if not prompts or not all(prompts):
        fields.refuse("prompt", "is missing or empty, wanted text or tokens")
    return prompts


def max_new_tokens(
    fields: Fields, names: tuple[str, ...], limits: LimitSettings, default: int | None = None, lowest: int = 1
) -> int:
    """Read how many tokens are asked for, at most limits.max_new_tokens: a longer answer ends there, as it does at the
    model's last position."""
    given = {name: fields.whole(name, lowest, MAX_NUM_TOKENS) for name in names}
    sent = {name: value for name, value in given.items() if value is not None}
    if len(set(sent.values())) > 1:
        fields.refuse(names[0], f"and {names[1]} differ; send one of them")
    return min(next(iter(sent.values()), default or limits.max_new_tokens), limits.max_new_tokens)


def _prediction(fields: Fields, most_chars: int) -> str | None:
    """Read what the client expects the answer to contain, as text or a list of text parts."""
    prediction = fields.inner("prediction")
    if prediction is None:
        return None
    if prediction.choice("type", ("content",)) is None:
        prediction.refuse("type", "is missing, wanted content")
    content = content_of(prediction, most_chars)
    prediction.finish()
    return content


def _stream(fields: Fields) -> tuple[bool, bool, bool]:
    """Read whether the answer is streamed, has its usage at the end, and has its usage so far in each chunk."""
    stream, options = fields.flag("stream"), fields.inner("stream_options")
    if options is None:
        return stream, False, False
    if not stream:
        fields.refuse("stream_options", "is set, but stream is not true; set both")
    include_usage, is_continuous = options.flag("include_usage"), options.flag("continuous_usage_stats")
    options.ignore("include_obfuscation")
    options.finish()
    return stream, include_usage, include_usage and is_continuous


def _seed(fields: Fields) -> int | None:
    """Read any 64-bit seed, modulo 2**63, because random number generators take no negative ones."""
    seed = fields.whole("seed", -(2**63), 2**63 - 1)
    return None if seed is None else seed % 2**63


def _stops(fields: Fields, name: str) -> tuple[str, ...]:
    stops = fields.texts(name, MAX_STOPS, MAX_STOP_CHARS)
    if "" in stops:
        fields.refuse(name, "holds an empty text, at which every answer would end")
    return stops


def _stop_ids(fields: Fields) -> tuple[int, ...]:
    ids = fields.listed("stop_token_ids", MAX_BIASES)
    if not all(type(token_id) is int and 0 <= token_id <= MAX_TOKEN_ID for token_id in ids):
        fields.refuse("stop_token_ids", "holds something other than token ids")
    return tuple(ids)


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    given = fields.any_of("logit_bias")
    if given is None:
        return ()
    if not isinstance(given, dict) or len(given) > MAX_BIASES:
        fields.refuse("logit_bias", f"is not an object of at most {MAX_BIASES} tokens and their biases")
    biases = []
    for key, value in given.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 11 and int(key) <= MAX_TOKEN_ID):
            fields.refuse("logit_bias", "has a key that is not a token id")
        if type(value) not in (int, float) or not -100 <= value <= 100:
            fields.refuse("logit_bias", "has a bias that is not a number from -100 to 100")
        biases.append((int(key), float(value)))
    return tuple(biases)


def _refuse_unsupported(fields: Fields) -> None:
    """Refuse OpenAI's fields that would change the answer and are not supported; only neutral values pass."""
    check_foreign_fields(fields)
    fields.only("modalities", ["text"], why="only text is written")
    fields.only("audio", why="only text is written")
    fields.only("web_search_options", why="the service does not search the web")
    fields.only("functions", [], why="it was replaced by tools; send those")
    fields.only("function_call", "none", "auto", why="it was replaced by tool_choice; send that")


def read_new_context(body: object) -> tuple[str, str]:
    """Read name and text in a body for POST /v1/contexts."""
    fields = Fields(body)
    name, text = fields.needed_text("name", 256), fields.needed_text("text", 1 << 62)
    fields.finish()
    return name, text
