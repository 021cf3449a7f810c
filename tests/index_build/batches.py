"""A model and contexts on disk, and a list of jobs over them."""

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.tiny import save


def text(number: int, num_lamps: int = 14) -> str:
    return "".join(f"Lamp {number * lamp} is lit at {lamp % 12} by {number}. " for lamp in range(num_lamps))


def make_place(place: Path, num_contexts: int) -> Path:
    """Make a directory with a model and `num_contexts` contexts."""
    save(place / "model")
    for number in range(num_contexts):
        (place / f"{number}.txt").write_text(text(number + 1))
    return place


def write_list(place: Path, *lines: dict[str, Any] | str) -> Path:
    """Write a list of jobs from objects, or from lines as they are."""
    file = place / "jobs.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def hashes(store: Path) -> dict[str, str]:
    """Return the SHA-256 of every file in a store, by its path there."""
    files = (path for path in store.rglob("*") if path.is_file())
    return {str(path.relative_to(store)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def finished_files(store: Path) -> dict[str, int]:
    """Return the inode of every file that an artifact has or will have, by artifact and name."""
    inodes = {}
    for path in [*store.glob("*/layer-*.safetensors"), *store.glob("*/artifact/layer-*.safetensors")]:
        artifact = path.parent.parent if path.parent.name == "artifact" else path.parent
        with suppress(FileNotFoundError):  # published meanwhile
            inodes[f"{artifact.name.removeprefix('.building-')}/{path.name}"] = path.stat().st_ino
    return inodes
