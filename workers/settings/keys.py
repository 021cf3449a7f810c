"""The settings by key, read off the parts: `server.port` is the field `port` of the part `server`."""

from dataclasses import dataclass, fields, replace
from typing import Any, get_type_hints

from workers.settings.parts import SEARCH_WORDS, Secret, Settings


@dataclass(frozen=True, slots=True)
class Key:
    """One setting."""

    hint: Any  # its type
    default: Any
    words: str  # what it means to a person
    lowest: float | None = None
    highest: float | None = None
    above: float | None = None  # a lowest value that is itself not allowed

    @property
    def is_secret(self) -> bool:
        return bool(self.hint == tuple[Secret, ...])


def _all_keys() -> dict[str, Key]:
    keys = {}
    defaults = Settings()
    for section, part in SECTIONS.items():
        hints = get_type_hints(part)
        for item in fields(part):
            default = getattr(getattr(defaults, section), item.name)
            about = item.metadata or {"words": SEARCH_WORDS[item.name]}
            key = f"{section}.{item.name}"
            keys[key] = Key(hints[item.name], default, **about)
    # 0 or 1 where the settings are loaded, as suits engine.placement
    keys["search.lookahead"] = replace(keys["search.lookahead"], hint=int | None, default=None)
    return keys


SECTIONS: dict[str, Any] = get_type_hints(Settings)
KEYS = _all_keys()
