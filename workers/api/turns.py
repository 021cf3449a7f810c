"""Read the messages of a conversation."""

import json
from typing import Any, cast

from csattn.checks import lone_surrogate
from workers.api.errors import quoted
from workers.api.fields import Fields, shown_value
from workers.api.tools import read_calls
from workers.serving.messages import ToolCall, Turn
from workers.settings import LimitSettings

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
MAX_OPTIONS, MAX_OPTION_CHARS = 16, 4096
# what a template gets anyway, and arguments of transformers' apply_chat_template
RESERVED = {
    "add_generation_prompt", "bos_token", "chat_template", "continue_final_message", "conversation", "documents",
    "eos_token", "max_length", "messages", "pad_token", "padding", "return_assistant_tokens_mask", "return_dict",
    "return_tensors", "tokenize", "tokenizer_kwargs", "tools", "truncation", "unk_token",
}  # fmt: skip
# fields of an assistant's message that OpenAI's Agents SDK for JavaScript also puts into its text
REPEATED = ("reasoning_content", "refusal", "role", "tool_calls")
# in place of what a tool returned: clients send it with all later turns, so that a refusal would end the conversation
UNREAD = "[{}: not shown, because this service reads only text]"
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def read_turns(fields: Fields, limits: LimitSettings) -> tuple[Turn, ...]:
    """Read `messages`."""
    most_chars = limits.max_question_chars
    turns = tuple(_turn(item, f"messages[{index}].", most_chars) for index, item in enumerate(fields.items("messages")))
    require_turns(turns, fields, "messages", most_chars)
    return turns


def read_template(fields: Fields) -> dict[str, Any]:
    """Read `chat_template_kwargs` and `reasoning_effort` into an Ask's fields. The decoding side checks whether the
    model's template knows them."""
    options = fields.any_of("chat_template_kwargs")
    if options is None:
        options = {}
    if not isinstance(options, dict) or len(options) > MAX_OPTIONS:
        fields.refuse("chat_template_kwargs", f"is not an object of at most {MAX_OPTIONS} names and their values")
    text = json.dumps(options, ensure_ascii=False)
    if len(text) > MAX_OPTION_CHARS or lone_surrogate(text) is not None:
        fields.refuse("chat_template_kwargs", f"has more than {MAX_OPTION_CHARS} characters, or half a surrogate pair")
    for name in options:
        if not name.isidentifier() or len(name) > 64:
            fields.refuse("chat_template_kwargs", f"has {quoted(name)}, which is not a name that a template can use")
        if name in RESERVED:
            fields.refuse("chat_template_kwargs", f"has {name}, which the service itself passes to the template")
    return {"template_options": options, "reasoning_effort": fields.choice("reasoning_effort", EFFORTS)}


def require_turns(turns: tuple[Turn, ...], fields: Fields, name: str, most_chars: int) -> None:
    """Refuse turns that are too long together, and a tool's message that answers no earlier call."""
    num_chars = sum(len(turn.content) + len(turn.reasoning) + len(str(turn.calls)) - 2 for turn in turns)
    if num_chars > most_chars:
        fields.refuse(name, f"may have {most_chars} characters in all, got {num_chars}")
    called: set[str] = set()
    for turn in turns:
        if turn.role == "tool" and turn.call_id not in called:
            fields.refuse(name, "must not answer a tool call that no earlier message has made")
        called |= {call.call_id for call in turn.calls}


def require_answerable(turns: tuple[Turn, ...], fields: Fields, name: str, hint: str = "") -> None:
    if turns[-1].role not in ("user", "tool"):
        fields.refuse(name, f"must end with one of role user or tool, got one of role {turns[-1].role}{hint}")


def read_continues(fields: Fields, turns: tuple[Turn, ...], speaks_next: bool | None) -> bool:
    """Read `continue_final_message`, as in vLLM. speaks_next: the value of `add_generation_prompt`."""
    if not fields.flag("continue_final_message"):
        return False
    if turns[-1].role != "assistant" or turns[-1].calls:
        fields.refuse("continue_final_message", "is true, but the last message is not the text of an assistant")
    if speaks_next:
        fields.refuse("add_generation_prompt", "is true, and so is continue_final_message; set one of them")
    return True


def read_speaks_next(fields: Fields) -> bool | None:
    """Read `add_generation_prompt`; None if it is absent."""
    value = fields.any_of("add_generation_prompt")
    if value is not None and type(value) is not bool:
        fields.refuse("add_generation_prompt", f"is {shown_value(value)}, wanted true or false")
    return value


def _turn(value: object, where: str, most_chars: int) -> Turn:
    fields = Fields(value, where)
    role = fields.choice("role", tuple(ROLES))
    if role is None:
        fields.refuse("role", f"is missing, wanted one of {', '.join(ROLES)}")
    calls: tuple[ToolCall, ...] = ()
    call_id = reasoning = ""
    fields.ignore("name", "cache_control")
    fields.only("annotations", [], why="they are not read here")
    if role == "assistant":  # fields of an answer that OpenAI's client sends back
        calls = read_calls(fields)
        reasoning = fields.text("reasoning_content", most_chars) or ""
    elif role == "tool":
        call_id = fields.needed_text("tool_call_id", 256)
    else:
        fields.only("tool_calls", [], why="only an assistant calls tools")
    repeats = REPEATED if role == "assistant" else ()
    unread = ("image_url", "file") if role == "tool" else ()
    content = content_of(fields, most_chars, is_needed=role != "assistant", ignored=repeats, unread=unread)
    fields.finish()
    return Turn(cast(Any, ROLES[role]), content, calls, call_id, reasoning)


def content_of(
    fields: Fields,
    most_chars: int,
    is_needed: bool = True,
    kinds: tuple[str, ...] = ("text",),
    name: str = "content",
    ignored: tuple[str, ...] = (),
    unread: tuple[str, ...] = (),  # kinds of parts for which a line says that they are not shown
) -> str:
    """Read a field: text, or a list of text parts, which become lines as in vLLM and llama.cpp."""
    value = fields.any_of(name)
    if value is None and not is_needed:
        return ""
    if not isinstance(value, list):
        return Fields({name: value}, fields.where).needed_text(name, most_chars)
    texts = []
    for index, item in enumerate(value):
        part = Fields(item, f"{fields.where}{name}[{index}].")
        kind = part.any_of("type")
        if kind in unread:
            texts.append(UNREAD.format("image" if "image" in kind else "file"))
            continue
        if kind not in kinds:
            part.refuse("type", f'is {shown_value(kind)}, wanted "{kinds[0]}": only text is read here')
        texts.append(part.needed_text("text", most_chars))
        part.ignore("annotations", "cache_control", "citations", "logprobs", *ignored)
        part.finish()
    if not texts and is_needed:
        fields.refuse(name, "is an empty list, wanted text")
    return "\n".join(texts)
