"""The inputs of a build, checked before a model is loaded: the context's text, the options, the device."""

import json
import sys
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from dataclasses import fields, replace
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from csattn.checks import require_text
from csattn.config import IndexConfig, ListConfig, preset
from csattn.errors import ConfigError, ContextError

DEVICES = ("auto", "cpu", "cuda")
# magic bytes of files that are not text, and what to do with them
_DOCUMENTS = {
    b"%PDF-": "it is a PDF: extract its text, for example with pdftotext",
    b"PK\x03\x04": "it is a ZIP archive, as DOCX, ODT and EPUB are: save it as plain text in UTF-8",
    b"\xd0\xcf\x11\xe0": "it is a document of an older version of Office: save it as plain text in UTF-8",
    b"{\\rtf": "it is RTF: save it as plain text in UTF-8",
    b"\x89PNG": "it is an image: write its text into a file in UTF-8",
    b"\xff\xd8\xff": "it is an image: write its text into a file in UTF-8",
    b"\x1f\x8b": "it is compressed by gzip: decompress it by gunzip",
    b"GGUF\x02\0": "it is a model, as --model takes it: give a text file in UTF-8",
    b"GGUF\x03\0": "it is a model, as --model takes it: give a text file in UTF-8",
}
_TO_KANJI = b"\x1b$B", b"\x1b$@"  # of ISO-2022-JP, all of whose bytes are ASCII


def read_text(context: str) -> str:
    """Read a UTF-8 file, or standard input for `-`; lines end with \\n.

    Raises ContextError if it is not text, or blank.
    """
    name = "standard input" if context == "-" else context
    try:
        data = sys.stdin.buffer.read() if context == "-" else Path(context).read_bytes()
        text = TextIOWrapper(BytesIO(data), encoding="utf-8-sig").read()
    except OSError as error:
        raise ContextError(f"cannot read {name}: {error.strerror}; give a text file, or - for stdin") from error
    except UnicodeDecodeError as error:
        raise ContextError(
            f"{name} is not UTF-8 text (byte {error.start}); {_conversion(data, is_utf8=False)}, and give the result"
        ) from error
    is_document = data.removeprefix(BOM_UTF8).startswith(tuple(_DOCUMENTS))
    if is_document or "\0" in text or any(mark in data for mark in _TO_KANJI):  # valid UTF-8, but not text
        raise ContextError(f"{name} is not plain text; {_conversion(data, is_utf8=True)}, and give the result")
    if not text.strip():
        raise ContextError(f"{name} holds no text; give a text that is not empty")
    return text


def _conversion(data: bytes, *, is_utf8: bool) -> str:
    """Return advice on making UTF-8 text of a file. is_utf8: it decodes, but has magic bytes, NULs or escapes."""
    for begins, way in _DOCUMENTS.items():
        if data.removeprefix(BOM_UTF8).startswith(begins):
            return way
    if (byte_order := _utf16_order(data)) is not None:
        return f"if it is UTF-16, as Windows writes, convert it: iconv -f UTF-16{byte_order} -t UTF-8 FILE"
    if is_utf8 and b"\0" not in data:
        return "it is ISO-2022-JP, as used in mail: convert it: iconv -f ISO-2022-JP -t UTF-8 FILE"
    if is_utf8:
        return f"it has a NUL at byte {data.index(0)}; remove it: tr -d '\\0' < FILE"
    known = "GB18030, BIG5, SHIFT_JIS, EUC-KR, CP1252, ..."
    return f"convert it from the encoding that it has ({known}): iconv -f ENCODING -t UTF-8 FILE"


def _utf16_order(data: bytes) -> str | None:
    """Return iconv's suffix of UTF-16: "" with a byte-order mark; BE or LE if most even or odd bytes are 0; or None."""
    if data.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        return ""
    zeros = [half.count(0) / max(1, len(half)) for half in (data[:4096:2], data[1:4096:2])]
    return next((order for order, at in (("BE", 0), ("LE", 1)) if zeros[at] > 0.75 and zeros[1 - at] < 0.5), None)


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


def choose_device(device: str) -> str:
    """Resolve --device to `cpu` or `cuda`; `auto` means a GPU if there is one. Raises ConfigError."""
    if device not in DEVICES:
        raise ConfigError(f"--device must be one of {', '.join(DEVICES)}, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda needs a GPU and a torch built for it, and this machine has none; use cpu")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device
