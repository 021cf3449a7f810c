"""Turns prompts and conversations into token ids, and computes how many new tokens may follow."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.artifact import Artifact
from csattn.errors import ArtifactMismatchError, CsattnError, ModelError
from csattn.models.prompt import conversation_ids, question_ids, text_ids
from workers.serving.chat_template import ChatTemplate, messages_of, tool_specs
from workers.serving.messages import Ask, BadRequestError, ContextTooLongError, Conversation, TokenizeAsk, Tokens, Turn

_MAX_MESSAGE_CHARS = 200  # characters of a template's error message


def prompt_ids(tokenizer: Any, artifact: Artifact, ask: Ask) -> list[int]:
    """Return the token ids that follow the artifact's. A single user turn gives the ids of `csattn generate`.

    Takes milliseconds for each thousand tokens of the context, and may run on any thread. Raises BadRequestError for
    a prompt that cannot follow the context.
    """
    wrapping = artifact.manifest.build_notes.get("wrapping", "none")
    if isinstance(ask.prompt, tuple):
        return list(ask.prompt)
    context = artifact.token_ids
    try:
        if ask.prompt is not None or wrapping == "none":
            text = _only_turn(ask) if ask.prompt is None else ask.prompt
            return question_ids(tokenizer, context, text, "none").tolist()  # type: ignore[no-any-return]
        with _template_errors(ask.field):
            turns, tools = messages_of(ask.turns), tool_specs(ask.tools)
            ids = conversation_ids(tokenizer, context, turns, wrapping, tools, _options(ask))
        return _require_some(ids.tolist(), ask)
    except (ArtifactMismatchError, ModelError) as error:
        raise BadRequestError(str(error), ask.field) from error


def whole_ids(tokenizer: Any, ask: Ask) -> list[int]:
    """Return all token ids of a request that names no context; the model's chat template renders a conversation."""
    if isinstance(ask.prompt, tuple):
        return list(ask.prompt)
    if ask.prompt is not None:
        ids = text_ids(tokenizer, ask.prompt)
    else:
        ids = tokenizer(_rendered(tokenizer, ask), add_special_tokens=False).input_ids
    return _require_some(ids, ask)


def head_ids(tokenizer: Any, ask: Ask) -> NDArray[np.int32]:
    """Return the token ids of another conversation with the same system message, if any, and the same tools. The head
    of a prompt is what it has in common with them. Without a conversation, there are none."""
    if ask.prompt is not None:
        return np.zeros(0, np.int32)
    system = ask.turns[:1] if ask.turns[0].role == "system" else ()
    with suppress(BadRequestError):  # a template may refuse an empty message
        return np.asarray(
            whole_ids(tokenizer, replace(ask, turns=(*system, Turn("user", "")), continues=False)), np.int32
        )
    return np.zeros(0, np.int32)


def tokenize(tokenizer: Any, template: ChatTemplate, ask: TokenizeAsk, max_positions: int) -> Tokens:
    """Tokenise a text or a conversation by itself, without any context."""
    text, adds_special = ask.text, ask.add_special_tokens
    if text is None:
        ask = template.with_effort(ask)
        template.require(ask)
        text = _rendered(tokenizer, ask, ask.add_generation_prompt)
        adds_special = False  # the template has added them
    ids = tokenizer(text, add_special_tokens=adds_special).input_ids
    return Tokens(ids=tuple(ids), texts=tuple(tokenizer.convert_ids_to_tokens(ids)), max_positions=max_positions)


def _require_some(ids: list[int], ask: Ask) -> list[int]:
    """Return the ids, if any; a request needs a token to feed. Raises BadRequestError for an empty prompt."""
    if not ids:
        raise BadRequestError("the prompt has no tokens; send some text", ask.field)
    return ids


def _rendered(tokenizer: Any, ask: Conversation, speaks_next: bool = True) -> str:
    """Render a conversation with the model's chat template."""
    if not tokenizer.chat_template:
        raise BadRequestError("this service's model has no chat template; send a prompt", ask.field)
    options = {"tools": tool_specs(ask.tools), "add_generation_prompt": speaks_next, **_options(ask)}
    turns = _as_built(ask.turns)
    with _template_errors(ask.field):
        try:
            text: str = tokenizer.apply_chat_template(messages_of(turns), tokenize=False, **options)
        except Exception:  # a template's own
            if (joined := _joined(turns)) == turns:
                raise
            text = tokenizer.apply_chat_template(messages_of(joined), tokenize=False, **options)
    return text


def _joined(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """Join what agents send in a row and some templates refuse: system messages, and the user's, to which a system
    message between others then belongs. A conversation that goes on keeps its beginning."""
    joined: list[Turn] = []
    for turn in turns:
        before = joined[-1] if joined else None
        if turn.role == "system" and before is not None and before.role != "system":
            turn = replace(turn, role="user")
        if before is not None and before.role == turn.role and turn.role in ("system", "user"):
            joined[-1] = replace(before, content=f"{before.content}\n\n{turn.content}")
        else:
            joined.append(turn)
    return tuple(joined)


def _as_built(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """Strip a leading system message, as builds strip a context's text, so that the prompt finds a built context."""
    if turns and turns[0].role == "system":
        return (replace(turns[0], content=turns[0].content.strip()), *turns[1:])
    return turns


def _options(ask: Conversation) -> dict[str, Any]:
    """The template's variables besides messages and tools."""
    ending = {"add_generation_prompt": False, "continue_final_message": True} if ask.continues else {}
    return {**ending, **ask.template_options}


def text_of_ids(tokenizer: Any, ids: tuple[int, ...]) -> str:
    require_tokens(tokenizer, ids, "tokens")
    text: str = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return text


def require_known_tokens(tokenizer: Any, ask: Ask) -> None:
    """Check the token ids in all fields of a request."""
    if isinstance(ask.prompt, tuple):
        require_tokens(tokenizer, ask.prompt, "prompt")
    require_tokens(tokenizer, (token_id for token_id, _ in ask.sampling.logit_bias), "logit_bias")
    require_tokens(tokenizer, ask.sampling.stop_token_ids, "stop_token_ids")


def require_tokens(tokenizer: Any, ids: Iterable[int], field: str) -> None:
    """Raise BadRequestError for ids that no token has."""
    if (greatest := max(ids, default=0)) >= len(tokenizer):
        raise BadRequestError(
            f"{field} has the token id {greatest}, and the model's ids are below {len(tokenizer)}", field
        )


def require_embedded(ids: Iterable[int], vocab_size: int, field: str) -> None:
    """Raise BadRequestError for tokens without an embedding in the model, which some tokenizers have.

    A step with such a token would fail for all its rows.
    """
    if (greatest := max(ids, default=0)) >= vocab_size:
        raise BadRequestError(
            f"{field} has the token id {greatest}, and the model's embedding has ids below {vocab_size}; leave it out",
            field,
        )


@contextmanager
def _template_errors(field: str) -> Iterator[None]:
    """Convert errors of a chat template, which may be of any class, to BadRequestError."""
    try:
        yield
    except (CsattnError, OSError, MemoryError):  # not about the messages: a template is compiled at its first use
        raise
    except Exception as error:
        message = str(error)[:_MAX_MESSAGE_CHARS]
        raise BadRequestError(f"the model's chat template refuses these messages: {message}", field) from error


def room_for(ask: Ask, context_len: int, question_len: int, max_positions: int, tail_capacity: int) -> int:
    """Return the number of new tokens: as requested, limited by positions and by the tail's capacity.

    The last token is never fed back, so it needs no row. Raises ContextTooLongError if there is no room for one token.
    """
    positions = max_positions - context_len - question_len
    rows = tail_capacity - question_len + 1
    room = min(positions, rows)
    if room < 1:
        raise ContextTooLongError(_too_long(context_len, question_len, max_positions, tail_capacity), ask.field)
    return min(ask.sampling.max_new_tokens, room)


def _too_long(context_len: int, question_len: int, max_positions: int, tail_capacity: int) -> str:
    if context_len + question_len >= max_positions:
        what, fewer = f"it has {question_len}", "shorten it"
        if context_len:
            what, fewer = f"context and question have {context_len} and {question_len}", "ask a shorter question"
        # agents look for "prompt is too long" or "maximum context length is 8192 tokens", and compact what they send
        return (
            f"the prompt is too long: {what} tokens, and this model's maximum context length is {max_positions} "
            f"tokens, with the answer; {fewer}"
        )
    what, fewer = ("question", "ask a shorter one") if context_len else ("prompt", "shorten it")
    return (
        f"the {what} is too long: it has {question_len:,} tokens, and this service has room for {tail_capacity + 1:,} "
        f"of {what} and answer together; {fewer}"
    )


def _only_turn(ask: Ask) -> str:
    got = f"{len(ask.turns)} messages" if len(ask.turns) > 1 else "template options"
    got = "tools" if ask.tools else "an answer to continue" if ask.continues else got
    if len(ask.turns) > 1 or ask.tools or ask.continues or ask.template_options:
        raise BadRequestError(
            f"this context was built without a chat template, so it takes a single user message, got {got}; send one, "
            "or a prompt",
            ask.field,
        )
    return ask.turns[0].content
