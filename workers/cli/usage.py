"""Usage errors of `csattn`: typer's classes, with messages of our own."""

import re
from collections.abc import Iterator
from typing import Any

import typer
from typer.main import get_command

# typer brings its own copy of click in some versions; these are UsageError and ClickException in all of them
UsageError: Any = typer.BadParameter.__mro__[1]
ClickError: Any = typer.BadParameter.__mro__[2]
_WANTED = {"float_parsing": "a number, such as 0.02", "int_parsing": "a whole number"}  # by pydantic's types of errors
_MAX_SHOWN = 60  # characters of a value


def sentence_of(error: Any, app: typer.Typer) -> str:
    """Return a ClickError's message, and what to do; for an option of other commands, name these. Empty if the help
    was printed."""
    verbs = []
    if type(error).__name__ == "NoSuchOption":
        of_app = _verbs(get_command(app))
        verbs = [name for name, verb in of_app if any(error.option_name in known.opts for known in verb.params)]
    if not verbs:
        told = _message(error)
        if not told or "; " in told:  # our own messages, which say what to do, after typer's name for them
            return told.replace("Value error, ", "")
        asked = f"`{error.ctx.command_path} --help`" if getattr(error, "ctx", None) else "`--help`"
        return f"{told.rstrip('.')}{'' if told.endswith('?') else ';'} {asked} shows what to give"
    *others, last = verbs
    whose = f"{', '.join(others)} and {last}" if others else last
    return f"{error.option_name} belongs to {whose}; `{error.ctx.command_path} --help` lists the options that it takes"


def _message(error: Any) -> str:
    """Return a ClickError's message, with the value that came, which newer versions of typer leave out."""
    told: str = error.format_message()
    if extra := re.fullmatch(r"Got unexpected extra argument.* \((\S+)\)", told):
        return f"{told}{_as_option(error.ctx.command, extra[1])}"
    find_faults = getattr(error.__cause__, "errors", None)  # of pydantic's error, which the message repeats
    if find_faults is None:
        return told
    fault = find_faults()[0]
    if fault["type"] == "value_error":  # our own words
        return told
    wanted = _WANTED.get(fault["type"], fault["msg"].replace("Input should be", "a number"))
    return told.replace(fault["msg"], f"got {str(fault['input'])[:_MAX_SHOWN]!r}, wanted {wanted}")


def _as_option(verb: Any, word: str) -> str:
    """Suggest a word that was given alone as the value of the command's first option, such as `build --context`."""
    for option in verb.params:
        if option.param_type_name == "option" and not option.is_flag:
            return f"; did you mean {option.opts[0]} {word}?"
    return ""


def _verbs(group: Any) -> Iterator[tuple[str, Any]]:
    for name, verb in group.commands.items():
        if hasattr(verb, "commands"):  # `config` has commands of its own
            yield from ((f"{name} {inner}", found) for inner, found in _verbs(verb))
        else:
            yield name, verb
