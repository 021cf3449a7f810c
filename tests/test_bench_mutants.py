"""`bench.mutants`, on a package with one function and one test."""

import argparse
import json
import subprocess
from pathlib import Path

import pytest

from bench import mutants
from bench.timing import GateError


def make_repository(place: Path, monkeypatch: pytest.MonkeyPatch, test: str) -> list[mutants.Mutant]:
    """Commit a package with a test, and return the faults of the package."""
    one = "def one(x):\n    return x < 1\n"
    for name, text in (("offload/__init__.py", ""), ("offload/one.py", one), ("tests/offload/test_one.py", test)):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    author = "-c", "user.name=a", "-c", "user.email=a@b"
    for words in (["init", "-q"], ["add", "-A"], [*author, "commit", "-qm", "One"]):
        subprocess.run(["git", *words], cwd=place, check=True)
    monkeypatch.setattr(mutants, "ROOT", place)
    return list(mutants.mutants_of(place / "offload" / "one.py"))


def test_results_of_earlier_calls_stay_in_the_file(tmp_path, monkeypatch):
    test = "from offload.one import one\ndef test_one():\n    assert one(0) and not one(2)\n"
    less, bound = make_repository(tmp_path / "repository", monkeypatch, test)
    options = argparse.Namespace(seed=0, whole=False, processes=1, json=tmp_path / "mutants.json")
    for of in (less, bound):
        mutants.run([of], options)
    found = json.loads(options.json.read_text())
    assert [(of["before"], of["after"], of["noticed_by"]) for of in found["mutants"]] == [
        ("<", "<=", None),
        ("1", "2", None),
    ]
    assert (found["faults"], found["noticed"]) == (2, 0)


def test_tests_that_fail_without_a_fault_notice_nothing(tmp_path, monkeypatch):
    faults = make_repository(tmp_path, monkeypatch, "def test_one():\n    assert False\n")
    options = argparse.Namespace(seed=0, whole=False, processes=1, json=None)
    with pytest.raises(GateError, match=r"do not pass without a fault either: tests/offload/test_one.py::test_one"):
        mutants.run(faults, options)
