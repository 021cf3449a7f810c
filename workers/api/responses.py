"""OpenAI's Responses API: requests become an `Ask`, answers become items and events. Nothing is stored."""

import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, cast

from workers.api.answers import chat_score, split_calls, usage
from workers.api.fields import Fields
from workers.api.foreign import check_foreign_fields
from workers.api.parsing import ParsedRequest, max_new_tokens, read_ask, read_sampling
from workers.api.tools import MAX_CALLS, name_within, read_call, read_format, read_tools
from workers.api.turns import EFFORTS, ROLES, content_of, require_answerable, require_turns
from workers.serving.messages import CallPart, Done, Event, Piece, Turn
from workers.settings import LimitSettings

LOGPROBS = "message.output_text.logprobs"
TEXT_KINDS = ("input_text", "output_text", "text")
UNSTORED = "nothing is stored here; send the conversation itself as input"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedResponse(ParsedRequest):
    """echoed_fields: the request's fields that the response repeats. namespaces: namespace and name of each function in
    one, by the name that the model knows."""

    echoed_fields: dict[str, Any] = field(default_factory=dict)
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)


def read_response(body: object, request_id: str, model: str, limits: LimitSettings) -> ParsedResponse:
    """Read a body for /v1/responses."""
    echoed_fields = (
        {name: body.get(name) for name in ("instructions", "metadata", "text", "tool_choice", "tools")}
        if isinstance(body, dict)
        else {}
    )
    fields = Fields(body)
    requested_model = fields.needed_text("model", 256)
    turns = _turns(fields, limits)
    text = fields.inner("text")
    form = {} if text is None else read_format(text, "format", has_wrapper=False)
    if text is not None:
        text.ignore("verbosity")
        text.finish()
    tools = read_tools(fields, is_nested=False)
    top, includes = fields.whole("top_logprobs", 0, 20), fields.texts("include", 16, 64)
    if set(includes) - {LOGPROBS, "reasoning.encrypted_content"}:
        fields.refuse("include", f"names something other than {LOGPROBS}, the only output that can be included")
    effort = _effort(fields)
    _refuse_unsupported(fields)
    stream = fields.flag("stream")
    fields.ignore("stream_options", "client_metadata")
    sampling = read_sampling(
        fields,
        max_new_tokens=max_new_tokens(fields, ("max_output_tokens",), limits),
        top_logprobs=(top or 0) if LOGPROBS in includes else None,
    )
    ask = read_ask(
        fields,
        requested_model,
        model,
        request_id=request_id,
        turns=turns,
        turns_field="input",
        reasoning_effort=effort,
        effort_field="reasoning.effort",
        schema_field="text.format",
        sampling=sampling,
        **form,
        **tools,
    )
    namespaces = {
        name_within(group["name"], tool["name"]): (group["name"], tool["name"])
        for group in echoed_fields["tools"] or []
        if group["type"] == "namespace"
        for tool in group.get("tools") or []
    }
    return ParsedResponse(
        (ask,), 1, requested_model, "response", stream, echoed_fields=echoed_fields, namespaces=namespaces
    )


class ResponseForm:
    """Makes the objects of one response, whole or as a stream's events."""

    def __init__(self, parsed: ParsedResponse) -> None:
        self._parsed, self._ask = parsed, parsed.asks[0]
        self._created_at = int(time.time())
        self._items: list[dict[str, Any]] = []  # the last one may be open
        self._is_open = False
        self._num_events = 0
        self._scores: list[dict[str, Any]] = []  # of tokens whose text, if any, comes later

    def whole(self, pieces: list[list[Piece]], dones: list[Done]) -> dict[str, Any]:
        for piece in pieces[0]:
            self.piece(0, piece)
        self.last(0, dones[0])
        return self._response(dones[0])

    def first(self, index: int, event: Event) -> list[dict[str, Any]]:
        """Return the events that begin the stream."""
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=self._response(None)) for kind in kinds]

    def piece(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        of_open_call, calls = split_calls(piece)
        events = self._call(of_open_call)
        if piece.reasoning:
            events += self._open("reasoning")
            events.append(self._add("content", "response.reasoning_text.delta", piece.reasoning))
        if piece.text or not (piece.reasoning or piece.calls):  # reasoning and calls are reported without scores
            self._scores += [chat_score(score) for score in piece.scores]
        if piece.text:
            events += self._open("message")
            scores, self._scores = self._scores, []
            self._items[-1]["content"][0]["logprobs"] += scores
            events.append(self._add("content", "response.output_text.delta", piece.text, logprobs=scores))
        return events + self._call(calls)

    def last(self, index: int, done: Done) -> list[dict[str, Any]]:
        """Return the events that end the stream."""
        status = "incomplete" if done.reason == "length" else "completed"
        events = [] if self._items else self._open("message")
        if self._items[-1]["type"] == "message":
            self._items[-1]["content"][0]["logprobs"] += self._scores
        # a call at the end for which the reason is not tool_calls was cut off by a stop
        is_cut_call = self._items[-1]["type"] == "function_call" and done.reason != "tool_calls"
        events += self._close("incomplete" if is_cut_call else status)
        return [*events, self._event(f"response.{status}", response=self._response(done))]

    def failed(self, told: dict[str, Any]) -> dict[str, Any]:
        """Return the event that ends the stream by an error. OpenAI's clients raise the event's own, and programs that
        read events themselves, such as Codex, look for the response's: without one, they ask again and again."""
        error = {name: told["error"][name] for name in ("code", "message")}
        response = {**self._response(None), "status": "failed", "error": error}
        return {**self._event("response.failed", response=response), **told}

    def _call(self, parts: Sequence[CallPart]) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for part in parts:
            if part.call_id:
                events += self._open("function_call", part.call_id, part.name)
            if part.arguments:
                events.append(self._add("arguments", "response.function_call_arguments.delta", part.arguments))
        return events

    def _open(self, kind: str, call_id: str = "", name: str = "") -> list[dict[str, Any]]:
        """Open an item of that kind, unless one is open; each call is a new item. Returns the events."""
        if self._is_open and self._items[-1]["type"] == kind and not call_id:
            return []
        events = self._close()
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
        item: dict[str, Any] = {"id": f"{prefix}_{self._ask.request_id}-{len(self._items)}", "type": kind}
        item["status"] = "in_progress"
        if kind == "function_call":
            namespace, own_name = self._parsed.namespaces.get(name, (None, name))
            item |= {"call_id": call_id, "name": own_name, "arguments": ""}
            if namespace:
                item["namespace"] = namespace
        elif kind == "message":
            item |= {"role": "assistant", "content": []}
        else:
            item |= {"summary": [], "content": []}
        self._items.append(item)
        self._is_open = True
        events.append(self._of_item("response.output_item.added", item=dict(item)))
        if kind != "function_call":
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item["content"] = [part if kind == "message" else {"type": "reasoning_text", "text": ""}]
            # a copy, because this piece's text and logprobs are added before the event is sent
            events.append(self._of_part("response.content_part.added", part=deepcopy(item["content"][0])))
        return events

    def _add(self, where: str, event: str, delta: str, **more: Any) -> dict[str, Any]:
        item = self._items[-1]
        if where == "arguments":
            item["arguments"] += delta
            return self._of_item(event, item_id=item["id"], delta=delta)
        item["content"][0]["text"] += delta
        return self._of_part(event, delta=delta, **more)

    def _close(self, status: str = "completed") -> list[dict[str, Any]]:
        if not self._is_open:
            return []
        self._is_open, item = False, self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            done, call = "response.function_call_arguments.done", {key: item[key] for key in ("arguments", "name")}
            events = [self._of_item(done, item_id=item["id"], **call)]
        else:
            part = item["content"][0]
            is_message = item["type"] == "message"
            done = "response.output_text.done" if is_message else "response.reasoning_text.done"
            more = {"logprobs": part["logprobs"]} if is_message else {}
            events = [
                self._of_part(done, text=part["text"], **more),
                self._of_part("response.content_part.done", part=part),
            ]
        return [*events, self._of_item("response.output_item.done", item=item)]

    def _of_part(self, kind: str, **more: Any) -> dict[str, Any]:
        return self._of_item(kind, item_id=self._items[-1]["id"], content_index=0, **more)

    def _of_item(self, kind: str, **more: Any) -> dict[str, Any]:
        return self._event(kind, output_index=len(self._items) - 1, **more)

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **more}

    def _response(self, done: Done | None) -> dict[str, Any]:
        sampling, echoed_fields = self._ask.sampling, self._parsed.echoed_fields
        is_cut = done is not None and done.reason == "length"
        return {
            "id": f"resp_{self._ask.request_id}",
            "object": "response",
            "created_at": self._created_at,
            "status": "in_progress" if done is None else "incomplete" if is_cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": echoed_fields["instructions"],
            "max_output_tokens": sampling.max_new_tokens,
            "metadata": echoed_fields["metadata"] or {},
            "model": self._parsed.model,
            "output": list(self._items),
            "parallel_tool_calls": self._ask.parallel_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": sampling.temperature,
            "text": echoed_fields["text"] or {"format": {"type": "text"}},
            "tool_choice": echoed_fields["tool_choice"] or "auto",
            "tools": echoed_fields["tools"] or [],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None if done is None else _usage(done),
        }


def _usage(done: Done) -> dict[str, Any]:
    counts = usage([done], [done])
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": done.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": done.new_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }


def _turns(fields: Fields, limits: LimitSettings) -> tuple[Turn, ...]:
    """Read `instructions` and `input`."""
    most_chars = limits.max_question_chars
    turns: list[Turn] = []
    if instructions := fields.text("instructions", most_chars):
        turns.append(Turn("system", instructions))
    value = fields.any_of("input")
    if isinstance(value, list):
        reasoning = ""
        for index, item in enumerate(value):
            reasoning = _add_item(turns, Fields(item, f"input[{index}]."), most_chars, reasoning)
    else:
        turns.append(Turn("user", Fields({"input": value}).needed_text("input", most_chars)))
    if not turns:
        fields.refuse("input", "has no message to answer, wanted text or items")
    require_turns(tuple(turns), fields, "input", most_chars)
    require_answerable(tuple(turns), fields, "input")
    return tuple(turns)


def _add_item(turns: list[Turn], fields: Fields, most_chars: int, reasoning: str) -> str:
    """Add an item of `input` to turns; return the reasoning that belongs to the assistant's next turn."""
    kind = fields.choice("type", ("message", "function_call", "function_call_output", "reasoning")) or "message"
    fields.ignore("id", "status", "phase")
    next_reasoning = ""
    if kind == "reasoning":
        fields.ignore("summary", "encrypted_content")
        next_reasoning = reasoning + content_of(fields, most_chars, is_needed=False, kinds=("reasoning_text",))
    elif kind == "message":
        role = fields.choice("role", ("system", "developer", "user", "assistant")) or "user"
        content = content_of(fields, most_chars, kinds=TEXT_KINDS)
        is_told = role == "assistant"
        turns.append(Turn(cast(Any, ROLES[role]), content, reasoning=reasoning if is_told else ""))
    elif kind == "function_call":
        namespace = fields.text("namespace", 64)
        call = read_call(fields, fields.needed_text("call_id", 256))
        call = replace(call, name=name_within(namespace, call.name))
        if not turns or turns[-1].role != "assistant":
            turns.append(Turn("assistant", ""))
        if len(turns[-1].calls) == MAX_CALLS:
            fields.refuse("call_id", f"exceeds the {MAX_CALLS} calls that a turn may have")
        last = turns[-1]
        turns[-1] = replace(last, calls=(*last.calls, call), reasoning=last.reasoning + reasoning)
    else:
        call_id = fields.needed_text("call_id", 256)
        unread = ("input_image", "input_file")
        content = content_of(fields, most_chars, kinds=TEXT_KINDS, name="output", unread=unread)
        turns.append(Turn("tool", content, call_id=call_id))
    fields.finish()
    return next_reasoning


def _refuse_unsupported(fields: Fields) -> None:
    check_foreign_fields(fields)
    fields.only("previous_response_id", why=UNSTORED)
    fields.only("conversation", why=UNSTORED)
    fields.only("background", False, why="answers are not generated in the background")
    fields.only("truncation", "disabled", "auto", why="conversations are not truncated")
    for name in ("max_tokens", "max_completion_tokens"):
        fields.only(name, why="it is called max_output_tokens here")
    fields.only("prompt", why="no prompt templates are stored here; send input")
    fields.only("max_tool_calls", why="the service runs no tools of its own")


def _effort(fields: Fields) -> str | None:
    """Read the effort in `reasoning`."""
    reasoning = fields.inner("reasoning")
    if reasoning is None:
        return None
    effort = reasoning.choice("effort", EFFORTS)
    reasoning.ignore("summary", "generate_summary")  # reasoning is never summarized
    reasoning.finish()
    return effort
