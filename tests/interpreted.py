"""Triton's interpreter, without work whose result it drops or has had before. Kernels compute the same."""

import inspect
import sys
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest


def interpret_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch the interpreter, if it is loaded. Kernels in it then take less than half of the time."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        return
    _search_language_once(interpreter, monkeypatch)
    _describe_types_once(interpreter, monkeypatch)
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "sums are checked for overflow only for a message that needs this option"
    monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))


def _search_language_once(interpreter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the names that the interpreter replaces while a kernel runs; functions that it calls replace none."""
    language, is_builtin, replace_name = interpreter.tl, interpreter.tl.core.is_builtin, interpreter._patch_attr
    patch_language, no_scope = interpreter._patch_lang, interpreter._LangPatchScope

    @cache
    def builtins_of(place: Any) -> list[str]:  # called first while none is replaced
        return [name for name, member in inspect.getmembers(place) if is_builtin(member)]

    def patch_builtin(place: Any, builder: Any, scope: Any) -> None:
        for name in builtins_of(place):
            if is_builtin(member := getattr(place, name)):
                replace_name(place, name, member, builder, scope)

    @cache
    def languages_of(function: Any) -> list[Any]:
        modules = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        return [module for module in modules if module in (language, language.core)]

    def patch_if_new(function: Any) -> Any:
        is_new = any(is_builtin(module.load) for module in languages_of(function))
        return patch_language(function) if is_new else no_scope()

    monkeypatch.setattr(interpreter, "_patch_builtin", patch_builtin)
    monkeypatch.setattr(interpreter, "_patch_lang", patch_if_new)


def _describe_types_once(interpreter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what follows from a number's type, and from a block's type and shape: each operation asks for it again."""
    block_type, tensor = interpreter.tl.core.block_type, interpreter.tl.core.tensor
    describe, described = block_type.__init__, dict[Any, dict[str, Any]]()
    make, sizes_of_shape = tensor.__init__, dict[Any, tuple[Any, Any]]()
    dtype_of_number = cache(interpreter._get_np_dtype)

    def describe_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = str(element_ty), *(getattr(size, "value", size) for size in shape)
        if element_ty.is_ptr():  # its name does not tell all of it
            describe(self, element_ty, shape)
            return
        if key not in described:
            describe(self, element_ty, shape)
            described[key] = vars(self).copy()
        vars(self).update(described[key])

    def make_with_sizes(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in sizes_of_shape:
            make(self, handle, type)
            sizes_of_shape[key] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = sizes_of_shape[key]

    def dtype_of(type: Any) -> Any:
        return np.dtype(np.uint64) if type.scalar.is_ptr() else dtype_of_number(type.scalar)

    monkeypatch.setattr(block_type, "__init__", describe_once)
    monkeypatch.setattr(tensor, "__init__", make_with_sizes)
    monkeypatch.setattr(interpreter, "_get_np_dtype", dtype_of)
