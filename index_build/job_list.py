"""Lists of contexts to build, one JSON object per line: read and checked as a whole before any work."""

import json
import os
import re
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from csattn.artifact.places import may_be_path
from csattn.build_options import AUTO, COUNTS, BuildOptions
from csattn.errors import ConfigError, ContextError
from csattn.models.loader import require_dtype_and_rounding
from index_build.inputs import make_config, read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One context to build, from one line of the list; paths are absolute."""

    line: int  # in the list, from 1
    context: Path
    context_bytes: int
    options: BuildOptions


_DEFAULTS = BuildOptions()


def read_jobs(path: Path, defaults: BuildOptions = _DEFAULTS) -> list[Job]:
    """Read the jobs of a JSON-lines file; paths in it are relative to its directory. Blank lines are skipped.

    `-` is standard input. In it, and in a pipe or a /dev/fd file, which have no directory, paths are relative to the
    current directory.
    Raises one ConfigError that names every bad line and its fault.
    """
    base = path.absolute().parent
    if not path.is_file() or re.match("/dev(/fd)?$|/proc/", str(base)):
        base = Path.cwd()
    try:
        data = sys.stdin.buffer.read() if path == Path("-") else path.read_bytes()
        lines = re.split("\r\n?|\n", data.decode("utf-8-sig"))  # other line breaks may be in strings
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give a file with one JSON object per line") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}); convert it first") from error
    jobs: list[Job] = []
    faults: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            jobs.append(_read_job(line, number, base, defaults))
        except (ConfigError, ContextError) as fault:
            faults.append(f"line {number}: {fault}")
    if faults:
        raise ConfigError("\n  ".join([f"{path} has {_lines(len(faults))} to correct; nothing was built:", *faults]))
    if not jobs:
        raise ConfigError(f'{path} holds no jobs; write one line like {{"context": "handbook.txt"}} per context')
    return jobs


def _lines(count: int) -> str:
    return "1 line" if count == 1 else f"{count} lines"


def _read_job(line: str, number: int, base: Path, defaults: BuildOptions) -> Job:
    try:
        given = json.loads(line, object_pairs_hook=_unique)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"this is not JSON ({error}); write one object per line") from error
    if not isinstance(given, dict):
        raise ConfigError(f'expected an object like {{"context": "handbook.txt"}}, got {line.strip()[:60]}')
    for name, value in given.items():
        if isinstance(value, str) and not may_be_path(value):
            raise ConfigError(f'"{name}" has characters that cannot be in it, got {json.dumps(value)[:60]}')
    context = given.pop("context", None)
    options = _read_options(given, base, defaults)
    if not isinstance(context, str) or not context:
        raise ConfigError('"context" must be the path of a text file' + ("" if context is None else f", got {context}"))
    file = base / os.path.expanduser(context)
    if os.path.exists(file) and not (file.is_file() or file.is_dir()):
        raise ContextError(f"{file} is a pipe or a device, which cannot be read again; give a file")
    return Job(line=number, context=file, context_bytes=len(read_text(str(file)).encode()), options=options)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    given = dict(pairs)
    if len(given) != len(pairs):
        raise ConfigError("a name appears twice; write one object per line, and each name once")
    return given


def _read_options(given: dict[str, Any], base: Path, defaults: BuildOptions) -> BuildOptions:
    known = [field.name for field in fields(BuildOptions)]
    if unknown := sorted(set(given) - set(known)):
        raise ConfigError(f"unknown option {', '.join(map(repr, unknown))}; known are context, {', '.join(known)}")
    for name, value in given.items():
        _require_type(name, value)
    options = replace(defaults, **{name: value for name, value in given.items() if value is not None})
    require_dtype_and_rounding("float32" if options.dtype == AUTO else options.dtype, options.weights)
    make_config(options.preset, options.index_changes, "cpu")  # refuses an unknown preset, too
    # a path of a model in the line is relative to the list; one from the command line to the current directory
    return replace(options, model=_locate(options.model, base if given.get("model") else Path.cwd()))


def _require_type(name: str, value: object) -> None:
    if name == "list_len":
        is_valid, wanted = isinstance(value, int | float) and not isinstance(value, bool), "a number"
    elif name in COUNTS:
        is_valid, wanted = isinstance(value, int) and not isinstance(value, bool), "a whole number"
    elif name == "chat":
        is_valid, wanted = isinstance(value, bool), "true or false"
    else:
        is_valid, wanted = isinstance(value, str), "a string"
    if not is_valid and value is not None:
        raise ConfigError(f'"{name}" must be {wanted}, got {json.dumps(value)[:60]}')


def _locate(model: str | None, base: Path) -> str | None:
    """Return the absolute path of a model on disk, or a hub id or the demo model's name unchanged."""
    if model is None:
        return None
    path = base / os.path.expanduser(model)
    if os.path.exists(path):  # False also for names that are too long
        return str(path)
    if model.startswith(("/", ".", "~")) or model.endswith(".gguf"):
        raise ConfigError(f"there is no model at {path}; give a directory, a .gguf file, or a hub id like owner/name")
    return model
