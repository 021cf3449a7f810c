"""The inputs of a build, checked before a model is loaded: the context's text, the options, the device."""

import json
import sys
from dataclasses import fields, replace
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from csattn.build_options import BuildOptions
from csattn.checks import require_one_of, require_text
from csattn.config import IndexConfig, ListConfig, preset
from csattn.errors import ConfigError, ContextError
from csattn.models.loader import dtype_for
from csattn.plain_text import how_to_convert, why_not_plain

DEVICES = ("auto", "cpu", "cuda")


def read_text(context: str) -> str:
    """Read a UTF-8 file, or standard input for `-`; lines end with \\n.

    Raises ContextError if it is not text, or blank.
    """
    if not context.strip():
        raise ContextError("the path of the text is empty; give a text file, or - for stdin")
    name = "standard input" if context == "-" else context
    try:
        data = sys.stdin.buffer.read() if context == "-" else Path(context).read_bytes()
        text = TextIOWrapper(BytesIO(data), encoding="utf-8-sig").read()
    except OSError as error:
        raise ContextError(f"cannot read {name}: {error.strerror}; give a text file, or - for stdin") from error
    except UnicodeDecodeError as error:
        raise ContextError(
            f"{name} is not UTF-8 text (byte {error.start}); {how_to_convert(data)}, and give the result"
        ) from error
    if (advice := why_not_plain(data)) is not None:
        raise ContextError(f"{name} is not plain text; {advice}, and give the result")
    if not text.strip():
        raise ContextError(f"{name} holds no text; give a text that is not empty")
    return text


def read_tokens(path: Path) -> NDArray[np.int32]:
    """Read a context's token ids [num_tokens] from a JSON list of numbers. Raises ContextError for anything else."""
    try:
        ids = json.loads(path.read_bytes())
        if not isinstance(ids, list) or not all(type(token_id) is int and 0 <= token_id < 2**31 for token_id in ids):
            raise ValueError("it is not a list of token ids")
    except OSError as error:
        raise ContextError(f"cannot read {path}: {error.strerror}; give a file of token ids") from error
    except (ValueError, RecursionError) as error:
        raise ContextError(f"{path} holds no token ids ({error}); give a list of them in JSON") from error
    return np.asarray(ids, np.int32)


def given_prompt(value: str) -> str:
    """Return the text of --prompt, or standard input for `-`.

    Raises ConfigError or ContextError for blank text, or for bytes from the shell that are not UTF-8: Python passes
    them on as lone surrogates.
    """
    if value == "-":
        return read_text(value)
    require_text("--prompt", value, ", or - for standard input")
    return value


def make_config(preset_name: str, changes: dict[str, Any], device: str) -> IndexConfig:
    """Return the preset with the given changes; None leaves an option to the preset.

    On a GPU, the default of `kmeans` is the batched k-means in torch, which is much faster there.
    """
    config = preset(preset_name)
    given = {name: value for name, value in changes.items() if value is not None}
    if unused := sorted(given.keys() - {field.name for field in fields(config)}):
        options = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
        raise ConfigError(f"{options} has no meaning for the preset {preset_name!r}; leave it out")
    if isinstance(config, ListConfig) and device == "cuda":
        given.setdefault("kmeans", "torch")
    config = replace(config, **given)
    # an artifact's id has 1 and 1.0 apart, and JSON may give either
    return replace(config, list_len=float(config.list_len)) if isinstance(config, ListConfig) else config


def with_dtype(options: BuildOptions, device: str) -> BuildOptions:
    """Return the options with the dtype that `auto` stands for on the device."""
    return replace(options, dtype=dtype_for(device, options.model, options.dtype, options.weights))


def choose_device(device: str) -> str:
    """Resolve --device to `cpu` or `cuda`; `auto` means a GPU if there is one. Raises ConfigError."""
    require_one_of("--device", device, DEVICES)
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda needs a GPU and a torch built for it, and this machine has none; use cpu")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device
