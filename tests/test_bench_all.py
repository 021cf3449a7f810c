"""Each part of `bench.all` is a command that exists, with options that it accepts."""

import argparse
import runpy
import sys
from pathlib import Path

import pytest

import bench.all
from bench.all import parts
from bench.timing import GateError

UNKNOWN = "--no-such-option"


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("placement", ["cpu", "device"])
def test_each_part_accepts_the_options_that_it_is_given(
    placement: str, quick: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = argparse.Namespace(model=None, out=Path("figures"), placement=placement, quick=quick)
    for module, *arguments in parts(options).values():
        monkeypatch.setattr(sys, "argv", [module, UNKNOWN, *arguments])
        with pytest.raises(SystemExit):
            runpy.run_path(str(_file_of(module)), run_name="__main__")
        assert capsys.readouterr().err.rstrip().endswith(f"unrecognized arguments: {UNKNOWN}")


def test_a_failed_part_does_not_stop_the_others_and_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str, command: list[str], out: Path) -> str:
        if name == "codecs":
            raise GateError("codecs ended with 1")
        return f"## {name}\n"

    monkeypatch.setattr(bench.all, "run", run)
    monkeypatch.setattr(sys, "argv", ["all", "--out", str(tmp_path), "--only", "codecs,rounding", "--placement", "cpu"])
    with pytest.raises(SystemExit, match="1 of 2 parts failed: codecs ended with 1"):
        bench.all.main()
    assert (tmp_path / "report.md").read_text() == (
        "# SmolLM2-135M\n\n## codecs\n\nFailed: codecs ended with 1\n\n## rounding\n"
    )


def test_figures_of_other_options_are_not_mixed_into_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def run(name: str, command: list[str], out: Path) -> str:
        ran.append(name)
        return bench.all.shown_command(name, command, out)

    monkeypatch.setattr(bench.all, "run", run)
    given = ["all", "--out", str(tmp_path), "--only", "rounding", "--placement", "cpu"]
    for words in (["--quick"], ["--quick"]):
        monkeypatch.setattr(sys, "argv", [*given, *words])
        bench.all.main()
    assert ran == ["rounding"]
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(SystemExit):
        bench.all.main()
    assert "rounding.md has figures of another command; give its options, or another --out" in capsys.readouterr().err


def _file_of(module: str) -> Path:
    folder = Path(bench.all.__file__).parent
    return next(file for file in (folder / f"{module}.py", folder / module / "__main__.py") if file.exists())
