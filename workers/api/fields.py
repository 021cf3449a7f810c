"""Read the fields of a JSON object one by one, checking types and bounds; every error names its field."""

import difflib
import json
from typing import Any, NoReturn

from csattn.checks import lone_surrogate
from workers.api.errors import quoted
from workers.serving.messages import BadRequestError

_HALF = "holds half a surrogate pair (\\ud800 to \\udfff), which is no text"
MIN_SIMILARITY = 0.75  # of 1: from it on, a known field is suggested; cache_prompt must not suggest cache_salt
KINDS: dict[type, str] = {
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


class Fields:
    """A JSON object from a client. A null field counts as absent, as with OpenAI; unread fields are refused."""

    def __init__(self, value: object, where: str = "") -> None:
        """where: prefix of each field's name in errors, such as `messages[0].`."""
        if not isinstance(value, dict):
            name = where.rstrip(".") or "the body"
            raise BadRequestError(f"{name} is {kind_of(value)}, wanted an object", where.rstrip(".") or None)
        self._left: dict[str, Any] = {key: item for key, item in value.items() if item is not None}
        self.where = where
        self._known: set[str] = set()
        self._unwanted: set[str] = set()  # those of them that are never suggested

    def text(self, name: str, most_chars: int) -> str | None:
        value = self.any_of(name)
        if value is None:
            return None
        return self._checked_text(name, value, most_chars)

    def needed_text(self, name: str, most_chars: int) -> str:
        value = self.text(name, most_chars)
        if value is None:
            self.refuse(name, "is missing, wanted text")
        return value

    def whole(self, name: str, lowest: int, highest: int) -> int | None:
        value = self.any_of(name)
        if value is None:
            return None
        if type(value) is not int:  # true is an int to Python, not to a client
            self.refuse(name, f"is {shown_value(value)}, wanted a whole number from {lowest} to {highest}")
        if not lowest <= value <= highest:
            self.refuse(name, f"must lie between {lowest} and {highest}, got {quoted(value)}")
        return value

    def number(self, name: str, lowest: float, highest: float, *, above: bool = False) -> float | None:
        """`above`: the lowest value itself is not allowed."""
        value = self.any_of(name)
        if value is None:
            return None
        bounds = f"{'more than' if above else 'at least'} {lowest:g} and at most {highest:g}"
        if type(value) not in (int, float):
            self.refuse(name, f"is {shown_value(value)}, wanted a number of {bounds}")
        if not (lowest < value if above else lowest <= value) or not value <= highest:
            self.refuse(name, f"must be {bounds}, got {quoted(value)}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean field; the default if it is absent."""
        value = self.any_of(name)
        if value is None:
            return default
        if type(value) is not bool:
            self.refuse(name, f"is {shown_value(value)}, wanted true or false")
        return value

    def choice(self, name: str, allowed: tuple[str, ...]) -> str | None:
        value = self.any_of(name)
        if value is None:
            return None
        if not isinstance(value, str) or value not in allowed:
            self.refuse(name, f"is {shown_value(value)}, wanted one of {', '.join(allowed)}")
        return value

    def texts(self, name: str, most: int, most_chars: int) -> tuple[str, ...]:
        """Return a field with one text, or with a list of at most `most`."""
        value = self.any_of(name)
        if value is None:
            return ()
        items = value if isinstance(value, list) else [value]
        if len(items) > most:
            self.refuse(name, f"has {len(items)} entries, wanted at most {most}")
        return tuple(self._checked_text(name, item, most_chars) for item in items)

    def items(self, name: str) -> list[Any]:
        """Return a required list of one entry or more."""
        value = self.any_of(name)
        if not isinstance(value, list) or not value:
            came = "missing" if value is None else "an empty list" if value == [] else shown_value(value)
            self.refuse(name, f"is {came}, wanted a list of one entry or more")
        return value

    def listed(self, name: str, most: int) -> list[Any]:
        """Return a list of at most `most` entries; an empty one if it is absent."""
        value = self.any_of(name)
        if value is None:
            return []
        if not isinstance(value, list) or len(value) > most:
            self.refuse(name, f"is not a list of at most {most} entries")
        return value

    def inner(self, name: str) -> "Fields | None":
        value = self.any_of(name)
        return None if value is None else Fields(value, f"{self.where}{name}.")

    def any_of(self, name: str) -> Any:
        """Return the value as it came, unchecked."""
        self._known.add(name)
        return self._left.pop(name, None)

    def ignore(self, *names: str) -> None:
        """Drop fields that cannot change an answer."""
        for name in names:
            self.any_of(name)
        self._unwanted.update(names)

    def only(self, name: str, *neutral: Any, why: str) -> None:
        """Refuse a field, for the reason `why`, unless it is absent or has a neutral value."""
        value = self.any_of(name)
        self._unwanted.add(name)
        if value is not None and not any(type(value) is type(item) and value == item for item in neutral):
            self.refuse(name, f"is {shown_value(value)}: {why}")

    def finish(self) -> None:
        """Refuse all fields that were not read."""
        for name in self._left:
            near = difflib.get_close_matches(name[:64], sorted(self._known - self._unwanted), 1, MIN_SIMILARITY)
            meant = f"; did you mean {near[0]}?" if near else ""
            self.refuse(quoted(name)[1:-1], f"is not a field that this service knows{meant}")

    def require_text_within(self, name: str, value: object) -> None:
        """Refuse JSON that is passed on unread if a text in it has a lone surrogate."""
        if lone_surrogate(json.dumps(value, ensure_ascii=False)) is not None:
            self.refuse(name, _HALF)

    def refuse(self, name: str, what: str) -> NoReturn:
        raise BadRequestError(f"{self.where}{name} {what}", f"{self.where}{name}")

    def _checked_text(self, name: str, value: object, most_chars: int) -> str:
        if not isinstance(value, str):
            self.refuse(name, f"is {shown_value(value)}, wanted text")
        if len(value) > most_chars:
            self.refuse(name, f"has {len(value)} characters, wanted at most {most_chars}")
        if lone_surrogate(value) is not None:
            self.refuse(name, _HALF)
        return value


def kind_of(value: object) -> str:
    return KINDS.get(type(value), "of another type")


def shown_value(value: object) -> str:
    """Return how an error shows a value: its kind if it is a list or an object, else the value itself."""
    return kind_of(value) if isinstance(value, dict | list) else quoted(value)
