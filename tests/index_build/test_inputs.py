"""Inputs of a build: device, k-means, texts, options and token ids."""

import sys
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from csattn.artifact.manifest import canonical_json
from csattn.build_options import BuildOptions
from csattn.config import KMEANS_ON_CPU, ListConfig, SketchConfig
from csattn.errors import ConfigError, ContextError
from index_build.inputs import choose_device, make_config, read_text, read_tokens
from workers.cli import main


@pytest.mark.parametrize("has_gpu", [True, False])
def test_device_auto_chooses_a_gpu_if_available(has_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert choose_device("auto") == ("cuda" if has_gpu else "cpu")
    assert choose_device("cpu") == "cpu"


@pytest.mark.parametrize(("device", "words"), [("cuda", "has none"), ("gpu", "must be one of auto, cpu, cuda")])
def test_an_unavailable_or_unknown_device_is_refused(device: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=words):
        choose_device(device)


@pytest.mark.parametrize("data", [b"one\ntwo\n", b"one\r\ntwo\r\n", b"\xef\xbb\xbfone\r\ntwo\n"])
def test_line_ends_and_bom_are_normalised_from_files_and_stdin(data, tmp_path, monkeypatch) -> None:
    (tmp_path / "text").write_bytes(data)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=BytesIO(data)))
    assert read_text(str(tmp_path / "text")) == read_text("-") == "one\ntwo\n"
    with pytest.raises(ContextError, match="standard input holds no text"):
        read_text("-")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"%PDF-1.4\nall of it ASCII", "is not plain text; it is a PDF.* pdftotext"),
        (b"%PDF-1.4\n\xe2\xe3", r"is not UTF-8 text \(byte 9\); it is a PDF"),
        (b"PK\x03\x04\x14\0word/document.xml", "is not plain text; it is a ZIP archive, as DOCX"),
        (rb"{\rtf1\ansi hello}", "is not plain text; it is RTF"),
        (b"\x89PNG\r\n\x1a\n\0\0", r"is not UTF-8 text \(byte 0\); it is an image"),
        (b"\xff\xd8\xff\xe0\0\x10JFIF", r"is not UTF-8 text \(byte 0\); it is an image"),
        (b"\x1f\x8b\x08\0", r"is not UTF-8 text \(byte 1\); it is compressed by gzip"),
        (b"GGUF\x03\0\0\0", "is not plain text; it is a model, as --model takes it"),
        ("one".encode("utf-16-le"), "is not plain text; if it is UTF-16, .*-f UTF-16LE -t UTF-8"),
        ("one: \u2026".encode("utf-16-be") * 9, "if it is UTF-16, .*-f UTF-16BE -t UTF-8"),
        (
            b"a log\n" * 9 + b"\0" + b"and more\n",
            r"is not plain text; it has a NUL at byte 54; remove it: tr -d '\\0' < ",
        ),
        (b"\0" * 20, "it has a NUL at byte 0"),
        (b"\xef\xbb\xbf%PDF-1.4\nall of it ASCII", "is not plain text; it is a PDF"),
        ("\u96f2".encode("utf-16"), "is not UTF-8 text.* -f UTF-16 -t UTF-8"),
        ("\u671b\u9060\u93e1".encode("gb18030"), "is not UTF-8 text.*GB18030.* iconv -f ENCODING -t UTF-8"),
        (
            "one\n\u671b\u9060\u93e1".encode("iso2022_jp"),
            "is not plain text; .* -f ISO-2022-JP -t UTF-8",
        ),
    ],
)
def test_files_that_are_not_plain_text_are_refused_with_advice(data, words, tmp_path) -> None:
    (tmp_path / "text").write_bytes(data)
    with pytest.raises(ContextError, match=words):
        read_text(str(tmp_path / "text"))


def test_a_text_that_starts_like_a_gguf_file_is_accepted(tmp_path) -> None:
    (tmp_path / "text").write_bytes(b"GGUF is a file format")
    assert read_text(str(tmp_path / "text")) == "GGUF is a file format"


def test_kmeans_follows_the_device_unless_it_is_specified() -> None:
    made = [make_config("lists", {"kmeans": None}, device) for device in ("cpu", "cuda")]
    assert [config.kmeans for config in made if isinstance(config, ListConfig)] == [KMEANS_ON_CPU, "torch"]
    assert make_config("lists", {"kmeans": "faiss"}, "cuda") == ListConfig(kmeans="faiss")
    with pytest.raises(ConfigError, match="kmeans must be one of"):
        make_config("lists", {"kmeans": "best"}, "cpu")


def test_options_apply_only_to_their_own_preset() -> None:
    assert make_config("default", {"num_coarse": 0, "list_len": None}, "cuda") == SketchConfig(num_coarse=0)
    assert make_config("paper", {"list_len": 0.5}, "cpu").to_json()["list_len"] == 0.5
    whole = [canonical_json(make_config("lists", {"list_len": of}, "cpu").to_json()) for of in (1, 1.0)]
    assert whole[0] == whole[1], "a list of contexts may say 1, the command line says 1.0"
    for name, option in (("default", "list_len"), ("lists", "num_fine")):
        words = f"--{option.replace('_', '-')} has no meaning for the preset '{name}'; leave it out"
        with pytest.raises(ConfigError, match=words):
            make_config(name, {option: 1}, "cpu")


@pytest.mark.parametrize(
    "options",
    [
        BuildOptions(),
        BuildOptions(model="owner/name", preset="lists", dtype="bfloat16", chat=False, num_subspaces=4, kmeans="torch"),
        BuildOptions(num_fine=1, num_coarse=0, segment_len=2048, num_centroids=3, list_len=0.5),
    ],
)
def test_options_survive_a_round_trip_through_flags(options: BuildOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process is started with these flags of `csattn build`."""
    given: list[BuildOptions] = []

    def build(context: str, tokens: None, options: BuildOptions, *more: object, **others: object) -> None:
        given.append(options)
        raise SystemExit(0)

    monkeypatch.setattr("workers.cli.building.build", build)
    monkeypatch.setattr(sys, "argv", ["csattn", "build", "--context", "x.txt", *options.flags])
    with pytest.raises(SystemExit):
        main()
    assert given == [options]


@pytest.mark.parametrize("text", ["", "{", "[1.5]", "[-1]", "[true]", "null", pytest.param("[" * 5000, id="deep")])
def test_invalid_token_id_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "ids.json").write_text(text)
    with pytest.raises(ContextError, match="holds no token ids"):
        read_tokens(tmp_path / "ids.json")
