"""Text as tokens and back, as vLLM's `/tokenize` and `/detokenize` have it."""

from typing import Any

from workers.api.asking import MAX_TOKEN_ID
from workers.api.fields import Fields
from workers.api.names import context_or_own
from workers.api.tools import read_tools
from workers.api.turns import read_continues, read_speaks_next, read_template, read_turns
from workers.serving.messages import TokenizeAsk, Tokens
from workers.settings import LimitSettings


def read_tokenize(body: object, model: str, limits: LimitSettings) -> tuple[TokenizeAsk, bool]:
    """Of a body for /tokenize; whether the tokens' texts are wanted too."""
    fields = Fields(body)
    _check_model(fields, model)
    wants_texts = fields.flag("return_token_strs")
    text = fields.text("prompt", limits.max_question_chars)
    adds_special = fields.any_of("add_special_tokens")
    if text is not None:
        ask = TokenizeAsk(text=text, add_special_tokens=adds_special is not False)
    else:
        speaks_next, turns = read_speaks_next(fields), read_turns(fields, limits)
        ask = TokenizeAsk(
            turns=turns,
            tools=read_tools(fields)["tools"],
            add_generation_prompt=speaks_next is not False,
            continues=read_continues(fields, turns, speaks_next),
            **read_template(fields),
        )
    fields.finish()
    return ask, wants_texts


def read_detokenize(body: object, model: str) -> tuple[int, ...]:
    """Of a body for /detokenize."""
    fields = Fields(body)
    _check_model(fields, model)
    ids = fields.any_of("tokens")
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i <= MAX_TOKEN_ID for i in ids):
        fields.refuse("tokens", "is not a list of tokens' numbers")
    fields.finish()
    return tuple(ids)


def tokens_object(tokens: Tokens, wants_texts: bool) -> dict[str, Any]:
    """token_strs: as the vocabulary has them."""
    return {
        "count": len(tokens.ids),
        "max_model_len": tokens.max_positions,
        "tokens": tokens.ids,
        "token_strs": tokens.texts if wants_texts else None,
    }


def _check_model(fields: Fields, model: str) -> None:
    """The model itself, or any of its contexts; all have the same tokens."""
    asked = fields.text("model", 256)
    if asked is not None:
        context_or_own(asked, model)
