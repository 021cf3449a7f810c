"""What all tests share: fixed seeds, threads that do not compete for cores, no network, skipped tests without a GPU."""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager

# set before torch, faiss or numba are loaded
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("RAY_worker_niceness", "0")  # by default Ray's workers yield to all other tests
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # other test processes use the other cores

import numpy as np
import pytest
import torch
from hypothesis import settings

from csattn.cpu import compile_together
from tests.ampere import take_for_ampere
from tests.cuda_on_cpu.emulated import Emulator
from tests.interpreted import interpret_faster

# under nohup and in a shell's background these signals are ignored, and processes that tests start would inherit that
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # set before triton is loaded: kernels then run as Python

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


# Test files that mostly wait for other processes. Every third file to run is one of them, while they last. The longest
# come first, so that none of them is left at the end.
WAITING = (
    "tests/workers/service/test_services.py",
    "tests/index_build/test_jobs.py",
    "tests/test_bench_spread.py",
    "tests/test_bench_turns.py",
    "tests/workers/searchers/",
    "tests/workers/serving/test_contexts.py",
    "tests/workers/serving/test_standby.py",
    "tests/workers/test_cli",
    "tests/artifact/test_interrupted_build.py",
    "tests/workers/service/",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--as-ampere", action="store_true", help="treat the GPU as an older and smaller one")


@pytest.fixture(scope="session", autouse=True)
def taken_for_ampere(pytestconfig: pytest.Config) -> Generator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        if pytestconfig.getoption("--as-ampere"):
            take_for_ampere(monkeypatch)
        yield


@pytest.fixture(scope="session", autouse=True)
def same_on_all_cpus() -> Generator[None]:
    """Let `auto` be the dtype that it is on a CPU without instructions for bfloat16."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("csattn.models.loader.multiplies_bfloat16", lambda: False)
        yield


@pytest.fixture
def as_ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the GPU as Ampere for one test; kernels that were compiled before are unchanged."""
    take_for_ampere(monkeypatch)


@pytest.fixture
def rng() -> np.random.Generator:
    """Generate the same numbers in every run."""
    return np.random.default_rng(20_240_607)


@contextmanager
def handlers_kept() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def no_more_processes_than_cores() -> Generator[None]:
    """Test processes wait for the first of them that compiles a kernel, and start no others."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(compile_together, "MOST_OTHERS", 0)
        yield


@pytest.fixture(scope="session", autouse=True)
def kernels_interpreted_faster() -> Generator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        interpret_faster(monkeypatch)
        yield


@pytest.fixture(scope="module", autouse=True)
def kept_process() -> Generator[None]:
    """Undo what a test file changes in its process. Ray and its callers leave environment variables that the Ray
    of another file would read; the command line raises the garbage collector's thresholds."""
    environment, threshold, hook = dict(os.environ), gc.get_threshold(), sys.excepthook
    with handlers_kept():
        yield
    for name in os.environ.keys() - environment:
        del os.environ[name]
    os.environ.update(environment)
    gc.set_threshold(*threshold)
    sys.excepthook = hook


@pytest.fixture(autouse=True)
def kept_handlers() -> Generator[None]:
    """Restore signal handlers after each test: a service that a test runs in this process replaces them."""
    with handlers_kept():
        yield


@pytest.fixture(autouse=True)
def fixed_torch_seed() -> None:
    torch.manual_seed(20_240_607)


@pytest.fixture(scope="session")
def emulator(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    """Compile each kernel once for all tests, including those of other processes and of later runs."""
    cache = getattr(pytestconfig, "cache", None)
    return Emulator(tmp_path_factory.mktemp("kernels") if cache is None else cache.mkdir("kernels"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disable the garbage collector while modules are imported: they stay, and would be scanned a hundred times."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Exempt imported objects from garbage collection, which would take seconds after tests and at exit."""
    gc.freeze()
    atexit.register(gc.freeze)  # runs after pytest's last garbage collection


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    files = list(dict.fromkeys(item.nodeid.partition("::")[0] for item in items))
    waiting = dict.fromkeys(file for start in WAITING for file in files if file.startswith(start))
    places = {file: 3 * i for i, file in enumerate(waiting)}
    others = (file for file in reversed(files) if file not in places)  # most of the long files are late in the list
    places |= {file: i + i // 2 + 1 for i, file in enumerate(others)}
    items.sort(key=lambda item: places[item.nodeid.partition("::")[0]])
    for item in items:
        if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="this machine has no CUDA device"))
        if item.get_closest_marker("large_gpu") is not None and item.config.getoption("--as-ampere"):
            item.add_marker(pytest.mark.skip(reason="the GPU is taken for a small one"))
