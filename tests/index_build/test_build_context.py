"""A context built from Python, as docs/use.md shows it."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from csattn import torch_threads
from csattn.artifact import read_manifest
from csattn.errors import ConfigError, ContextError
from csattn.torch_threads import preserve_num_threads
from index_build import build_context
from index_build.inputs import read_text
from tests.artifact.faults import fork
from tests.tiny import loaded
from workers import csattn_session
from workers.cli.options import directory

USE = Path(__file__).parents[2] / "docs" / "use.md"
TEXT = "Lamp 7 is lit at 9 o'clock by keeper 12. " * 9


def test_the_documented_example_builds_a_context_and_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("report.txt").write_text(TEXT)
    names: dict[str, Any] = {"loaded": loaded(), "csattn_session": csattn_session}
    (example,) = [
        code for code in re.findall(r"```python\n(.*?)```", USE.read_text(), re.DOTALL) if "Who wrote it?" in code
    ]
    exec(example, names)
    report = names["report"]
    notes = read_manifest(report.place).build_notes
    assert notes["source"] == "report.txt" and notes["wrapping"] == "system" and notes["preset"] == "default"
    assert names["token_ids"].shape[1] > read_manifest(report.place).spec.context_len
    assert not report.reused and build_context(loaded(), TEXT, "store").reused
    other = build_context(loaded(), TEXT, "store", preset="lists", chat=False)
    assert read_manifest(other.place).spec.index_config.layout == "lists"
    assert read_manifest(other.place).build_notes["wrapping"] == "none"


def test_the_documented_notebook_example_leaves_a_session_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("report.txt").write_text(TEXT)
    names: dict[str, Any] = {"loaded": loaded()}
    section = USE.read_text().split("### In a notebook\n")[1]
    exec(re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0], names)
    assert names["bar"].n == pytest.approx(1)
    assert [row["keep"] for row in names["rows"]] == [0.01, 0.02, 0.1]
    with names["opened"]:
        assert names["session"].ask("Who wrote it?")
    assert not names["session"].is_open


def test_a_source_may_be_a_path(tmp_path: Path) -> None:
    """It was refused by JSON, after the whole build."""
    report = build_context(loaded(), TEXT, tmp_path, source=Path("texts") / "report.txt")
    assert read_manifest(report.place).build_notes["source"] == "texts/report.txt"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"source": 5}, "source is the name of the text, got 5; give it as text, or leave it out"),
        ({"source": b"report.txt"}, "source is the name of the text, got b'report.txt'"),
        ({"chat": "no"}, "chat must be one of True, False, got 'no'"),
        ({"chat": None}, "chat must be one of True, False, got None"),
    ],
)
def test_options_of_another_type_are_refused_before_anything_is_built(tmp_path: Path, options, sentence) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build_context(loaded(), TEXT, tmp_path / "store", **options)
    assert not (tmp_path / "store").exists()


def test_a_tilde_in_a_store_path_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`~` is expanded, instead of making a directory of that name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    report = build_context(loaded(), TEXT, "~/store")
    assert report.path.parent == tmp_path / "store" and report.path.is_dir()
    assert directory("~/store") == tmp_path / "store"  # for a `~` that the shell left
    with csattn_session(loaded(), f"~/store/{report.artifact_id[:4]}") as session:
        assert session.artifact.path == report.path


def test_a_build_reports_increasing_progress_up_to_1(tmp_path: Path) -> None:
    shares: list[float] = []
    build_context(loaded(), TEXT, tmp_path, on_progress=lambda progress: shares.append(progress.share))
    assert shares == sorted(shares) and 0 < shares[0] < shares[-1] == 1


@pytest.mark.parametrize(
    ("model", "store", "sentence"),
    [
        (lambda: loaded().model, "store", "the model is what `load_model` returned, got a LlamaForCausalLM"),
        (loaded, None, "a directory or a URL, got None; give its path"),
        (loaded, "", "a directory or a URL, got ''; give its path"),
        (loaded, "a\0b", "a directory or a URL, got 'a.x00b'; give its path"),
        (loaded, "\ud800", "a directory or a URL, got '.ud800'; give its path"),
    ],
)
def test_an_invalid_model_or_store_is_refused(tmp_path, monkeypatch, model, store, sentence) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=sentence):
        build_context(model(), TEXT, store)


def test_a_context_that_is_not_text_or_has_the_wrong_length_is_refused(tmp_path: Path) -> None:
    for text, sentence in (
        (tmp_path, "a context must be text, got a value of type PosixPath; give a str"),
        (" ", "holds no text"),
        ("\udcff", "is not UTF-8 text"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            build_context(loaded(), text, tmp_path / "store")  # type: ignore[arg-type]
    with pytest.raises(ContextError, match="an index needs at least"):
        build_context(loaded(), "short", tmp_path / "store")
    most = loaded().geometry.max_positions
    with pytest.raises(ContextError, match=f"the context has {most} tokens and"):
        build_context(loaded(), "x" * most, tmp_path / "store", chat=False)
    with pytest.raises(ContextError, match=f"the context has more than {most} tokens and"):  # counting stops early
        build_context(loaded(), "x" * 9 * most, tmp_path / "store", chat=False)
    for text in ("\n" * 9 * most + TEXT, TEXT + "\n" * 9 * most):  # blank lines are stripped
        assert build_context(loaded(), text, tmp_path / "store").path.is_dir()


def test_a_text_with_windows_line_ends_and_a_byte_order_mark_is_the_same_context(tmp_path: Path) -> None:
    text = TEXT.replace(". ", ".\n")
    (tmp_path / "text").write_text("\ufeff" + text.replace("\n", "\r\n"), newline="")
    assert read_text(str(tmp_path / "text")) == text
    assert not build_context(loaded(), text, tmp_path).reused
    assert build_context(loaded(), (tmp_path / "text").read_bytes().decode(), tmp_path).reused


def test_a_build_in_a_fork_of_a_builder_is_refused_instead_of_hanging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded()

    def in_child() -> None:
        signal.alarm(60)
        assert build_context(model, TEXT, tmp_path).reused
        with pytest.raises(ConfigError, match="forked from one that has built"):
            build_context(model, f"{TEXT}More.", tmp_path)
        torch.set_num_threads(1)
        assert not build_context(model, f"{TEXT}More.", tmp_path).reused

    monkeypatch.setattr(torch_threads, "_pid_with_threads", None)
    with preserve_num_threads():
        torch.set_num_threads(2)
        build_context(model, TEXT, tmp_path)
        assert os.waitpid(fork(in_child), 0)[1] == 0


def test_reusing_an_artifact_does_not_mark_the_process_as_a_builder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded()
    build_context(model, TEXT, tmp_path)
    monkeypatch.setattr(torch_threads, "_pid_with_threads", None)
    with preserve_num_threads():
        torch.set_num_threads(2)
        assert build_context(model, TEXT, tmp_path).reused
    assert torch_threads._pid_with_threads is None


def test_an_unknown_attribute_of_index_build_raises_attribute_error() -> None:
    import index_build

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = index_build.nothing
