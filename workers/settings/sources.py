"""Where settings come from: a file, the environment, flags. Values as they are written there, each with its origin."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from csattn.errors import ConfigError

PREFIX = "CSATTN_"
CONFIG_VARIABLE = "CSATTN_CONFIG"  # names the file, where no flag does
OTHER_VARIABLES = {CONFIG_VARIABLE, "CSATTN_CACHE"}  # of this project, and no settings

_TABLE = re.compile(r"\s*\[\s*([\w.\-]+)\s*\]")
_PAIR = re.compile(r"\s*([\w.\-]+)\s*=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Who said so."""

    kind: Literal["default", "file", "environment", "flag"]
    where: str = ""  # the file, or the variable
    line: int | None = None  # in the file, where it is known

    def __str__(self) -> str:
        line = "" if self.line is None else f", line {self.line}"
        return f"{self.kind} {self.where}{line}".strip()


@dataclass(frozen=True, slots=True)
class Given:
    """A value as it was written, and where."""

    key: str  # "server.port", if there is such a setting
    value: Any
    origin: Origin


def from_file(path: Path) -> Iterator[Given]:
    """What a TOML or YAML file says; ConfigError where it cannot be read."""
    data, lines = _read(path)
    for section, body in data.items():
        inside = body.items() if isinstance(body, dict) and body else [(None, body)]
        for name, value in inside:
            key = str(section) if name is None else f"{section}.{name}"
            yield Given(key, value, Origin(kind="file", where=str(path), line=lines.get(key)))


def from_environment(environment: Mapping[str, str], keys: Mapping[str, object]) -> Iterator[Given]:
    """CSATTN_SERVER_PORT is server.port: the prefix, the section, the name. keys: all that there are."""
    by_variable = {variable_of(key): key for key in keys}
    for variable in sorted(environment):
        if variable.startswith(PREFIX) and variable not in OTHER_VARIABLES:
            key = by_variable.get(variable, variable)
            yield Given(key, environment[variable], Origin(kind="environment", where=variable))


def from_flags(flags: Mapping[str, object]) -> Iterator[Given]:
    """Keys are settings; None is a flag that was not given."""
    for key, value in flags.items():
        if value is not None:
            yield Given(key, value, Origin(kind="flag"))


def variable_of(key: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + key.replace(".", "_").upper()


def _read(path: Path) -> tuple[dict[Any, Any], dict[str, int]]:
    """The file's content, and the lines of its keys as far as they are known."""
    if path.suffix not in (".toml", ".yaml", ".yml"):
        raise ConfigError(f"settings are read from .toml, .yaml and .yml files, got {path}; rename or convert it")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read settings from {path}: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8; save it as UTF-8") from error
    return _read_toml(path, text) if path.suffix == ".toml" else _read_yaml(path, text)


def _read_toml(path: Path, text: str) -> tuple[dict[Any, Any], dict[str, int]]:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if match := _TABLE.match(line):
            table = match[1] + "."
            lines.setdefault(match[1], number)
        elif match := _PAIR.match(line):
            lines.setdefault(table + match[1], number)
    return data, lines


def _read_yaml(path: Path, text: str) -> tuple[dict[Any, Any], dict[str, int]]:
    try:
        yaml = import_module("yaml")
    except ImportError as error:
        raise ConfigError(
            f"reading {path} needs PyYAML, which is not installed; `pip install pyyaml`, or use TOML"
        ) from error
    loader = yaml.SafeLoader(text)
    lines: dict[str, int] = {}
    try:
        node = loader.get_single_node()
        data = {} if node is None else loader.construct_document(node)
        if not isinstance(data, dict):
            raise ConfigError(f"{path} holds no mapping; write sections such as `server:` with settings below them")
        for name, line in _yaml_keys(node, ""):
            if name in lines:
                raise ConfigError(f"{path} has {name} twice, in lines {lines[name]} and {line}; remove one")
            lines[name] = line
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError) as error:
        # not the error's own text: it quotes the line, and there may be a key in it
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" in line {mark.line + 1}"
        raise ConfigError(
            f"{path} is not YAML: {getattr(error, 'problem', None) or 'it cannot be read'}{where}"
        ) from None
    finally:
        loader.dispose()
    return data, lines


def _yaml_keys(node: Any, prefix: str) -> Iterator[tuple[str, int]]:
    """Every key of the two upper levels, also one that is there twice."""
    if node is None or node.id != "mapping":
        return
    for name, value in node.value:
        yield f"{prefix}{name.value}", name.start_mark.line + 1
        if not prefix:
            yield from _yaml_keys(value, f"{name.value}.")
