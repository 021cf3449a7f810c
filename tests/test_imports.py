"""Which package may import which. The rules are the data below; the tests read all imports, also those in functions."""

import ast
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# package -> which of the project's other packages it may import
MAY_IMPORT: dict[str, set[str]] = {
    "csattn": set(),
    "offload": set(),
    "index_build": {"csattn"},
    "workers": {"csattn", "offload"},
}
# each imports nothing of the project but itself; every package may import them
GROUND_FLOORS = ("csattn.cpu", "csattn.cuda", "csattn.errors")
# the command line is the only entry point that may also build
FRONT_DOOR = ("workers/cli*.py", {"csattn", "offload", "index_build"})
IMPORTED_BY_NOTHING = {"tests", "bench"}

# heavy library -> the files of the packages that may import it
ADDRESSES: dict[str, tuple[str, ...]] = {
    "faiss": ("index_build/kmeans.py",),
    "ray": ("*_actor.py", "*/jobs.py", "workers/service/ray_*.py"),
    "fsspec": ("csattn/artifact/remote.py",),
    "cupy": ("csattn/cuda/__init__.py", "offload/cuda.py"),
    "triton": (
        "csattn/cuda/triton_start.py",
        "csattn/lightning/*triton_*.py",
        "workers/model/gpu/*.py",
    ),
    "typer": ("workers/cli*.py",),
    "fastapi": ("workers/api/app.py",),
    "llguidance": ("workers/serving/grammar.py",),
    "matplotlib": ("workers/plots.py",),
    "transformers": (
        "csattn/models/*.py",
        "index_build/capture.py",
        "workers/session_model.py",
    ),
}


def package_files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported_packages(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the ground floor or top-level package of every absolute import, at any depth."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names = [node.module]
        else:
            continue
        yield from ((node.lineno, _package(name)) for name in names)


def _package(name: str) -> str:
    """Return the ground floor, or else the top-level package, that a module belongs to."""
    return next((floor for floor in GROUND_FLOORS if f"{name}.".startswith(f"{floor}.")), name.split(".")[0])


def direction_faults(path: str, source: str) -> list[str]:
    """Describe the imports in the file at `path` (relative to the root) that break `MAY_IMPORT`."""
    package = _package(path.removesuffix(".py").replace("/", "."))
    allowed = FRONT_DOOR[1] if fnmatch(path, FRONT_DOOR[0]) else MAY_IMPORT.get(package, set())
    forbidden = (MAY_IMPORT.keys() | IMPORTED_BY_NOTHING) - allowed - {package}
    if package in GROUND_FLOORS:
        forbidden |= set(GROUND_FLOORS) - {package}
    return [
        f"{path}:{line} imports {target}; {package} may import only {sorted(allowed) or 'none of the packages'}"
        for line, target in imported_packages(source)
        if target in forbidden
    ]


def address_faults(path: str, source: str) -> list[str]:
    """Describe the imports of heavy libraries outside the files that `ADDRESSES` allows."""
    return [
        f"{path}:{line} imports {target}; only {', '.join(ADDRESSES[target])} may"
        for line, target in imported_packages(source)
        if target in ADDRESSES and not any(fnmatch(path, pattern) for pattern in ADDRESSES[target])
    ]


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_only_the_packages_that_they_may(package: str) -> None:
    files = package_files(package)
    assert files, f"the package {package} is gone; adapt the rules"
    faults = [fault for file in files for fault in direction_faults(str(file.relative_to(ROOT)), file.read_text())]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_heavy_libraries_are_imported_only_where_allowed(package: str) -> None:
    files = package_files(package)
    faults = [fault for file in files for fault in address_faults(str(file.relative_to(ROOT)), file.read_text())]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("csattn/search/run.py", "from workers.engine import step"),
        ("csattn/search/run.py", "def f():\n    import offload.blocks"),
        ("offload/blocks.py", "import csattn"),
        ("offload/blocks.py", "from csattn.batch import StepRows"),
        ("csattn/cuda/__init__.py", "from csattn.errors import ConfigError"),
        ("csattn/cpu/team.py", "from csattn import cpus"),
        ("csattn/cpu/tape.py", "from csattn.search.work import serve"),
        ("csattn/cpu/jit.py", "import csattn.cuda"),
        ("index_build/pipeline.py", "import numpy, workers"),
        ("workers/session.py", "if TYPE_CHECKING:\n    from index_build import pipeline"),
        ("workers/session.py", "from tests.artifact import synthetic"),
        ("csattn/index.py", "from bench.search import gate"),
    ],
)
def test_an_import_in_the_wrong_direction_is_detected(path: str, source: str) -> None:
    assert len(direction_faults(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("index_build/pipeline.py", "import faiss"),
        ("workers/evaluate.py", "def f():\n    from ray import serve"),
        ("workers/session.py", "import typer"),
        ("csattn/config.py", "import transformers.utils"),
        ("workers/cli.py", "import matplotlib.pyplot as plt"),
    ],
)
def test_a_heavy_import_elsewhere_is_detected(path: str, source: str) -> None:
    assert len(address_faults(path, source)) == 1


def test_allowed_imports_pass() -> None:
    assert not direction_faults("workers/cli.py", "from index_build.pipeline import build_artifact\nimport csattn")
    assert not direction_faults("csattn/search/run.py", "from csattn.index import ListIndex\nfrom . import kernels")
    assert not direction_faults("offload/gather.py", "from csattn.cuda import cuda_kernel")
    assert not direction_faults("offload/codecs/bits.py", "from csattn.cpu.llvm import call")
    assert not direction_faults("csattn/cpu/jit.py", "from csattn.cpu.source_stamp import source_stamp")
    assert not address_faults("workers/search_actor.py", "import ray")
    assert not address_faults("workers/cli_build.py", "import typer, rich")


@pytest.mark.parametrize("name", ["index_build", "workers", "workers.engine"])
def test_lazily_loaded_names_are_listed_by_dir(name: str) -> None:
    module = import_module(name)
    assert set(module.__all__) <= set(dir(module))
