"""Token ids of a context and of the turns that continue it, so that the one is a prefix of the other."""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from csattn.config import IndexConfig, ListConfig
from csattn.errors import ArtifactMismatchError, ContextError, ModelError
from csattn.models.hub import first_line
from csattn.models.loader import LoadedModel

# How the context is wrapped: as the system message, inside the first user message, or not at all.
Wrapping = Literal["system", "user", "none"]
MIN_CONTEXT_LEN = 256  # fewer rows are cheaper to attend to than to index
_CHARS_LOOKED_AT = 8  # for each of the model's positions
_PROBE = "⟨context⟩"
_BETWEEN = "\n"  # separates context and question where both stand in one message


def choose_wrapping(tokenizer: Any, chat: bool = True) -> Wrapping:
    """The first wrapping that this tokenizer's chat template renders as a fixed prefix; `none` without a template."""
    if not chat or not tokenizer.chat_template:
        return "none"
    fault = ""
    for wrapping in ("system", "user"):
        try:
            first, second = (_render(tokenizer, wrapping, question) for question in ("a", "b"))
            separator = _separator(tokenizer, wrapping)
        except Exception as error:  # templates raise errors of their own for roles they do not know
            fault = f"cannot be used ({first_line(error)})"
            continue
        before, _, after = first.partition(_PROBE)
        same_start = second.startswith(before + _PROBE)
        if same_start and after.startswith(separator) and _PROBE not in after:
            return wrapping
        fault = "does not write the context as it is, once, before the question, each time alike"
    raise ModelError(
        f"the model's chat template {fault}, so a prefilled context cannot be shared; build with --no-chat"
    )


def context_ids(tokenizer: Any, text: str, wrapping: Wrapping) -> NDArray[np.int32]:
    """The token ids to prefill: the context as later turns will continue it.

    Raises ModelError where no question could follow them: better now than when all of it has been prefilled.
    """
    if wrapping == "none":
        ids, end = tokenizer(text).input_ids, [tokenizer.eos_token_id]
        if ids[-1:] == end and tokenizer(text, add_special_tokens=False).input_ids[-1:] != end:
            ids = ids[:-1]  # of tokenizers that add an end, behind which a question would follow nothing
        return np.asarray(ids, dtype=np.int32)
    whole = _before(tokenizer, wrapping) + text.strip() + _separator(tokenizer, wrapping)
    ids = np.asarray(tokenizer(whole, add_special_tokens=False).input_ids, dtype=np.int32)
    try:
        question_ids(tokenizer, ids, "?", wrapping)
    except ArtifactMismatchError as error:
        raise ModelError(
            "the model's tokenizer cuts this context differently when a question follows it, so a prefilled context "
            "cannot be shared; build with --no-chat"
        ) from error
    return ids


def num_special(tokenizer: Any, text: str) -> int:
    """How often a text holds what the tokenizer reads as special tokens, the end of a message, say."""
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} - {tokenizer.unk_token_id}
    return sum(i in special for i in tokenizer(text, add_special_tokens=False).input_ids)


def require_indexable(token_ids: NDArray[np.int32], config: IndexConfig, loaded: LoadedModel) -> None:
    """Raise ContextError where these tokens [context_len] can be no context of the model."""
    context_len, model = len(token_ids), loaded.geometry
    shortest = max(MIN_CONTEXT_LEN, config.num_centroids) if isinstance(config, ListConfig) else MIN_CONTEXT_LEN
    if context_len < shortest:
        raise ContextError(
            f"the context has {context_len} tokens, an index needs at least {shortest}; "
            "a context this short is better put into the prompt"
        )
    if context_len >= model.max_positions:
        raise _too_long(str(context_len), loaded)
    if (greatest := int(token_ids.max())) >= model.vocab_size:
        raise ContextError(
            f"the context has the token {greatest}, and the model's embedding has those below {model.vocab_size}; "
            "make its tokens with the tokenizer that the model was saved with"
        )


def require_not_far_too_long(text: str, loaded: LoadedModel) -> None:
    """Refuse by its beginning a text that no model could read: tokens of all of it may be more than memory holds."""
    most = loaded.geometry.max_positions
    text = text.strip()  # as it is read, but in builds without a template, which count all of it
    start = text[: _CHARS_LOOKED_AT * most]
    if len(start) < len(text):
        num_tokens = len(loaded.tokenizer(start, add_special_tokens=False).input_ids)
        if num_tokens > 1.25 * most:  # where it was cut, some few tokens may be others
            raise _too_long(f"more than {most}", loaded)


def _too_long(num_tokens: str, loaded: LoadedModel) -> ContextError:
    return ContextError(
        f"the context has {num_tokens} tokens and {loaded.name} has {loaded.geometry.max_positions} positions, "
        "one at least for the question; shorten the context or use a model with more positions"
    )


def question_ids(tokenizer: Any, prefix: NDArray[np.int32], question: str, wrapping: Wrapping) -> NDArray[np.int32]:
    """The ids that follow the prefilled ones when this question is asked.

    Raises ArtifactMismatchError when context and question together would not tokenise to a continuation.
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
    """The ids that follow the prefilled ones when a conversation about the context goes on; the model speaks next,
    unless `continue_final_message` is among the options.

    turns: role and content of each, as chat templates take them; the model answers the last one. tools, and options,
    such as `enable_thinking`: likewise. Not for the wrapping `none`. Where the context is in the first user message,
    system turns before it follow the context there. Where the template has tools before or within the context's own
    message, the context stays what it is, a system message without tools, and the conversation with its tools is
    written after it.
    Raises ArtifactMismatchError when context and turns together would not tokenise to a continuation.
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
    """The ids of a text that follows the prefix. Text is cut at special tokens before anything else is done with it,
    so what stands before the last of them in the prefix need not be tokenised again."""
    special = _special_ids(tokenizer)
    last = np.flatnonzero(np.isin(prefix, special))[-1:].tolist()  # none, or where it stands
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
    """What the ids may have been made of. Llama's and Mistral's older tokenizers put a space before a word, and their
    decoders take it away at the start of a text only, not behind a special token."""
    yield tokenizer.decode(ids)
    if len(ids) and int(ids[0]) in special:
        yield tokenizer.decode(ids[:1]) + tokenizer.decode(ids[1:])


def _special_ids(tokenizer: Any) -> list[int]:
    """Tokens at which text is cut before anything else is done with it."""
    return [i for i, token in tokenizer.added_tokens_decoder.items() if token.special and not token.normalized]


def _render(tokenizer: Any, wrapping: str, question: str) -> str:
    return _render_turns(tokenizer, wrapping, [{"role": "user", "content": question}])


def _render_turns(
    tokenizer: Any,
    wrapping: str,
    turns: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    options: dict[str, Any] | None = None,
) -> str:
    """The conversation as the template writes it, with a probe where the context is."""
    if wrapping == "system":
        messages = [{"role": "system", "content": _PROBE}, *turns]
    else:
        first = next((i for i, turn in enumerate(turns) if turn["role"] == "user"), 0)
        if turns[first]["role"] == "assistant":
            raise ArtifactMismatchError(
                "the context is in the first user message here, and these messages have none; send one before the "
                "assistant's"
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
    """What the template writes before the context."""
    return _render(tokenizer, wrapping, "").partition(_PROBE)[0]


def _separator(tokenizer: Any, wrapping: str) -> str:
    """What stands between the context and the question's turn, or the question itself."""
    if wrapping == "user":
        return _BETWEEN
    try:
        alone = tokenizer.apply_chat_template([{"role": "system", "content": _PROBE}], tokenize=False)
    except Exception:  # of templates that want a question: there the user's messages end alike, or it is refused
        alone = tokenizer.apply_chat_template([{"role": "user", "content": _PROBE}], tokenize=False)
    return alone.partition(_PROBE)[2]  # type: ignore[no-any-return]
