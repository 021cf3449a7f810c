"""Settings for people: values with their origins, and an example file. Neither ever has a secret."""

import json
import textwrap
from pathlib import Path
from typing import Any

from workers.settings.load import SECRETS, Loaded, variable_of, wanted
from workers.settings.parts import KEYS, SECTIONS, Key, Secret

_HEAD = """\
Settings of csattn, all at their defaults: keep the lines that you change.
Flags override environment variables, these override this file, and it overrides the defaults.
Every setting has an environment variable: that of server.port is {variable}."""


def describe(loaded: Loaded) -> dict[str, dict[str, Any]]:
    """Return each key's value, for JSON and with secrets as ***, and its origin."""
    return {key: {"value": _plain(leaf.value), "origin": str(leaf.origin)} for key, leaf in loaded.leaves.items()}


def example() -> str:
    """Return a TOML file with every setting at its default, and what each means."""
    lines = [f"# {line}" for line in _HEAD.format(variable=variable_of("server.port")).splitlines()]
    for section, part in SECTIONS.items():
        lines += ["", f"# {' '.join(part.__doc__.split())}", f"[{section}]"]
        for key, spec in KEYS.items():
            if key.startswith(f"{section}."):
                lines += [f"# {line}" for line in textwrap.wrap(_explain(spec), 110)]
                name, default = key.split(".")[1], spec.default
                # TOML has no null; its strings, numbers and empty lists are those of JSON
                lines.append(f"# {name} =" if default is None else f"{name} = {json.dumps(_plain(default))}")
    return "\n".join(lines) + "\n"


def _explain(spec: Key) -> str:
    """Return a setting's meaning, what it accepts, and its bounds."""
    bounds = [f"at least {spec.lowest:g}"] if spec.lowest is not None else []
    bounds += [f"more than {spec.above:g}"] if spec.above is not None else []
    bounds += [f"at most {spec.highest:g}"] if spec.highest is not None else []
    takes = "a list of keys" if spec.hint == SECRETS else wanted(spec.hint)
    return f"{spec.words} ({', '.join([takes, *bounds])})"


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path | Secret) else value
