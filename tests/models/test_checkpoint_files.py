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


def in_torch(content: object, num_bytes: int | None = None) -> Callable[[Path], object]:
    """Replace the weights by a file of torch with this content, or by its first bytes."""

    def damage(folder: Path) -> None:
        only_torch(folder)
        torch.save(content, file := folder / "pytorch_model.bin")
        file.write_bytes(file.read_bytes()[:num_bytes])

    return damage


def of_torch_shards(folder: Path) -> None:
    only_torch(folder)
    (folder / "pytorch_model.bin").rename(folder / "pytorch_model.bin.index.json")
    (folder / "pytorch_model.bin.index.json").write_text('{"weight_map": {"lm_head.weight": "pytorch_model-1.bin"}}')


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
        (in_torch({}, 0), r"pytorch_model\.bin is no file of weights as torch.save writes them, .*; download it again"),
        (in_torch({}, 300), r"pytorch_model\.bin is no file of weights .* or only a part; download it again"),
        (in_torch(Path()), "its .bin files hold other things than tensors, .*; save it as safetensors"),
        (of_torch_shards, r"pytorch_model-1\.bin is not there; download it again"),
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


@pytest.mark.parametrize("as_zip", [True, False])
def test_weights_in_torchs_own_formats_are_loaded(as_zip: bool, tmp_path: Path) -> None:
    want, file = load_model(save(tmp_path)).fingerprint, tmp_path / "pytorch_model.bin"
    torch.save(load_file(tmp_path / "model.safetensors"), file, _use_new_zipfile_serialization=as_zip)
    (tmp_path / "model.safetensors").unlink()
    assert load_model(tmp_path).fingerprint == want
