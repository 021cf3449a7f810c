"""Flags over environment over file over defaults: one value for each setting, checked, with its origin."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from csattn.build_options import AUTO
from csattn.errors import ConfigError
from workers.settings.convert import SECRETS, convert, shown, wanted
from workers.settings.parts import KEYS, SECTIONS, UNTIL_CHOSEN, Secret, Settings, default_lookahead
from workers.settings.sources import CONFIG_VARIABLE, PREFIX, Leaf, Origin, from_environment, from_file, variable_of


@dataclass(frozen=True, slots=True)
class Loaded:
    """All settings, as an object and by key."""

    settings: Settings
    leaves: Mapping[str, Leaf]  # by key, "server.port"
    file: Path | None  # the one that was read
    left_to_csattn: list[str]  # the settings that are `auto`, which `settings` has as in UNTIL_CHOSEN


def load_settings(file: Path | None, environment: Mapping[str, str], flags: Mapping[str, object]) -> Loaded:
    """Load the settings. Raises ConfigError for an unknown key or a wrong value, with its origin and what is accepted.

    A flag's value is text, as after `--set`, or of the setting's own type; None is a flag that was not given.
    If file is None, CSATTN_CONFIG in the environment may name one.
    """
    if file is None and environment.get(CONFIG_VARIABLE):
        file = Path(environment[CONFIG_VARIABLE])
    leaves = {key: Leaf(spec.default, Origin(kind="default")) for key, spec in KEYS.items()}
    _put(leaves, from_file(file) if file is not None else ())
    _put(leaves, from_environment(environment, KEYS))
    _put(leaves, [(key, Leaf(value, Origin(kind="flag"))) for key, value in flags.items() if value is not None])
    _read_keys(leaves)
    lookahead = leaves["search.lookahead"]
    if lookahead.value is None:
        leaves["search.lookahead"] = Leaf(default_lookahead(leaves["engine.placement"].value), lookahead.origin)
    left = [key for key in UNTIL_CHOSEN if leaves[key].value == AUTO]
    chosen = {key: replace(leaves[key], value=UNTIL_CHOSEN[key]) for key in left}
    return Loaded(_assemble(leaves | chosen), leaves, file, left)


def _put(leaves: dict[str, Leaf], given: Iterable[tuple[str, Leaf]]) -> None:
    """Convert the given values, as they were written, and put them in place of earlier ones."""
    for key, leaf in given:
        if key in SECTIONS and leaf.value in ({}, None):
            continue  # a heading with nothing below it
        if key not in KEYS:
            raise ConfigError(_unknown(key, leaf.origin))
        hint, origin = KEYS[key].hint, leaf.origin
        try:
            value = convert(hint, leaf.value, is_text=origin.kind in ("environment", "flag"))
        except ConfigError as error:
            raise ConfigError(f"{key} ({origin}): {error}") from None
        except ValueError:
            got = "***" if hint == SECRETS else shown(leaf.value)
            raise ConfigError(f"{key} ({origin}) is {got}, wanted {wanted(hint)}") from None
        leaves[key] = Leaf(value, origin)


def _unknown(key: str, origin: Origin) -> str:
    """Return the message for an unknown key."""
    if key in SECTIONS:
        example = next(known for known in KEYS if known.startswith(f"{key}."))
        return f"{key} ({origin}) is a section; wanted a setting in it, such as {example}"
    near = nearest(key)
    is_variable = key.startswith(PREFIX)
    hint = f"did you mean {variable_of(near) if is_variable else near}?" if near else "`csattn config show` lists all"
    return f"there is no setting {key} ({origin.kind if is_variable else origin}); {hint}"


def nearest(unknown: str) -> str | None:
    """Return the setting that was probably meant, if any is similar."""
    by_spelling = {variable_of(key) if unknown.startswith(PREFIX) else key: key for key in KEYS}
    if close := get_close_matches(unknown, by_spelling, n=1, cutoff=0.7):
        return by_spelling[close[0]]
    by_name = {key.split(".")[1]: key for key in reversed(KEYS)}  # of equal names the first
    close = get_close_matches(unknown.removeprefix(PREFIX).lower().split(".")[-1], by_name, n=1, cutoff=0.7)
    return by_name[close[0]] if close else None


def _read_keys(leaves: dict[str, Leaf]) -> None:
    """Add the API keys in server.api_key_file."""
    path, named = leaves["server.api_key_file"], leaves["server.api_keys"]
    if path.value is None:
        return
    where = f"server.api_key_file ({path.origin})"
    try:
        lines = path.value.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise ConfigError(f"{where}: cannot read {path.value}: {error.strerror}; check the path") from error
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: {path.value} is not UTF-8 text; wanted one key a line") from None
    found: list[Secret] = []
    for number, line in enumerate(lines, 1):
        text = re.split(r"(?:^|\s)#", line, maxsplit=1)[0].strip()  # within a key, # is part of it
        try:
            found += [Secret(text)] if text else []
        except ConfigError as error:
            raise ConfigError(f"{where}: line {number} of {path.value}: {error}") from None
    if not found:
        raise ConfigError(f"{where}: {path.value} holds no key; write one a line, or leave the setting out")
    # the keys' origin is that of the file's setting, or both if there are other keys
    origin = path.origin if not named.value else replace(named.origin, where=f"{named.origin.where} and {path.value}")
    leaves["server.api_keys"] = Leaf((*named.value, *found), origin)


def _assemble(leaves: Mapping[str, Leaf]) -> Settings:
    parts: dict[str, Any] = {}
    for section, part in SECTIONS.items():
        values = {item.name: leaves[f"{section}.{item.name}"].value for item in fields(part)}
        try:
            parts[section] = part(**values)
        except ConfigError as error:
            name = str(error).split()[0]  # a part's error begins with the name of its field
            raise ConfigError(f"{section}.{error} ({leaves[f'{section}.{name}'].origin})") from None
    return Settings(**parts)
