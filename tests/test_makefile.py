"""What `make demo` prints when it cannot continue."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# makes a virtual environment whose pip fails
PYTHON = """#!/bin/sh
case "$*" in
  "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  *pip*) exit 1 ;;
esac
"""


@pytest.mark.parametrize(
    ("system", "words"), [("Linux", "make TORCH_CPU_INDEX=URL demo"), ("Darwin", "on a Mac it needs Apple silicon")]
)
def test_a_failed_install_of_torch_prints_what_to_do(tmp_path: Path, system: str, words: str) -> None:
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "bin").mkdir()
    for name, program in (("uname", f"#!/bin/sh\necho {system}\n"), ("python", PYTHON)):
        (tmp_path / "bin" / name).write_text(program)
        (tmp_path / "bin" / name).chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["make", "PYTHON=python", "demo"], cwd=tmp_path, env={"PATH": path}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and words in done.stdout, done
