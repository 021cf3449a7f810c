"""The commands in documents, docstrings and result files have options that their programs accept."""

import argparse
import ast
import importlib
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from workers.cli.app import app
from workers.cli.usage import ClickError
from workers.settings import load_settings

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("bench/*.md"), ROOT / "workers/api/README.md"]
LACKING = re.compile(r"are required|expected .* argument|requires an argument|^$|choice: 'NAME'")  # in an example
OUTSIDE_QUOTES = r"(?=(?:[^']*'[^']*')*[^']*$)"  # an even number of them follows


class Parsed(Exception):
    """The options are accepted, and the program would begin."""


def test_benchmarks_accept_documented_options(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def only_parse(self: argparse.ArgumentParser, words: list[str] | None = None) -> None:
        parse(self, words)
        raise Parsed

    def refuse(self: argparse.ArgumentParser, message: str = "") -> None:
        raise Parsed if LACKING.search(message) else ValueError(message)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", only_parse)
    monkeypatch.setattr(argparse.ArgumentParser, "error", refuse)
    monkeypatch.setattr(argparse.ArgumentParser, "print_help", refuse)
    faults = []
    for where, command in documented(r"python -m (?=bench)"):
        monkeypatch.setattr(sys, "argv", command)
        name = command[0] + ".__main__" * (ROOT / command[0].replace(".", "/")).is_dir()
        try:
            importlib.import_module(name).main()
        except Parsed:
            continue
        except (ImportError, ValueError) as error:
            faults.append(f"{where}: {shlex.join(command)}: {error}")
    assert not faults


def test_the_command_line_accepts_documented_options() -> None:
    programs: Any = typer.main.get_command(app)
    faults = []
    for where, (name, *options) in documented(rf"csattn (?=({'|'.join(programs.commands)})\b)"):
        try:
            programs.commands[name].make_context(name, options)
        except ClickError as error:
            if not LACKING.search(error.message):
                faults.append(f"{where}: csattn {name} {shlex.join(options)}: {error.message}")
    assert not faults


def test_documented_settings_exist() -> None:
    words = [word for _, words in documented("(?=--set )") for word in words if re.match(r"\w+\.\w+=", word)]
    assert words and load_settings(None, {}, dict(word.split("=") for word in words))


def documented(start: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the place and the words of each different command after `start`, without brackets and dots."""
    seen = set()
    for where, text in texts():
        for found in re.finditer(rf"{start}(?P<command>[^`\n]+)", text):
            plain = re.sub(r"--[\w-]+ \.\.\.|\.\.\.|[\[\]]|\|\w+| \|(?= )|  +.*| [#(].*", "", found["command"])
            plain = re.sub(rf"[,;:] {OUTSIDE_QUOTES}.*", "", plain)
            words = shlex.split(re.sub(r"\b([A-Z]|PID)\b", "1", plain))
            if (key := tuple(words)) not in seen and words:
                seen.add(key)
                yield where, words


def texts() -> Iterator[tuple[str, str]]:
    for path in DOCUMENTS:
        yield path.name, path.read_text()
    for path in ROOT.glob("bench/**/*.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        yield path.name, re.sub(r"\n {10,}", " ", docstring)
    for path in ROOT.glob("bench/results/*.json"):
        for command in commands_of(json.loads(path.read_text())):
            yield path.name, command


def commands_of(content: Any) -> Iterator[str]:
    """Yield the values named `command`, at any depth."""
    if isinstance(content, dict):
        if "command" in content:
            yield content["command"]
        content = list(content.values())
    if isinstance(content, list):
        for value in content:
            yield from commands_of(value)
