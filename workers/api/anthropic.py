"""Anthropic's Messages API: requests become an `Ask`, answers become content blocks and events. Nothing is stored."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from workers.api.answers import split_calls, used_by
from workers.api.fields import Fields, shown_value
from workers.api.foreign import check_foreign_fields
from workers.api.names import context_or_own
from workers.api.parsing import ParsedRequest, max_new_tokens, read_ask, read_sampling
from workers.api.tools import MAX_CALLS, MAX_NAME_CHARS, MAX_TOOLS, checked_name, names_of, read_format, read_tool
from workers.api.turns import UNREAD, content_of, require_answerable, require_turns
from workers.serving.messages import (
    BadRequestError,
    CallPart,
    Done,
    Event,
    Piece,
    TokenizeAsk,
    Tool,
    ToolCall,
    Turn,
    Usage,
)
from workers.settings import LimitSettings

# Claude Code's first block of `system`, for Anthropic's own accounting
ACCOUNTING = "x-anthropic-billing-header:"
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}
USUAL_EFFORT = "medium"  # where thoughts are wanted, and nothing is said of effort
# clients drop thoughts that have none, or send them back as a user's text; it is not read here
SIGNATURE = "unsigned"
READ = ("text", "document", "search_result")  # blocks that anyone but the assistant may send


class ThreadsError(BadRequestError, code="thread_unsupported_request"):
    """Anthropic's client sends the whole conversation in answer to this code, and works on."""


def read_message(body: object, request_id: str, model: str, limits: LimitSettings) -> ParsedRequest:
    """Read a body for /v1/messages."""
    fields = Fields(body)
    requested_model = fields.needed_text("model", 256)
    conversation, more = _conversation(fields, limits)
    stream = fields.flag("stream")
    most = max_new_tokens(fields, ("max_tokens",), limits)
    ask = read_ask(
        fields,
        requested_model,
        model,
        request_id=request_id,
        sampling=read_sampling(fields, most, stop_field="stop_sequences"),
        reports_usage=stream,  # the first event has the prompt's
        **conversation,
        **more,
    )
    return ParsedRequest((ask,), 1, requested_model, "message", stream)


def read_count(body: object, model: str, limits: LimitSettings) -> tuple[str, TokenizeAsk]:
    """Read a body for /v1/messages/count_tokens. Returns the context that it names, or "", and the conversation."""
    fields = Fields(body)
    context = context_or_own(fields.needed_text("model", 256), model)
    conversation, _ = _conversation(fields, limits)
    fields.finish()
    return context, TokenizeAsk(**conversation)


class MessageForm:
    """Makes the objects of one message, whole or as a stream's events."""

    def __init__(self, parsed: ParsedRequest) -> None:
        self._parsed = parsed
        self._blocks: list[dict[str, Any]] = []  # the last one may be open
        self._is_open = False
        self._arguments = ""  # of the open call, so far

    def whole(self, pieces: list[list[Piece]], dones: list[Done]) -> dict[str, Any]:
        for piece in pieces[0]:
            self.piece(0, piece)
        self._close()
        # a call that max_tokens cut off is left out, so that no client runs it with a part of its arguments
        blocks, done = [block for block in self._blocks if block.get("input", {}) is not None], dones[0]
        if done.reason == "tool_calls" and not any("input" in block for block in blocks):
            done = replace(done, reason="stop")
        return self._message(done, blocks) | _ending(done)

    def first(self, index: int, event: Event) -> list[dict[str, Any]]:
        """Return the event that begins the stream."""
        used = used_by(event)
        assert used is not None, "a stream's events report usage"
        message = self._message(replace(used, new_tokens=0), []) | {"stop_reason": None, "stop_sequence": None}
        return [{"type": "message_start", "message": message}]

    def piece(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        of_open_call, calls = split_calls(piece)
        events = self._call(of_open_call)
        if piece.reasoning:
            events += self._open({"type": "thinking", "thinking": "", "signature": ""})
            events.append(self._add("thinking", "thinking_delta", piece.reasoning))
        if piece.text:
            events += self._open({"type": "text", "text": ""})
            events.append(self._add("text", "text_delta", piece.text))
        return events + self._call(calls)

    def last(self, index: int, done: Done) -> list[dict[str, Any]]:
        """Return the events that end the stream."""
        ending = {"type": "message_delta", "delta": _ending(done), "usage": _usage(done)}
        return [*self._close(), ending, {"type": "message_stop"}]

    def _call(self, parts: Sequence[CallPart]) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for part in parts:
            if part.call_id:
                events += self._open({"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}})
            if part.arguments:
                self._arguments += part.arguments
                events.append(self._delta("input_json_delta", "partial_json", part.arguments))
        return events

    def _open(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        """Open a block, unless one of its kind is open; each call is a block of its own. Returns the events."""
        kind = block["type"]
        if self._is_open and self._blocks[-1]["type"] == kind != "tool_use":
            return []
        events = self._close()
        self._blocks.append(block)
        self._is_open = True
        # a copy, because this piece's text is added before the event is sent
        return [*events, self._event("content_block_start", content_block=dict(block))]

    def _add(self, where: str, kind: str, text: str) -> dict[str, Any]:
        self._blocks[-1][where] += text
        return self._delta(kind, where, text)

    def _close(self) -> list[dict[str, Any]]:
        if not self._is_open:
            return []
        self._is_open, block = False, self._blocks[-1]
        events = []
        if block["type"] == "tool_use":
            block["input"], self._arguments = _json_object(self._arguments), ""
        elif block["type"] == "thinking":
            events.append(self._add("signature", "signature_delta", SIGNATURE))
        return [*events, self._event("content_block_stop")]

    def _delta(self, kind: str, where: str, text: str) -> dict[str, Any]:
        return self._event("content_block_delta", delta={"type": kind, where: text})

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"type": kind, "index": len(self._blocks) - 1, **more}

    def _message(self, used: Usage, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._parsed.asks[0].request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._parsed.model,
            "content": blocks,
            "usage": _usage(used),
        }


def _usage(used: Usage) -> dict[str, Any]:
    return {
        "input_tokens": used.context_tokens + used.question_tokens - used.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": used.cached_tokens,
        "output_tokens": used.new_tokens,
    }


def _ending(done: Done) -> dict[str, Any]:
    reasons = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "stop_sequence" if done.stop else "end_turn"}
    return {"stop_reason": reasons[done.reason], "stop_sequence": done.stop if done.reason == "stop" else None}


def _json_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object, or None if it is cut off, or has numbers that JSON cannot write (NaN, 1e999)."""
    try:
        value = json.loads(text or "{}", strict=False)  # models write line ends into texts
        json.dumps(value, allow_nan=False)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _conversation(fields: Fields, limits: LimitSettings) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the fields that a message has in common with a count of its tokens: those of a `Conversation`, and those
    that an `Ask` has about the answer."""
    turns = _turns(fields, limits)
    if len(turns) > 1 and turns[-1] == Turn("assistant", ""):
        turns = turns[:-1]  # continued, it would keep a model that thinks from thinking
    continues = turns[-1].role == "assistant" and not turns[-1].calls
    if not continues:
        require_answerable(turns, fields, "messages")
    tools, about_answer = _tools(fields)
    if form := read_format(fields, "output_format", has_wrapper=False):  # its name in older clients
        about_answer |= form | {"schema_field": "output_format"}
    output = fields.inner("output_config")
    effort = None
    if output is not None:
        effort = output.choice("effort", tuple(EFFORTS))
        if form := read_format(output, "format", has_wrapper=False):
            about_answer |= form | {"schema_field": "output_config.format"}
        output.finish()
    conversation = {
        "turns": turns,
        "continues": continues,
        "tools": tools,
        "reasoning_effort": _effort(fields, effort),
        "effort_field": "thinking",
        "needs_effort": False,  # clients send it to every model
    }
    _refuse_unsupported(fields)
    return conversation, about_answer


def _turns(fields: Fields, limits: LimitSettings) -> tuple[Turn, ...]:
    """Read `system` and `messages`."""
    most_chars = limits.max_question_chars
    turns: list[Turn] = []
    system = fields.any_of("system")
    if isinstance(system, list):
        system = [block for block in system if not (isinstance(block, dict) and _is_accounting(block.get("text")))]
    if system:
        turns.append(Turn("system", content_of(Fields({"system": system}), most_chars, name="system")))
    for index, item in enumerate(fields.items("messages")):
        message = Fields(item, f"messages[{index}].")
        role = message.choice("role", ("user", "assistant", "system"))
        if role is None:
            message.refuse("role", "is missing, wanted one of user, assistant, system")
        blocks = _blocks(message, is_needed=role != "assistant")  # an answer may be empty
        message.finish()
        if role == "assistant":
            turns.append(_assistant_turn(blocks, most_chars))
        else:
            _add_user_turns(turns, blocks, most_chars, joins=role == "system")
    require_turns(tuple(turns), fields, "messages", most_chars)
    return tuple(turns)


def _is_accounting(text: object) -> bool:
    """Whether this text changes with each request and means nothing to a model: no prefix of prompts would be found."""
    return isinstance(text, str) and text.startswith(ACCOUNTING)


def _blocks(message: Fields, is_needed: bool = True) -> list[Fields]:
    """Return the blocks of `content`, of which a text is one."""
    content = message.any_of("content")
    if content is None or content == []:
        if is_needed:
            message.refuse("content", "is missing or empty, wanted text or a list of blocks")
        return []
    where = f"{message.where}content"
    if not isinstance(content, list):
        return [Fields({"type": "text", "text": content}, f"{where}.")]
    return [Fields(block, f"{where}[{index}].") for index, block in enumerate(content)]


def _kind(block: Fields, *kinds: str) -> str:
    kind = block.any_of("type")
    if kind not in kinds:
        block.refuse(
            "type", f"is {shown_value(kind)}, wanted one of {', '.join(kinds)}: other content is not read here"
        )
    return str(kind)


def _add_user_turns(turns: list[Turn], blocks: list[Fields], most_chars: int, joins: bool) -> None:
    """Add the turns of a message: one for each result of a tool, and one for texts between them.

    joins: a message with role system. Many templates refuse it in the middle of a conversation, so its text joins the
    user's before it; one at the beginning joins `system`.
    """
    texts: list[str] = []
    of_tool = False  # pages that a tool has read come after its result
    for block in blocks:
        kind = _kind(block, *READ, *(() if joins else ("tool_result",)), *(("image",) if of_tool else ()))
        if kind == "tool_result":
            of_tool = True
            if texts:
                turns.append(Turn("user", "\n".join(texts)))
                texts = []
            call_id = block.needed_text("tool_use_id", 256)
            block.flag("is_error")  # the text says it, too
            block.ignore("cache_control")
            content = [
                _text(part, _kind(part, *READ, "image", "tool_reference"), most_chars, of_tool)
                for part in _blocks(block, is_needed=False)
            ]
            turns.append(Turn("tool", "\n".join(content), call_id=call_id))
            block.finish()
        else:
            texts.append(_text(block, kind, most_chars, of_tool))
    text = "\n".join(texts)
    if joins and turns and turns[-1].role in ("user", "system"):
        turns[-1] = replace(turns[-1], content=f"{turns[-1].content}\n\n{text}")
    elif texts:
        turns.append(Turn("system" if joins and not turns else "user", text))


def _text(block: Fields, kind: str, most_chars: int, of_tool: bool) -> str:
    """Read a block as text: a document and a search result with what is said about them, a tool by its name."""
    block.ignore("cache_control", "citations")
    if kind == "document":
        source = block.inner("source")
        if source is not None and source.any_of("type") == "text":
            text = _document(block, source, most_chars)
        elif of_tool:
            return UNREAD.format(kind)
        else:
            block.refuse("source", 'is not of type "text": only plain text is read here')
    elif kind == "image":
        return UNREAD.format(kind)
    elif kind == "search_result":
        heads = block.needed_text("title", most_chars), block.needed_text("source", most_chars)
        text = "\n".join([*heads, content_of(block, most_chars)])
    else:
        text = block.needed_text("tool_name" if kind == "tool_reference" else "text", most_chars)
    block.finish()
    return text


def _document(block: Fields, source: Fields, most_chars: int) -> str:
    """Read a document of plain text, with its title and what is said about it."""
    source.only("media_type", "text/plain", why="only plain text is read here")
    texts = block.text("title", most_chars), block.text("context", most_chars), source.needed_text("data", most_chars)
    source.finish()
    return "\n".join(text for text in texts if text)


def _assistant_turn(blocks: list[Fields], most_chars: int) -> Turn:
    texts, reasoning, calls = list[str](), "", list[ToolCall]()
    for block in blocks:
        kind = _kind(block, "text", "thinking", "redacted_thinking", "tool_use")
        block.ignore("cache_control", "citations")
        if kind == "text":
            texts.append(block.needed_text("text", most_chars))
        elif kind == "tool_use":
            calls.append(_call(block))
        elif kind == "thinking":
            reasoning += block.text("thinking", most_chars) or ""
        block.ignore("signature", "data", "caller")
        block.finish()
    if len(calls) > MAX_CALLS:
        blocks[-1].refuse("id", f"exceeds the {MAX_CALLS} calls that a turn may have")
    return Turn("assistant", "\n".join(texts), tuple(calls), reasoning=reasoning)


def _call(block: Fields) -> ToolCall:
    arguments = block.any_of("input")
    if not isinstance(arguments, dict):
        block.refuse("input", "is missing or no object; wanted the call's arguments")
    block.require_text_within("input", arguments)
    return ToolCall(block.needed_text("id", 256), checked_name(block), arguments)


def _tools(fields: Fields) -> tuple[tuple[Tool, ...], dict[str, Any]]:
    """Read `tools` and `tool_choice`: the tools, and what must be called."""
    tools = []
    for index, item in enumerate(fields.listed("tools", MAX_TOOLS)):
        tool = Fields(item, f"tools[{index}].")
        tool.only("type", "custom", why="only tools that the client runs, with an input_schema, are supported")
        tools.append(read_tool(tool, "input_schema"))
        tool.only("allowed_callers", ["direct"], why="only the model itself calls tools")
        tool.ignore("cache_control", "defer_loading", "eager_input_streaming", "input_examples")
        tool.finish()
    names = names_of(tuple(tools), fields)
    choice = fields.inner("tool_choice")
    kind, named, is_parallel = None, None, True
    if choice is not None:
        kind, named = choice.choice("type", ("auto", "any", "tool", "none")), choice.text("name", MAX_NAME_CHARS)
        is_parallel = not choice.flag("disable_parallel_tool_use")
        choice.finish()
        if kind == "tool" and named not in names:
            fields.refuse("tool_choice", "names a tool that is not among the tools")
        if kind == "any" and not names:
            fields.refuse("tool_choice", "is any, but there are no tools")
    must_call = tuple(names) if kind == "any" else (str(named),) if kind == "tool" else ()
    is_parallel = is_parallel and kind != "tool"  # a named tool is called once
    return () if kind == "none" else tuple(tools), {"must_call": must_call, "parallel_calls": is_parallel}


def _effort(fields: Fields, effort: str | None) -> str | None:
    """Read `thinking` into a `reasoning_effort`, with the effort that was asked for; None leaves it to the model."""
    thinking = fields.inner("thinking")
    if thinking is None:
        return None if effort is None else EFFORTS[effort]
    kind = thinking.choice("type", ("enabled", "adaptive", "disabled"))
    thinking.ignore("budget_tokens", "display")  # a thought ends where the model ends it, or at max_tokens
    thinking.finish()
    return "none" if kind == "disabled" else EFFORTS[effort or USUAL_EFFORT]


def _refuse_unsupported(fields: Fields) -> None:
    check_foreign_fields(fields)
    # context_management: nothing is cut or cleared here; what does not fit is refused
    fields.ignore("context_management", "diagnostics", "inference_geo", "speed", "user_profile_id", "workspace_id")
    fields.only("mcp_servers", [], why="the service runs no tools of its own")
    fields.only("container", why="the service runs no tools of its own")
    if fields.any_of("thread") is not None:
        what = "thread is set, but no conversation is stored here; leave it out, and send all messages each time"
        raise ThreadsError(what, "thread")
