"""The weights files of a model directory: which they are, and whether they are there and whole, by their headers."""

import json
import zipfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from csattn.errors import ModelError

_POINTER = b"version https://git-lfs"  # what a file begins with that git-lfs has not fetched
_INDEX = "model.safetensors.index.json"
_OLD_TORCH = b"\x80\x02"  # what files begin with that torch saved before 1.6; later ones are ZIP files
_IN_TORCH = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def require_fetched(path: Path) -> None:
    """Raise ModelError for a file that git-lfs has not fetched. Files that cannot be read are left to their readers."""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_POINTER)) == _POINTER
    except OSError:
        return
    if is_pointer:
        raise ModelError(f"{path} is a pointer of git-lfs instead of the file itself; run `git lfs pull` in its folder")


def require_settings_fetched(folder: Path) -> None:
    """Raise ModelError if git-lfs has not fetched a model's config, or files of its tokenizer."""
    for pattern in ("*.json", "*.model", "*.jinja"):
        for path in sorted(folder.glob(pattern)):
            require_fetched(path)


def require_weights(folder: Path, is_quantized: bool) -> None:
    """Raise ModelError if weights files are missing, damaged, or have not been fetched."""
    paths = safetensors_files(folder)
    is_found = bool(paths) and (paths[0].name == "model.safetensors" or (folder / _INDEX).is_file())  # by transformers
    if is_found or (is_quantized and paths):
        for path in paths:
            open_safetensors(path)
        return
    in_torch = [folder / name for name in _IN_TORCH if (folder / name).is_file()]
    if in_torch and not is_quantized:
        names = _names_in(in_torch[0]) if in_torch[0].suffix == ".json" else [in_torch[0].name]
        for name in names:
            _require_torch_file(folder / name)
        return
    wanted = f"model.safetensors, {_INDEX} or pytorch_model.bin"
    if is_quantized:
        wanted = "safetensors files, and quantized weights are read only from these"
    elif paths:
        wanted = f"{_INDEX} beside {paths[0].name}"
    raise ModelError(f"its directory has no {wanted}; download all of it")


def _require_torch_file(path: Path) -> None:
    """Raise ModelError for a file that `torch.save` did not write to its end, where a ZIP file has its table."""
    require_fetched(path)
    if not path.is_file():
        raise ModelError(f"{path} is not there; download it again")
    with path.open("rb") as file:
        is_old = file.read(len(_OLD_TORCH)) == _OLD_TORCH
    if not is_old and not zipfile.is_zipfile(path):
        raise ModelError(f"{path} is no file of weights as torch.save writes them, or only a part; download it again")


def safetensors_files(folder: Path) -> list[Path]:
    """Find the files as `transformers` does: others beside them may have the same weights in another layout."""
    whole, index = folder / "model.safetensors", folder / _INDEX
    if whole.is_file():
        return [whole]
    if index.is_file():
        return [folder / name for name in _names_in(index)]
    return sorted(folder.glob("*.safetensors"))


def _names_in(index: Path) -> list[str]:
    require_fetched(index)
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} does not name the file of each tensor (weight_map); download it again") from error


def open_safetensors(path: Path) -> Any:
    """Open a file of weights. Raises ModelError if it is missing, damaged, or has not been fetched."""
    require_fetched(path)
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        why = "is not there" if not path.exists() else f"cannot be read as safetensors ({error})"
        raise ModelError(f"{path} {why}; download it again") from error
