"""Each part of `bench.all` is a command that exists, with options that it knows."""

import argparse
import runpy
import sys
from pathlib import Path

import pytest

import bench.all
from bench.all import parts

UNKNOWN = "--no-such-option"


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("placement", ["cpu", "device"])
def test_parts_are_given_options_that_they_know(
    placement: str, quick: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = argparse.Namespace(model=None, out=Path("figures"), placement=placement, quick=quick)
    for module, *arguments in parts(options).values():
        monkeypatch.setattr(sys, "argv", [module, UNKNOWN, *arguments])
        with pytest.raises(SystemExit):
            runpy.run_path(str(_file_of(module)), run_name="__main__")
        assert capsys.readouterr().err.rstrip().endswith(f"unrecognized arguments: {UNKNOWN}")


def _file_of(module: str) -> Path:
    folder = Path(bench.all.__file__).parent
    return next(file for file in (folder / f"{module}.py", folder / module / "__main__.py") if file.exists())
