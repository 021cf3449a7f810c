"""From what was asked to the token ids that follow a context, and how many may follow those."""

from typing import Any

from csattn.artifact import Artifact
from csattn.errors import ArtifactMismatchError, ModelError
from csattn.models.prompt import conversation_ids, question_ids
from workers.serving.messages import Ask, BadRequestError, ContextTooLongError, Turn

_MAX_TOLD = 200  # characters of a template's own message


def prompt_ids(tokenizer: Any, artifact: Artifact, ask: Ask) -> list[int]:
    """The ids that follow the artifact's: a single user turn gives those of `csattn generate`.

    Takes milliseconds for each thousand tokens of the context, and nothing of it needs to be the caller's thread.
    Raises BadRequestError for what cannot follow the context.
    """
    require_content(ask)
    wrapping = artifact.manifest.build_notes.get("wrapping", "none")
    try:
        if ask.prompt is not None:
            return question_ids(tokenizer, artifact.token_ids, ask.prompt, "none").tolist()  # type: ignore[no-any-return]
        if wrapping == "none":
            return question_ids(tokenizer, artifact.token_ids, _only_turn(ask.turns), "none").tolist()  # type: ignore[no-any-return]
        turns = [{"role": turn.role, "content": turn.content} for turn in ask.turns]
        return conversation_ids(tokenizer, artifact.token_ids, turns, wrapping).tolist()  # type: ignore[no-any-return]
    except (ArtifactMismatchError, ModelError) as error:
        raise BadRequestError(str(error), _field_of(ask)) from error
    except Exception as error:  # templates raise errors of their own, of any class
        if not type(error).__module__.startswith("jinja2"):
            raise
        told = str(error)[:_MAX_TOLD]
        raise BadRequestError(f"the model's chat template refuses these messages: {told}", _field_of(ask)) from error


def require_content(ask: Ask) -> None:
    """A request has either messages, the last of them the user's, or a prompt."""
    if (ask.prompt is None) == (not ask.turns):
        raise BadRequestError("a request has either messages or a prompt; give one of them", _field_of(ask))
    if ask.turns and ask.turns[-1].role != "user":
        raise BadRequestError(
            f"the last message is of the role {ask.turns[-1].role!r}; end with a user message, which will be answered",
            "messages",
        )
    for text in [turn.content for turn in ask.turns] or [ask.prompt or ""]:
        require_text(text, _field_of(ask))


def require_text(text: str, field: str) -> bytes:
    """As UTF-8. JSON can write halves of characters, which are no text."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise BadRequestError(
            f"half a character (a lone surrogate) stands at {error.start}; send text", field
        ) from None


def longest_question(tokenizer: Any, num_positions: int) -> int:
    """Characters that no question of that many tokens can exceed: every token's bytes are counted as characters."""
    return num_positions * max(map(len, tokenizer.get_vocab()))


def require_possible(ask: Ask, max_chars: int) -> None:
    """Refuse, before any work, a text that is longer than `longest_question`."""
    num_chars = sum(len(turn.content) for turn in ask.turns) + len(ask.prompt or "")
    if num_chars > max_chars:
        raise ContextTooLongError(
            f"the question has {num_chars:,} characters, and whatever its tokens, the model has no positions for more "
            f"than {max_chars:,}; ask a shorter question",
            _field_of(ask),
        )


def room_for(ask: Ask, context_len: int, question_len: int, max_positions: int, tail_capacity: int) -> int:
    """New tokens: as many as were asked for, or as positions and the request's own rows leave room for.

    The last one is never fed back, so it needs no row.
    """
    positions = max_positions - context_len - question_len
    rows = tail_capacity - question_len + 1
    room = min(positions, rows)
    if room < 1:
        raise ContextTooLongError(
            f"context and question have {context_len:,} and {question_len:,} tokens, the model has {max_positions:,} "
            f"positions and a request {tail_capacity:,} rows of its own; ask a shorter question",
            _field_of(ask),
        )
    return min(ask.sampling.max_new_tokens, room)


def _only_turn(turns: tuple[Turn, ...]) -> str:
    if len(turns) > 1:
        raise BadRequestError(
            "this context was built without a chat template, so it takes a single user message, got "
            f"{len(turns)} messages; send one, or a prompt",
            "messages",
        )
    return turns[0].content


def _field_of(ask: Ask) -> str:
    return "messages" if ask.prompt is None else "prompt"
