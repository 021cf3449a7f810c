"""Weights files that are missing, damaged or not fetched are named, with what to do."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from csattn.errors import ModelError
from csattn.models import load_model
from csattn.models.loader import read_config
from tests.tiny import byte_tokenizer, make_model, save

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 548105171\n"
INDEX, FIRST = "model.safetensors.index.json", "model-00001-of-00006.safetensors"


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("shards")
    make_model().save_pretrained(to, max_shard_size="100KB")
    byte_tokenizer().save_pretrained(to)
    assert (to / FIRST).is_file()
    return to


def only_torch(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_text(POINTER)


def of_another_layout(folder: Path) -> None:
    (folder / INDEX).unlink()
    for file in folder.glob("*.safetensors"):
        file.unlink() if file.name != FIRST else file.rename(folder / "consolidated.safetensors")


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda of: (of / FIRST).write_text(POINTER), f"{FIRST} is a pointer of git-lfs .*; run `git lfs pull`"),
        (lambda of: (of / INDEX).write_text(POINTER), f"{INDEX} is a pointer of git-lfs"),
        (lambda of: (of / "tokenizer.json").write_text(POINTER), "tokenizer.json is a pointer of git-lfs"),
        (lambda of: (of / "config.json").write_text(POINTER), "config.json is a pointer of git-lfs"),
        (only_torch, "pytorch_model.bin is a pointer of git-lfs"),
        (lambda of: (of / FIRST).unlink(), f"{FIRST} is not there; download it again"),
        (lambda of: (of / FIRST).write_bytes((of / FIRST).read_bytes()[:-1]), f"{FIRST} cannot be read as safetensors"),
        (lambda of: (of / FIRST).write_bytes(b""), f"{FIRST} cannot be read as safetensors .*; download it again"),
        (lambda of: (of / INDEX).write_text("{}"), f"{INDEX} does not name the file of each tensor .*; download"),
        (lambda of: (of / INDEX).write_text("["), f"{INDEX} does not name the file of each tensor"),
        (lambda of: (of / INDEX).unlink(), f"has no {INDEX} beside {FIRST}; download all of it"),
        (of_another_layout, f"has no {INDEX} beside consolidated.safetensors"),
        (lambda of: [file.unlink() for file in of.glob("*.safe*")], f"no model.safetensors, {INDEX} or pytorch_model"),
    ],
)
def test_files_that_are_not_there_or_not_whole_are_named(
    damage: Callable[[Path], object], match: str, shards: Path, tmp_path: Path
) -> None:
    shutil.copytree(shards, tmp_path, dirs_exist_ok=True)
    damage(tmp_path)
    with pytest.raises(ModelError, match=match) as raised:
        load_model(tmp_path)
    assert "\n" not in str(raised.value)


def test_a_gguf_file_that_is_not_fetched_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path))
    (file := tmp_path / "model.gguf").write_text(POINTER)
    for use in (load_model, read_config):
        with pytest.raises(ModelError, match=r"model\.gguf is a pointer of git-lfs .*; run `git lfs pull`"):
            use(str(file))


def test_weights_in_torchs_own_format_are_loaded(tmp_path: Path) -> None:
    want = load_model(save(tmp_path)).fingerprint
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert load_model(tmp_path).fingerprint == want
