"""The sources of settings: file, environment, flags. They give values as written there, each with its origin."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from csattn.errors import ConfigError

PREFIX = "CSATTN_"
CONFIG_VARIABLE = "CSATTN_CONFIG"  # names the file if no flag does
OTHER_VARIABLES = {CONFIG_VARIABLE, "CSATTN_CACHE"}  # variables of this project that are not settings

# what Kubernetes tells every pod about a Service whose name begins with csattn
_OF_SERVICE = re.compile(r"\w+_SERVICE_(HOST|PORT\w*)=.*|\w+_PORT_\d+_\w+=.*|\w+_PORT=\w+://.*")
_TABLE = re.compile(r"\s*\[\s*([\w.\-]+)\s*\]")
_PAIR = re.compile(r"\s*([\w.\-]+)\s*=")


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


# each with its key, "server.port"; the key may be unknown
Given = Iterator[tuple[str, Leaf]]


def from_file(path: Path) -> Given:
    """Yield the settings in a TOML file. Raises ConfigError if it cannot be read."""
    data, lines = _read(path)
    for section, body in data.items():
        inside = body.items() if isinstance(body, dict) and body else [(None, body)]
        for name, value in inside:
            key = str(section) if name is None else f"{section}.{name}"
            yield key, Leaf(value, Origin(kind="file", where=str(path), line=lines.get(key)))


def from_environment(environment: Mapping[str, str], keys: Mapping[str, object]) -> Given:
    """Yield the settings in environment variables: CSATTN_SERVER_PORT is server.port. keys: all known settings."""
    by_variable = {variable_of(key): key for key in keys}
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
