"""What a user gets from an installed wheel, without a checkout."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("csattn", "offload", "index_build", "workers")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("dist")
    made = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", to, ROOT], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return to


def in_checkout(*paths: str) -> set[str]:
    return set(subprocess.check_output(["git", "ls-files", *paths], cwd=ROOT, text=True).split())


def test_a_wheel_holds_all_files_of_the_packages_and_its_commit(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        names = {name for name in files.namelist() if ".dist-info/" not in name}
        commit = files.read("csattn/COMMIT").decode().strip().removesuffix("-dirty")
    assert names - {"csattn/COMMIT"} == in_checkout(*PACKAGES)
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True)
    assert len(commit) == 12 and head.startswith(commit)


def test_a_source_distribution_holds_packages_docs_bench_and_tests(built: Path) -> None:
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as files:
        names = {name.split("/", 1)[1] for name in files.getnames()}
    assert in_checkout(*PACKAGES, "docs", "bench", "tests", "*.md", "Makefile", "constraints.txt") <= names
    assert "csattn/COMMIT" in names
