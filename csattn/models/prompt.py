"""Token ids of a context and of conversations that continue it: the context's ids stay a prefix."""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from csattn.config import IndexConfig, ListConfig
from csattn.errors import ArtifactMismatchError, ContextError, ModelError
from csattn.models.hub import first_line
from csattn.models.loader import LoadedModel

# How the chat template wraps the context: as the system message, inside the first user message, or not at all.
Wrapping = Literal["system", "user", "none"]
MIN_CONTEXT_LEN = 256  # fewer rows are cheaper to attend to than to index
_CHARS_LOOKED_AT = 8  # characters tokenised for each of the model's positions
_PROBE = "⟨context⟩"
_BETWEEN = "\n"  # separates context and question if both are in one message


def choose_wrapping(tokenizer: Any, chat: bool = True) -> Wrapping:
    """Return the first wrapping that the chat template renders as a fixed prefix; `none` without a template."""
    if not chat or not tokenizer.chat_template:
        return "none"
    fault = ""
    for wrapping in ("system", "user"):
        try:
            first, second = (_render(tokenizer, wrapping, question) for question in ("a", "b"))
            separator = _separator(tokenizer, wrapping)
        except Exception as error:  # templates raise their own errors for unknown roles
            fault = f"cannot be used ({first_line(error)})"
            continue
        before, _, after = first.partition(_PROBE)
        same_start = second.startswith(before + _PROBE)
        if same_start and after.startswith(separator) and _PROBE not in after:
            return wrapping
        fault = "does not write the unchanged context exactly once before the question, in the same way each time"
    raise ModelError(
        f"the model's chat template {fault}, so a prefilled context cannot be shared; build with --no-chat"
    )


def context_ids(tokenizer: Any, text: str, wrapping: Wrapping) -> NDArray[np.int32]:
    """Return the token ids to prefill: the context, wrapped as later turns will continue it.

    Raises ModelError if no question could follow them: better before the prefill than after it.
    """
    if wrapping == "none":
        return np.asarray(text_ids(tokenizer, text), dtype=np.int32)
    whole = _before(tokenizer, wrapping) + text.strip() + _separator(tokenizer, wrapping)
    ids = np.asarray(tokenizer(whole, add_special_tokens=False).input_ids, dtype=np.int32)
    try:
        question_ids(tokenizer, ids, "?", wrapping)
    except ArtifactMismatchError as error:
        raise ModelError(
            "the model's tokenizer splits this context differently when a question follows it, so a prefilled "
            "context cannot be shared; build with --no-chat"
        ) from error
    return ids


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text that other tokens will continue, without an end token that the tokenizer adds."""
    ids: list[int] = tokenizer(text).input_ids
    end = [tokenizer.eos_token_id]
    is_added = ids[-1:] == end and tokenizer(text, add_special_tokens=False).input_ids[-1:] != end
    return ids[:-1] if is_added else ids


def num_special(tokenizer: Any, text: str) -> int:
    """Return how many special tokens, such as the end of a message, the tokenizer reads in a text."""
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} - {tokenizer.unk_token_id}
    return sum(i in special for i in tokenizer(text, add_special_tokens=False).input_ids)


def shortest_context(config: IndexConfig) -> int:
    """Return the fewest tokens that a context with this index has."""
    return max(MIN_CONTEXT_LEN, config.num_centroids) if isinstance(config, ListConfig) else MIN_CONTEXT_LEN


def require_indexable(token_ids: NDArray[np.int32], config: IndexConfig, loaded: LoadedModel) -> None:
    """Raise ContextError if these tokens [context_len] cannot be a context of the model."""
    context_len, model, shortest = len(token_ids), loaded.geometry, shortest_context(config)
    if context_len < shortest:
        raise ContextError(
            f"the context has {context_len} tokens, an index needs at least {shortest}; put a context this short into "
            "the prompt instead"
        )
    if context_len >= model.max_positions:
        raise _too_long(str(context_len), loaded)
    if (greatest := int(token_ids.max())) >= model.vocab_size:
        raise ContextError(
            f"the context has the token id {greatest}, and the model's embedding has ids below {model.vocab_size}; "
            "tokenize it with the tokenizer that the model was saved with"
        )


def require_not_far_too_long(text: str, loaded: LoadedModel) -> None:
    """Raise ContextError for a text far longer than the model's positions, judged by its beginning.

    Tokens of the whole text might not fit in memory.
    """
    most = loaded.geometry.max_positions
    text = text.strip()  # as `context_ids` does; builds without a template count the spaces, too
    start = text[: _CHARS_LOOKED_AT * most]
    if len(start) < len(text):
        num_tokens = len(loaded.tokenizer(start, add_special_tokens=False).input_ids)
        if num_tokens > 1.25 * most:  # the cut may have changed a few tokens
            raise _too_long(f"more than {most}", loaded)


def _too_long(num_tokens: str, loaded: LoadedModel) -> ContextError:
    return ContextError(
        f"the context has {num_tokens} tokens and {loaded.name} has {loaded.geometry.max_positions} positions, of "
        "which the question needs at least one; shorten the context or use a model with more positions"
    )


def question_ids(tokenizer: Any, prefix: NDArray[np.int32], question: str, wrapping: Wrapping) -> NDArray[np.int32]:
    """Return the ids of a question that follow the prefilled ones.

    Raises ArtifactMismatchError if context and question together would not tokenise to a continuation.
    """
    if wrapping == "none":
        rest = tokenizer(question, add_special_tokens=False).input_ids
        if not rest:
            raise ModelError("the prompt is empty; give at least one token")
        return np.asarray(rest, dtype=np.int32)
    return conversation_ids(tokenizer, prefix, [{"role": "user", "content": question}], wrapping)


def conversation_ids(
    tokenizer: Any,
    prefix: NDArray[np.int32],
    turns: list[dict[str, Any]],
    wrapping: Wrapping,
    tools: list[dict[str, Any]] | None = None,
    options: dict[str, Any] | None = None,
) -> NDArray[np.int32]:
    """Return the ids of a conversation about the context that follow the prefilled ones.

    They end where the model speaks, unless `continue_final_message` is among the options.

    turns: role and content of each, as chat templates take them; the model answers the last one.
    tools, options (such as `enable_thinking`): as chat templates take them.

    Not for the wrapping `none`. If the context is in the first user message, system turns before that message are
    placed in it, after the context. If the template writes tools before or inside the context's own message, the
    context remains a system message without tools, and the conversation with its tools is written after it.
    Raises ArtifactMismatchError if context and turns together would not tokenise to a continuation.
    """
    options = options or {}
    before, between, after = _render_turns(tokenizer, wrapping, turns, tools, options).partition(_PROBE)
    separator = _separator(tokenizer, wrapping)
    follows = between and after.startswith(separator) and before == _before(tokenizer, wrapping)
    if not follows and tools and wrapping == "system":
        text = _apply(tokenizer, turns, tools, options).removeprefix(tokenizer.bos_token or "")
    elif follows:
        text = after.removeprefix(separator)
    else:
        raise ArtifactMismatchError(
            "the model's chat template does not put these messages after the context; send one user message, or "
            "user and assistant messages in turn"
            + (", or leave out tools" if tools else "")
            + (", or give the template no options" if options else "")
        )
    return np.asarray(_continue(tokenizer, prefix, text), dtype=np.int32)


def _continue(tokenizer: Any, prefix: NDArray[np.int32], text: str) -> list[int]:
    """Return the ids of a text that follows the prefix.

    A tokenizer first splits text at special tokens, so only the prefix from its last special token on has to be
    tokenised again.
    """
    added = tokenizer.added_tokens_decoder.items()
    special = [i for i, token in added if token.special and not token.normalized]
    last = np.flatnonzero(np.isin(prefix, special))[-1:].tolist()  # the position of the last one, or empty
    for start in dict.fromkeys([*last, 0]):
        known = prefix[start:]
        for before in _texts_of(tokenizer, known, special):
            ids: list[int] = tokenizer(before + text, add_special_tokens=False).input_ids
            if ids[: len(known)] == known.tolist():
                return ids[len(known) :]
    raise ArtifactMismatchError(
        "this question would change the tokens of the context it follows; ask it differently, or rebuild the "
        "artifact with --no-chat"
    )


def _texts_of(tokenizer: Any, ids: NDArray[np.int32], special: list[int]) -> Iterator[str]:
    """Yield texts that may have been tokenised to these ids.

    Older tokenizers of Llama and Mistral put a space before a word, and their decoders remove it only at the start of a
    text, not after a special token.
    """
    yield tokenizer.decode(ids)
    if len(ids) and int(ids[0]) in special:
        yield tokenizer.decode(ids[:1]) + tokenizer.decode(ids[1:])


def _render(tokenizer: Any, wrapping: str, question: str) -> str:
    return _render_turns(tokenizer, wrapping, [{"role": "user", "content": question}])


def _render_turns(
    tokenizer: Any,
    wrapping: str,
    turns: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    options: dict[str, Any] | None = None,
) -> str:
    """Render the conversation by the chat template, with a probe in the context's place."""
    if wrapping == "system":
        messages = [{"role": "system", "content": _PROBE}, *turns]
    else:
        first = next((i for i, turn in enumerate(turns) if turn["role"] == "user"), 0)
        if any(turn["role"] == "assistant" for turn in turns[: first + 1]):
            raise ArtifactMismatchError(
                "the context is in the first user message here, and these messages have none before the assistant's; "
                "send one before it"
            )
        opening = _BETWEEN.join([_PROBE, *(turn["content"] for turn in turns[: first + 1])])
        messages = [{"role": "user", "content": opening}, *turns[first + 1 :]]
    return _apply(tokenizer, messages, tools, options or {})


def _apply(
    tokenizer: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, options: dict[str, Any]
) -> str:
    options = {"tokenize": False, "add_generation_prompt": True, **options}
    return tokenizer.apply_chat_template(messages, tools=tools, **options)  # type: ignore[no-any-return]


def _before(tokenizer: Any, wrapping: str) -> str:
    """Return what the template writes before the context."""
    return _render(tokenizer, wrapping, "").partition(_PROBE)[0]


def _separator(tokenizer: Any, wrapping: str) -> str:
    """Return what is between the context and the question's turn (system), or the question itself (user)."""
    if wrapping == "user":
        return _BETWEEN
    try:
        alone = tokenizer.apply_chat_template([{"role": "system", "content": _PROBE}], tokenize=False)
    except Exception:  # the template requires a question: a user message ends the same way, or it is refused
        alone = tokenizer.apply_chat_template([{"role": "user", "content": _PROBE}], tokenize=False)
    return alone.partition(_PROBE)[2]  # type: ignore[no-any-return]
