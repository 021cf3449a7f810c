"""Detects from a model's chat template how it writes reasoning and tool calls."""

import re
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from workers.serving.messages import Ask, BadRequestError, Conversation, Tool, Turn
from workers.serving.text import special_ids

THINK, THOUGHT = "<think>", "</think>"
AnyAsk = TypeVar("AnyAsk", bound=Conversation)


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a template writes calls: each is a JSON object of `name` and arguments, with these strings around it."""

    opening: str  # marker that announces a call, or several, in an answer's text
    closing: str = ""  # marker after each call
    run: tuple[str, str] = ("", "")  # what a run of calls begins and ends with, after the opening
    joint: str = ""  # between two calls
    filler: str = " \r\n\t"  # characters that may stand around calls
    arguments_key: str = "arguments"
    is_announced: bool = True  # False: an answer that begins with an object is a call even without the opening


HERMES = CallFormat("<tool_call>", "</tool_call>", joint="\n")  # Qwen's too
MISTRAL = CallFormat("[TOOL_CALLS]", run=("[", "]"), joint=", ", filler=" \r\n\t[,]")
LLAMA = CallFormat("<|python_tag|>", joint="; ", filler=" \r\n\t;", arguments_key="parameters", is_announced=False)


class ChatTemplate:
    """What the model's chat template supports: reasoning, tools, and the format of calls."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._text = tokenizer, _template_of(tokenizer)
        template = self._text
        self.thinks = THOUGHT in template
        self.is_thinking = self.thinks and _begins_thought(tokenizer, {})  # the prompt ends within a thought
        self.has_tools = "tools" in template
        self.calls = _calls_of(template) if self.has_tools else None
        markers = [THINK, THOUGHT] if self.thinks else []
        markers += [self.calls.opening, self.calls.closing] if self.calls else []
        vocab = tokenizer.get_vocab()
        self.marker_ids = {marker: vocab[marker] for marker in markers if marker in vocab}
        special = special_ids(tokenizer)
        self.hidden = {id: marker for marker, id in self.marker_ids.items() if id in special}  # skipped by decoding

    def with_effort(self, ask: AnyAsk) -> AnyAsk:
        """Translate `reasoning_effort` into the template's option for it. Raises BadRequestError if it has none."""
        effort = ask.reasoning_effort
        if effort is None:
            return ask
        switches = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        known = {name: value for name, value in switches.items() if self._knows(name)}
        if not known and ask.needs_effort and (effort != "none" or self.thinks):
            raise BadRequestError(
                "the chat template of this service's model has no switch for reasoning effort; leave "
                f"{ask.effort_field} out",
                ask.effort_field,
            )
        return replace(ask, template_options={**known, **ask.template_options}, reasoning_effort=None)

    def for_request(self, ask: Ask) -> "ChatTemplate":
        """The template for this request: its options, or a turn that it continues, decide whether a thought is open."""
        if not (self.thinks and (ask.template_options or ask.continues)):
            return self
        template = copy(self)
        if ask.continues:  # the turn may stop within a thought, or after it
            content = ask.turns[-1].content
            template.thinks = template.is_thinking = THINK in content and THOUGHT not in content
        else:
            template.is_thinking = _begins_thought(self._tokenizer, ask.template_options)
        return template

    def require(self, ask: Conversation) -> None:
        """Raise BadRequestError for options, tools or calls that the template cannot write."""
        for name in ask.template_options:
            if not self._knows(name):
                raise BadRequestError(
                    f"the chat template of this service's model has no {name}; leave it out of chat_template_kwargs",
                    f"chat_template_kwargs.{name}",
                )
        if not ask.tools and not any(turn.calls or turn.role == "tool" for turn in ask.turns):
            return
        field = "tools" if ask.tools else ask.field
        if not self.has_tools:
            raise BadRequestError("the chat template of this service's model has no tools; leave them out", field)
        if self.calls is None:
            raise BadRequestError(
                "the chat template of this service's model writes tool calls in a form that this service does not "
                "parse; wanted JSON after <tool_call> (Hermes, Qwen), [TOOL_CALLS] (Mistral) or <|python_tag|> "
                "(Llama)",
                field,
            )

    def _knows(self, name: str) -> bool:
        """Whether the template mentions a variable of that name."""
        return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", self._text) is not None


def tool_specs(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    """Convert tools to the form that chat templates take."""
    if not tools:
        return None
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.parameters},
        }
        for tool in tools
    ]


def messages_of(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Convert turns to the messages that chat templates take."""
    names: dict[str, str] = {}  # of tools, by call id; the first call with an id counts
    for call in (call for turn in turns for call in turn.calls):
        names.setdefault(call.call_id, call.name)
    messages = []
    for turn in turns:
        message: dict[str, Any] = {"role": turn.role, "content": turn.content}
        if turn.calls:
            message["tool_calls"] = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in turn.calls
            ]
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if turn.role == "tool":
            message |= {"tool_call_id": turn.call_id, "name": names.get(turn.call_id, "")}
        messages.append(message)
    return messages


def _template_of(tokenizer: Any) -> str:
    """The text of the chat template, or of all of them: some models have a separate one for tools."""
    template = tokenizer.chat_template or ""
    return template if isinstance(template, str) else "\n".join(template.values())


def _begins_thought(tokenizer: Any, options: dict[str, Any]) -> bool:
    messages = [{"role": "user", "content": ""}]
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    except Exception:  # templates raise errors of their own
        return False
    return text.rstrip().endswith(THINK)


def _calls_of(template: str) -> CallFormat | None:
    if "<function=" in template or "[ARGS]" in template:  # calls are not in JSON
        return None
    if HERMES.opening in template:
        return HERMES
    if MISTRAL.opening in template:
        return MISTRAL
    is_llama = LLAMA.opening in template or ("ipython" in template and '"parameters"' in template)
    return LLAMA if is_llama else None
