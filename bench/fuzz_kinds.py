"""The ways to damage an artifact: each changes a directory that is a copy of one."""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.hostile_requests import places_of

MANIFEST, MANIFEST_HASH = "manifest.json", "manifest.sha256"
HEADER_BYTES = 4096  # of a file, at least


def hurt(artifact_dir: Path, others: list[Path], rng: random.Random) -> tuple[list[str], bool]:
    """Damage an artifact; return the kinds of damage, and whether its hashes were corrected afterwards."""
    is_forged = rng.random() < 0.5
    if is_forged and rng.random() < 0.5:  # otherwise few forgeries could be opened
        kinds = ["forge values"]
    else:
        kinds = [rng.choice(list(KINDS)) for _ in range(rng.randint(1, 3))]
    for kind in kinds:
        KINDS[kind](artifact_dir, others, rng)
    if is_forged:
        reseal(artifact_dir)
    return kinds, is_forged


def some_file(artifact_dir: Path, rng: random.Random) -> Path:
    """Return a plain file: reading a pipe would block, and a link may lead to another artifact's file."""
    return rng.choice(plain_files(artifact_dir))


def plain_files(artifact_dir: Path) -> list[Path]:
    return sorted(path for path in artifact_dir.iterdir() if path.is_file() and not path.is_symlink())


def write(path: Path, data: bytes) -> None:
    """Write a file; a link in its place is replaced, not followed."""
    if path.is_symlink():
        path.unlink()
    path.write_bytes(data)


def flip_bytes(artifact_dir: Path, others: list[Path], rng: random.Random) -> None:
    """Flip bits anywhere, or in the first 4096 bytes, where the header is."""
    path = some_file(artifact_dir, rng)
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 1, 100]) if data else 0):
        data[rng.randrange(rng.choice([len(data), min(len(data), 4096)]))] ^= rng.randrange(1, 256)
    path.write_bytes(data)


def forge_values(artifact_dir: Path, others: list[Path], rng: random.Random) -> None:
    """Change KV rows, codes, transforms or tokens: flip a bit, or write a run of zeros, NaNs, infinities or noise."""
    files = [path for path in plain_files(artifact_dir) if path.suffix == ".safetensors"]
    path = rng.choice(files or [some_file(artifact_dir, rng)])
    data = bytearray(path.read_bytes())
    if len(data) <= HEADER_BYTES:
        return
    start = rng.randrange(HEADER_BYTES, len(data))
    if rng.random() < 0.5:
        data[start] ^= 1 << rng.randrange(8)
    else:
        value = rng.choice(
            [b"\0\0\0\0", b"\xff\xff\xff\x7f", b"\x00\x00\xc0\x7f", b"\x00\x00\x80\xff", rng.randbytes(4)]
        )
        run = (value * rng.choice([1, 64, 4096]))[: len(data) - start]
        data[start : start + len(run)] = run
    path.write_bytes(data)


def fill_bytes(artifact_dir: Path, others: list[Path], rng: random.Random) -> None:
    """Write a run of zero bits, one bits or NaNs, such as a lost disk block or a faulty writer leaves."""
    path = some_file(artifact_dir, rng)
    data = bytearray(path.read_bytes())
    start = rng.randrange(len(data) + 1)
    end = min(len(data), start + rng.choice([1, 8, 512, 4096, len(data)]))
    data[start:end] = (rng.choice([b"\0", b"\xff", b"\x00\x00\xc0\x7f", b"\x00\x80"]) * len(data))[: end - start]
    path.write_bytes(data)


def cut(artifact_dir: Path, others: list[Path], rng: random.Random) -> None:
    path = some_file(artifact_dir, rng)
    os.truncate(path, rng.choice([0, 7, 4096, rng.randrange(path.stat().st_size + 1)]))


def lengthen(artifact_dir: Path, others: list[Path], rng: random.Random) -> None:
    with some_file(artifact_dir, rng).open("ab") as file:
        file.write(rng.randbytes(rng.choice([1, 64, 4096])))


def swap(artifact_dir: Path, others: list[Path], rng: random.Random) -> None:
    """Swap two files, or replace one by another artifact's file with the same name."""
    one, other = some_file(artifact_dir, rng), some_file(artifact_dir, rng)
    source = rng.choice(others) / one.name
    if rng.random() < 0.5 and source.exists():
        shutil.copy(source, one)
    else:
        kept = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(kept)


def remove(artifact_dir: Path, others: list[Path], rng: random.Random) -> None:
    some_file(artifact_dir, rng).unlink()


def replace(artifact_dir: Path, others: list[Path], rng: random.Random) -> None:
    """Replace a file by a pipe, a directory or a link."""
    path = some_file(artifact_dir, rng)
    path.unlink()
    target = rng.choice(["/dev/zero", "/nowhere", path.name, str(rng.choice(others) / path.name)])
    rng.choice([os.mkfifo, os.mkdir, lambda place: os.symlink(target, place)])(path)


def add(artifact_dir: Path, others: list[Path], rng: random.Random) -> None:
    name = rng.choice(["notes.txt", "layer-000.kv.safetensors.new", "layer-999.kv.safetensors", "\u202e", "x" * 200])
    write(artifact_dir / name, rng.randbytes(9))


def edit_manifest(artifact_dir: Path, others: list[Path], rng: random.Random) -> None:
    """Change or delete a value anywhere in the manifest, or rename a key."""
    path = artifact_dir / MANIFEST
    manifest = read_manifest(path)
    if not (places := list(places_of(manifest))):
        return
    inside, key = rng.choice(places)
    what = rng.random()
    if what < 0.15:
        del inside[key]
    elif what < 0.25 and isinstance(inside, dict):
        inside[rng.choice(["", "files", "x", "spec", "../up"])] = inside.pop(key)
    else:
        inside[key] = other_value(inside[key], rng)
    write(path, json.dumps(manifest).encode())


def read_manifest(path: Path) -> Any:
    """Return the manifest; None if it is no longer JSON."""
    try:
        return json.loads(path.read_bytes()) if path.is_file() else None
    except (ValueError, RecursionError):
        return None


def other_value(value: Any, rng: random.Random) -> Any:
    values: list[Any] = [
        None, True, "", "x" * 300, "\ud800", "../../etc", -1, 0, 1, 2, 10**9, 2**63, 10**30, 0.5, float("nan"), [], {},
    ]  # fmt: skip
    if isinstance(value, int):
        values += [value + 1, value - 1, 2 * value, str(value), float(value)]
    if isinstance(value, str):
        values += [value + "0", value.upper(), value[::-1], [value]]
    return rng.choice(values)


KINDS: dict[str, Callable[[Path, list[Path], random.Random], None]] = {
    make.__name__.replace("_", " "): make
    for make in (flip_bytes, forge_values, fill_bytes, cut, lengthen, swap, remove, replace, add, edit_manifest)
}


def reseal(artifact_dir: Path) -> None:
    """Correct the sizes and hashes of files in the manifest, and the manifest's own hash."""
    path, hash_path = artifact_dir / MANIFEST, artifact_dir / MANIFEST_HASH
    manifest = read_manifest(path)
    with suppress(TypeError, KeyError, AttributeError):  # a broken manifest only gets its own hash
        for name, record in manifest["files"].items():
            file = artifact_dir / name
            data = file.read_bytes() if file.is_file() else b""
            record |= {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        write(path, json.dumps(manifest).encode())
    if path.is_file() and (hash_path.is_file() or not os.path.lexists(hash_path)):
        write(hash_path, f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {MANIFEST}\n".encode())
