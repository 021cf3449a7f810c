"""Flags over environment over file over defaults: one value for each setting, checked, with its origin."""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from csattn.build_options import AUTO
from csattn.errors import ConfigError
from workers.settings.parts import KEYS, SECTIONS, UNTIL_CHOSEN, Secret, Settings, choices, default_lookahead

PREFIX = "CSATTN_"
CONFIG_VARIABLE = "CSATTN_CONFIG"  # names the file if no flag does
OTHER_VARIABLES = {CONFIG_VARIABLE, "CSATTN_CACHE"}  # variables of this project that are not settings

# what Kubernetes tells every pod about a Service whose name begins with csattn
_OF_SERVICE = re.compile(r"\w+_SERVICE_(HOST|PORT\w*)=.*|\w+_PORT_\d+_\w+=.*|\w+_PORT=\w+://.*")
_TABLE = re.compile(r"\s*\[\s*([\w.\-]+)\s*\]")
_PAIR = re.compile(r"\s*([\w.\-]+)\s*=")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}
SECRETS, TEXTS = tuple[Secret, ...], tuple[str, ...]
_UNIONS = (Union, UnionType)  # the type of `Literal[...] | None` is the former


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a value was set."""

    kind: Literal["default", "file", "environment", "flag"]
    where: str = ""  # the file, or the variable
    line: int | None = None  # in the file, if it is known

    def __str__(self) -> str:
        line = "" if self.line is None else f", line {self.line}"
        return f"{self.kind} {self.where}{line}".strip()


@dataclass(frozen=True, slots=True)
class Leaf:
    """The value of one setting, and its origin."""

    value: Any
    origin: Origin


Given = Iterator[tuple[str, Leaf]]  # each with its key, "server.port"; the key may be unknown


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
    _put(leaves, from_environment(environment))
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


def from_file(path: Path) -> Given:
    """Yield the settings in a TOML file. Raises ConfigError if it cannot be read."""
    data, lines = _read(path)
    for section, body in data.items():
        inside = body.items() if isinstance(body, dict) and body else [(None, body)]
        for name, value in inside:
            key = str(section) if name is None else f"{section}.{name}"
            yield key, Leaf(value, Origin(kind="file", where=str(path), line=lines.get(key)))


def from_environment(environment: Mapping[str, str]) -> Given:
    """Yield the settings in environment variables: CSATTN_SERVER_PORT is server.port."""
    by_variable = {variable_of(key): key for key in KEYS}
    in_pod = "KUBERNETES_SERVICE_HOST" in environment
    for variable in sorted(environment):
        if variable.startswith(PREFIX) and variable not in OTHER_VARIABLES:
            key, value = by_variable.get(variable, variable), environment[variable]
            if not (in_pod and _OF_SERVICE.fullmatch(f"{variable}={value}")):
                yield key, Leaf(value, Origin(kind="environment", where=variable))


def variable_of(key: str) -> str:
    """Return the environment variable of a setting."""
    return PREFIX + key.replace(".", "_").upper()


def _read(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the file's content, and the line numbers of its keys as far as they are known."""
    if path.suffix != ".toml":
        raise ConfigError(f"settings are read from .toml files, got {path}; `csattn config example` writes one")
    try:
        text = path.read_text(encoding="utf-8-sig")
        data = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read settings from {path}: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8; save it as UTF-8") from error
    except ValueError as error:  # a TOMLDecodeError, or a number of thousands of digits
        raise ConfigError(f"{path} is not TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} nests lists or tables too deep; settings have one table for each section") from None
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if match := _TABLE.match(line):
            table = match[1] + "."
            lines.setdefault(match[1], number)
        elif match := _PAIR.match(line):
            lines.setdefault(table + match[1], number)
    return data, lines


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
    if hint in (SECRETS, TEXTS):
        kinds = str | Secret if hint == SECRETS else str
        if not isinstance(value, list | tuple) or not all(isinstance(item, kinds) for item in value):
            raise ValueError
        return tuple(Secret(item) if hint == SECRETS and isinstance(item, str) else item for item in value)
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
    if hint in (SECRETS, TEXTS):
        return f"a list of {'keys' if hint == SECRETS else 'texts'} (in an environment variable: separated by commas)"
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
