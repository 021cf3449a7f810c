"""Errors of how `csattn` was called, as typer has them, in words of its own."""

from collections.abc import Iterator
from typing import Any

import typer
from typer.main import get_command

# typer brings its own copy of click in some versions; these are UsageError and ClickException in all of them
UsageError: Any = typer.BadParameter.__mro__[1]
ClickError: Any = typer.BadParameter.__mro__[2]


def sentence_of(error: Any, app: typer.Typer) -> str:
    """What a ClickError says; of an option that is another verb's, whose it is. Empty where the help is there."""
    verbs = _verbs_with(app, error.option_name) if type(error).__name__ == "NoSuchOption" else []
    if not verbs:
        told: str = error.format_message()
        return told
    *others, last = verbs
    whose = f"{', '.join(others)} and {last}" if others else last
    return f"{error.option_name} belongs to {whose}; `{error.ctx.command_path} --help` lists the options that it takes"


def _verbs_with(app: typer.Typer, option: str) -> list[str]:
    return [name for name, verb in _verbs(get_command(app)) if any(option in known.opts for known in verb.params)]


def _verbs(group: Any) -> Iterator[tuple[str, Any]]:
    for name, verb in group.commands.items():
        if hasattr(verb, "commands"):  # `config` has verbs of its own
            yield from ((f"{name} {inner}", found) for inner, found in _verbs(verb))
        else:
            yield name, verb
