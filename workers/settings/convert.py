"""Convert written values to the types of settings, and show values in messages."""

from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from workers.settings.parts import Secret, choices

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}
SECRETS, TEXTS = tuple[Secret, ...], tuple[str, ...]
_UNIONS = (Union, UnionType)  # the type of `Literal[...] | None` is the former


def convert(hint: Any, value: Any, *, is_text: bool) -> Any:
    """Convert a value to the type `hint`. Raises ValueError for another type, and ConfigError for an invalid secret.

    is_text: a string stands for a value of any type, as in the environment. An empty one means "not set" if the
    setting allows that.
    """
    if get_origin(hint) in _UNIONS:
        inner, none = get_args(hint)
        assert none is type(None), f"a setting is of one type or not set, not {hint}"
        return None if value is None or (is_text and value == "") else convert(inner, value, is_text=is_text)
    if is_text and isinstance(value, str):
        value = _from_text(hint, value)
    if hint == SECRETS:
        if not isinstance(value, list | tuple) or not all(isinstance(item, str | Secret) for item in value):
            raise ValueError
        return tuple(item if isinstance(item, Secret) else Secret(item) for item in value)
    if hint == TEXTS:
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise ValueError
        return tuple(value)
    if get_origin(hint) is Literal:
        if value not in choices(hint):
            raise ValueError
        return value
    if hint is Path and isinstance(value, str | Path) and str(value) and "\0" not in str(value):
        try:
            return Path(value).expanduser()
        except RuntimeError:  # ~ of an unknown user
            raise ValueError from None
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint or value == "":
        raise ValueError
    return value


def wanted(hint: Any) -> str:
    """Return in words what a setting accepts."""
    if get_origin(hint) in _UNIONS:
        return wanted(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, choices(hint)))}"
    if hint == SECRETS:
        return "a list of keys (in an environment variable: separated by commas)"
    if hint == TEXTS:
        return "a list of texts (in an environment variable: separated by commas)"
    return _WORDS[hint]


def shown(value: object) -> str:
    """Return a value for a message: quoted if it is text, and never long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _from_text(hint: Any, text: str) -> Any:
    if hint is bool:
        if text.lower() not in _TRUE + _FALSE:
            raise ValueError
        return text.lower() in _TRUE
    if hint in (int, float):
        return hint(text)
    if hint in (SECRETS, TEXTS):
        return [part.strip() for part in text.split(",") if part.strip()]
    return text
