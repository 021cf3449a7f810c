"""GGUF files are converted once, to directories that are whole, or the reason is told."""

import errno
import hashlib
import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gguf
import pytest
import torch
from safetensors import SafetensorError
from transformers import LlamaForCausalLM

from csattn.errors import ModelError
from csattn.models import gguf_file, load_model
from csattn.models.loader import is_to_be_converted, read_config
from tests.models.gguf_files import EMBEDDING, gguf_of, write_gguf
from tests.tiny import make_model


@pytest.mark.parametrize("name", ["MODEL.GGUF", "Modèl [1].v2.gguf"])
def test_a_gguf_file_may_have_any_name_that_ends_so(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path))
    tensors, its = gguf_of(make_model("llama"))
    assert load_model(write_gguf(tmp_path / name, tensors, **its)).name == str(tmp_path / name)


def test_a_gguf_file_is_converted_per_dtype_but_not_to_read_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path))
    tensors, its = gguf_of(make_model("llama"))
    file, made = str(write_gguf(tmp_path / "model.gguf", tensors, **its)), tmp_path / "models"
    assert read_config(file).num_hidden_layers == its["llama.block_count"] and not made.exists()
    few = load_model(file, "bfloat16").model.state_dict()
    assert len(list(made.iterdir())) == 1 and read_config(file, "bfloat16").dtype == torch.bfloat16
    assert is_to_be_converted(file, "float32") and not is_to_be_converted(file, "bfloat16")
    whole = load_model(file).model.state_dict()
    assert all(torch.equal(few[name], tensor.bfloat16()) for name, tensor in whole.items())
    load_model(file, "float16")
    assert len(list(made.iterdir())) == 2, "what is there in float32 serves for all"


def test_a_conversion_opens_the_gguf_file_and_maps_its_names_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path))
    tensors, its = gguf_of(make_model("llama"))
    file, made = write_gguf(tmp_path / "model.gguf", tensors, **its), []

    class Reader(gguf.GGUFReader):
        def __init__(self, path: Any) -> None:
            made.append(path)
            super().__init__(path)

    names = Mock(wraps=gguf.get_tensor_name_map)
    monkeypatch.setattr(gguf, "GGUFReader", Reader)
    monkeypatch.setattr(gguf, "get_tensor_name_map", names)
    load_model(file)
    assert made == [str(file)] and gguf.GGUFReader is Reader
    assert names.call_count == 1 and gguf.get_tensor_name_map is names


@pytest.mark.parametrize("lost", ["config.json", "tokenizer.json", "model.safetensors", "half of model.safetensors"])
def test_a_conversion_that_lost_a_file_is_made_again(
    lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs that clean caches remove single files."""
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path))
    tensors, its = gguf_of(make_model("llama"))
    file = str(write_gguf(tmp_path / "model.gguf", tensors, **its))
    want = load_model(file).fingerprint
    [made] = (tmp_path / "models").iterdir()
    (part := made / lost.split()[-1]).write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    if part.name == lost:
        part.unlink()
    assert is_to_be_converted(file, "float32") and load_model(file).fingerprint == want
    assert list((tmp_path / "models").iterdir()) == [made]


def test_gguf_files_of_equal_name_and_mtime_are_distinguished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files in two folders, and two in turn at the same path. Each caller gets its own copy of a config."""
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path))
    for folder, theta, more in (("a", 1e4, "x"), ("b", 5e5, "x"), ("b", 2e4, "x" * 99)):
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        file = write_gguf(Path("model.gguf"), EMBEDDING, llama__rope__freq_base=theta, x__y=more)
        os.utime(file, (1e9, 1e9))
        config = read_config("model.gguf")
        assert config.rope_parameters["rope_theta"] == theta
        config.rope_parameters["rope_theta"] = 3.0
        assert read_config("model.gguf").rope_parameters["rope_theta"] == theta


def test_a_file_replaced_by_one_of_the_same_size_and_time_is_converted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path / "cache"))
    sizes, loaded = set(), []
    for seed in (0, 1):
        tensors, its = gguf_of(make_model("llama", seed))
        file = write_gguf(tmp_path / "model.gguf", tensors, **its | {"llama.rope.freq_base": 1e4 + seed})
        os.utime(file, (1e9, 1e9))
        sizes.add(file.stat().st_size)
        loaded.append(load_model(file))
    assert len(sizes) == 1 and loaded[0].fingerprint != loaded[1].fingerprint
    assert [one.model.config.rope_parameters["rope_theta"] for one in loaded] == [1e4, 10001.0]
    assert len(list((tmp_path / "cache" / "models").iterdir())) == 1


def test_files_of_a_killed_conversion_are_removed_after_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path))
    for name, when in (("old", 1e9), ("new", time.time())):
        (left := tmp_path / "models" / f".converting-{name}").mkdir(parents=True)
        os.utime(left, (when, when))
    with pytest.raises(ModelError):
        load_model(write_gguf(tmp_path / "model.gguf"))
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".converting-new"]


def test_a_conversion_is_flushed_to_disk_before_it_is_renamed_into_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path))
    tensors, its = gguf_of(make_model("llama"))
    file, flushed, flush = write_gguf(tmp_path / "model.gguf", tensors, **its), list[Path](), os.fsync

    def note(descriptor: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    load_model(file)
    [made] = (tmp_path / "models").iterdir()
    scratch = flushed[0].parent
    assert scratch.name.startswith(".converting-")
    assert {*flushed} == {tmp_path / "models", scratch, *(scratch / path.name for path in made.iterdir())}
    assert flushed[-2:] == [scratch, tmp_path / "models"]


def test_a_conversion_in_an_older_format_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(gguf_file, "_convert", lambda gguf, dtype, target: None)
    file, its = write_gguf(tmp_path / "model.gguf"), tmp_path / "models"
    of = f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}"
    (its / f"model-{hashlib.sha256(of.encode()).hexdigest()[:12]}" / "part").mkdir(parents=True)
    (its / "model-of-another").mkdir()
    with pytest.raises(ModelError):
        load_model(file)
    assert [path.name for path in its.iterdir() if path.name != "model-of-another"] == [
        f"model-{hashlib.sha256(f'2 {of}'.encode()).hexdigest()[:12]}"
    ]


def test_an_unwritable_cache_is_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").touch()
    (tmp_path / "file").touch()
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot be written .* set CSATTN_CACHE to"):
        load_model(str(tmp_path / "model.gguf"))


_FULL = r"No space left .*; free some space in .* CSATTN_CACHE"


@pytest.mark.parametrize(
    ("free_bytes", "error", "match"),
    [
        (1 << 10, OSError("not reached"), r"0\.00 GiB, and .* CSATTN_CACHE"),
        (None, SafetensorError("I/O error: No space left on device (os error 28)"), _FULL),
        (None, OSError(errno.ENOSPC, "No space left on device"), _FULL),  # of the config
    ],
)
def test_a_conversion_without_disk_space_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int | None, error: Exception, match: str
) -> None:
    def save_pretrained(*_: object) -> None:
        raise error

    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(gguf_file, "available_bytes", lambda path: free_bytes)
    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", save_pretrained)
    tensors, its = gguf_of(make_model("llama"))
    with pytest.raises(ModelError, match=match):
        load_model(write_gguf(tmp_path / "model.gguf", tensors, **its))
    assert list((tmp_path / "models").iterdir()) == []
