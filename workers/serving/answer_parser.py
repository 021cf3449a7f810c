"""A streaming parser that divides an answer's text into reasoning, tool calls and what is said to the user."""

import json
import re
from collections.abc import Callable, Set
from dataclasses import replace
from hashlib import sha256

from csattn.checks import lone_surrogate
from workers.serving.chat_template import THINK, THOUGHT, CallFormat, ChatTemplate
from workers.serving.messages import Ask, CallPart, Piece
from workers.serving.text import overlap

# The head of a call that can be streamed: the name comes first. Other calls are parsed when they are complete.
_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')

_SPACE = " \t\r\n"  # dropped around markers; an ideographic space, with which paragraphs may begin, is not
_UNANNOUNCED = '{"name":', '```json{"name":'  # beginnings of calls without a marker, with spaces removed
_NAMED = re.compile(r'\s*(?:```json\s)?\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")')
_FENCED = re.compile(r"\A\s*```json\s(.*?)(?:```)?\s*\Z", re.DOTALL)  # a truncated answer has no closing fence


class AnswerParser:
    """A state machine over the text. Its output, joined, does not depend on how the text is cut into pieces.

    What only looks like a call (it is no JSON, or names a tool that was not offered) is passed on as text.
    """

    def __init__(
        self,
        request_id: str,
        format: CallFormat | None,
        tools: Set[str],
        *,
        thinks: bool,
        is_thinking: bool,
        parallel_calls: bool = True,
        continues: bool = False,
    ) -> None:
        """thinks: the answer may begin with a thought (<think>); is_thinking: the prompt ends within one; continues:
        the prompt has the answer's beginning. format: None if calls are not looked for."""
        self._parallel_calls = parallel_calls
        self.has_ended = False  # the only call that the answer may have is complete
        self._request_id, self._format, self._tools = request_id, format, tools
        self._pending = ""
        self._text, self._reasoning, self._calls = "", "", list[CallPart]()  # of the piece that is being parsed
        self._is_final = False
        self._drops_space = (thinks or format is not None) and not continues  # strip what comes next on the left
        self._lead = ""  # the marker that announced a call, until the call is certain
        self._joint = ""  # what was dropped since the last call, until another is certain
        self._call = _Call()
        self.num_calls = 0
        self.is_cut_off = False  # the last call's arguments are incomplete
        self._state: Callable[[], bool]
        if is_thinking:
            self._state = self._read_thought
        elif continues:
            self._state = self._read_text
        else:
            self._state = self._begin if thinks else self._open_calls()

    def add(self, text: str, is_final: bool = False) -> Piece:
        """Parse more text; return what no later text can change. is_final: the answer ends with it, so that is all."""
        self._pending += text
        self._is_final = is_final
        while self._state():
            pass
        piece = Piece(self._text, reasoning=self._reasoning, calls=tuple(self._calls))
        self._text, self._reasoning, self._calls = "", "", []
        return piece

    # Each state consumes what it can of `_pending`, and returns whether the (next) state should be called again.

    def _begin(self) -> bool:
        begun = self._pending.lstrip()
        if begun.startswith(THINK):
            self._pending, self._state = begun.removeprefix(THINK), self._read_thought
            return True
        if not self._is_final and THINK.startswith(begun):
            return False
        self._state = self._open_calls()
        return True

    def _read_thought(self) -> bool:
        text, found = self._until(THOUGHT)
        self._reasoning += text
        if found:
            self._state, self._drops_space = self._open_calls(), True
        return found

    def _open_calls(self) -> Callable[[], bool]:
        """The state in which the text after reasoning begins."""
        if self._format is None:
            return self._read_text
        return self._read_unannounced if self._format.is_announced else self._between_calls

    def _read_unannounced(self) -> bool:
        """Read an answer that consists only of calls without their marker, which Qwen2.5-Coder, for one, leaves out."""
        begun = "".join(self._pending.lstrip()[:64].split())
        looks_like_call, named = begun.startswith(_UNANNOUNCED), _NAMED.match(self._pending)
        if named is not None and _name(named[1]) not in self._tools:
            self._state = self._read_text  # not a call: from here on, text is streamed as it comes
            return True
        is_over = self._is_final
        if looks_like_call and not self._parallel_calls:  # the answer ends with the first call, whatever would follow
            self._call.scan(self._pending[self._pending.index("{") :])
            is_over = is_over or self._call.end is not None
        if not is_over and (looks_like_call or any(start.startswith(begun) for start in _UNANNOUNCED)):
            return False
        calls, cut_off = self._unmarked_calls() if looks_like_call else ([], "")
        if calls:
            self._pending, self.has_ended = cut_off, not self._parallel_calls
            for name, arguments in calls:
                self._begin_call(name)
                self._add_arguments(arguments)
        self._state = self._read_text
        return True

    def _unmarked_calls(self) -> tuple[list[tuple[str, str]], str]:
        """The calls that the answer consists of, and the text of a truncated last one; no calls if there is any other
        text."""
        text, calls = _FENCED.sub(r"\1", self._pending).strip(), list[tuple[str, str]]()
        while text:
            call = _Call()
            call.scan(text)
            if call.end is None and text[0] == "{":
                break
            if (found := self._call_of(text[: call.end])) is None:
                return [], ""
            calls.append(found)
            text = text[call.end or 0 :].lstrip() if self._parallel_calls else ""
        return calls, text

    def _read_text(self) -> bool:
        opening = self._format.opening if self._format is not None else None
        text, found = self._until(opening)
        self._text += text
        if found:
            self._lead, self._state = opening or "", self._between_calls
        return found

    def _between_calls(self) -> bool:
        """Read what stands before a call, between two, or after the last."""
        format = self._format
        assert format is not None
        rest = self._pending.lstrip(format.filler if self.num_calls or self._lead else _SPACE)
        dropped = self._pending[: len(self._pending) - len(rest)]
        if self._lead:
            self._lead += dropped
        else:
            self._joint += dropped
        self._pending = rest
        for marker in filter(None, (format.opening, format.closing)):
            if rest.startswith(marker):
                self._pending = rest.removeprefix(marker)
                if marker == format.opening or self._lead:
                    self._lead += marker
                return True
            if not self._is_final and marker.startswith(rest):
                return False
        if rest.startswith("{"):
            self._call, self._state = _Call(), self._read_call
            return True
        if not rest:
            self._joint = ""
        self._emit_lead()
        return bool(rest)

    def _emit_lead(self) -> None:
        """Pass on as text the marker, and what stands between it and the last call's end: no call has followed."""
        assert self._format is not None
        text = self._joint.lstrip(_SPACE).removeprefix(self._format.run[1]).lstrip(_SPACE) + self._lead
        self._text += text
        self._drops_space = self._drops_space and not text
        self._lead, self._joint, self._state = "", "", self._read_text

    def _read_call(self) -> bool:
        call = self._call
        call.scan(self._pending)
        if call.emitted_len is None and (head := _HEAD.match(self._pending)) and _name(head[1]) in self._tools:
            self._begin_call(_name(head[1]))
            call.emitted_len = head.end()
        if call.emitted_len is not None:
            upto = call.arguments_end(call.emitted_len)
            self._add_arguments(self._pending[call.emitted_len : upto])
            call.emitted_len = max(call.emitted_len, upto)
        if call.end is None and not self._is_final:
            return False
        whole = self._pending[: call.end]
        self._pending = self._pending[len(whole) :]
        if call.emitted_len is None:
            if (found := self._call_of(whole)) is None:
                self._drops_space = False
                self._emit_lead()
                self._text += whole
                return bool(self._pending)
            self._begin_call(found[0])
            self._add_arguments(found[1])
        self._lead, self._joint, self._state, self._drops_space = "", "", self._between_calls, True
        self.is_cut_off = call.end is None and call.emitted_len not in call.ends_inside
        if not self._parallel_calls and call.end is not None:
            self.has_ended, self._pending = True, ""
        return bool(self._pending)

    def _call_of(self, text: str) -> tuple[str, str] | None:
        """Name and arguments (JSON) of a call; None if the text is not a call of an offered tool."""
        try:
            call = json.loads(text)
            arguments = next(call[key] for key in ("arguments", "parameters") if key in call)
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            if call["name"] not in self._tools or not isinstance(arguments, dict):
                return None
        except (ValueError, KeyError, TypeError, StopIteration, RecursionError):
            return None
        if (head := _HEAD.match(text)) is None:
            written = json.dumps(arguments, ensure_ascii=False)
            is_text = lone_surrogate(written) is None  # else lone surrogates stay escaped, as they came
            return call["name"], written if is_text else json.dumps(arguments)
        seen = _Call()
        seen.scan(text)
        return call["name"], text[head.end() : seen.arguments_end(head.end())]  # as the model wrote them

    def _begin_call(self, name: str) -> None:
        # Mistral's templates accept only ids of nine letters and digits
        call_id = sha256(f"{self._request_id} {self.num_calls}".encode()).hexdigest()[:9]
        self._calls.append(CallPart(self.num_calls, call_id=call_id, name=name))
        self.num_calls += 1

    def _add_arguments(self, text: str) -> None:
        calls, index = self._calls, self.num_calls - 1
        if calls and calls[-1].index == index:
            calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + text)
        elif text:
            calls.append(CallPart(index, text))

    def _until(self, marker: str | None) -> tuple[str, bool]:
        """Consume the text before the marker, as far as it is certain, and the marker. Returns that text, and whether
        the marker has come."""
        if self._drops_space:
            self._pending = self._pending.lstrip(_SPACE)
            self._drops_space = not self._pending
        if marker is None:
            text, self._pending = self._pending, ""
            return text, False
        text, found, after = self._pending.partition(marker)
        if not found and not self._is_final:
            text = text[: len(text) - overlap(text, marker)]
        self._pending = after if found else self._pending[len(text) :]
        return text, bool(found)


class _Call:
    """An incremental scanner of a JSON object: finds its end, and the ends of objects and lists one level down."""

    def __init__(self) -> None:
        self.end: int | None = None
        # up to where its arguments have been emitted; None: its name is not known yet
        self.emitted_len: int | None = None
        self._seen = self._depth = 0
        self._in_string = self._is_escaped = False
        self.ends_inside: list[int] = []  # ends of objects and lists one level down

    def scan(self, text: str) -> None:
        while self.end is None and self._seen < len(text):
            char, self._seen = text[self._seen], self._seen + 1
            if self._in_string:
                self._in_string = self._is_escaped or char != '"'
                self._is_escaped = char == "\\" and not self._is_escaped
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 1:
                    self.ends_inside.append(self._seen)
                elif self._depth == 0:
                    self.end = self._seen

    def arguments_end(self, start: int) -> int:
        """The end of the object, one level down, that begins at `start`, as far as it has been scanned."""
        return next((end for end in self.ends_inside if end >= start), self._seen)


def answer_parser_for(ask: Ask, template: ChatTemplate) -> AnswerParser | None:
    """Return the parser for a request's answer; None if it has neither reasoning nor calls to look for."""
    format = template.calls if ask.tools else None
    if not ask.turns or not (template.thinks or format):
        return None
    return AnswerParser(
        ask.request_id,
        format,
        {tool.name for tool in ask.tools},
        thinks=template.thinks,
        is_thinking=template.is_thinking,
        parallel_calls=ask.parallel_calls,
        continues=ask.continues and not ask.must_call,  # a forced call does not continue the last turn's text
    )


def _name(quoted: str) -> str:
    try:
        return str(json.loads(quoted))
    except ValueError:
        return ""
