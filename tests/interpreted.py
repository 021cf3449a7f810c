"""Triton's interpreter, without a search of all of Triton's language at each call of a function in a kernel."""

import inspect
import sys
from functools import cache
from typing import Any

import pytest


def search_language_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the names that the interpreter replaces while a kernel runs, if it is loaded."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        return
    is_builtin, replace = interpreter.tl.core.is_builtin, interpreter._patch_attr

    @cache
    def builtins_of(place: Any) -> list[str]:  # called first while none is replaced
        return [name for name, member in inspect.getmembers(place) if is_builtin(member)]

    def patch_builtin(place: Any, builder: Any, scope: Any) -> None:
        for name in builtins_of(place):
            if is_builtin(member := getattr(place, name)):
                replace(place, name, member, builder, scope)

    monkeypatch.setattr(interpreter, "_patch_builtin", patch_builtin)
