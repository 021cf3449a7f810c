"""What all tests share: repeatable randomness, threads that do not fight, no network, no GPU where there is none."""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager

# before torch, faiss or numba are loaded
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("RAY_worker_niceness", "0")  # by default Ray's workers yield to all other tests
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # other processes have the other cores

import numpy as np
import pytest
import torch
from hypothesis import settings

from tests.ampere import take_for_ampere
from tests.cuda_on_cpu.emulated import Emulator

# below nohup and in a shell's background these are ignored, and would be by what tests start
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is loaded: kernels then run as Python

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


# Files of tests that wait for other processes, most of the time: every third one, as long as there are any. The longest
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


@pytest.fixture
def as_ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, for one test; kernels that were made before stay what they were."""
    take_for_ampere(monkeypatch)


@pytest.fixture
def rng() -> np.random.Generator:
    """The same numbers in every run."""
    return np.random.default_rng(20_240_607)


@contextmanager
def handlers_kept() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(scope="module", autouse=True)
def kept_process() -> Generator[None]:
    """What a file does to its process goes with it: Ray, and who starts it, leave variables that another file's Ray and
    its processes would read, and who runs a command looks less for garbage from then on."""
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
    """Signals do what they did: a service that a test runs in this process takes them for itself, and keeps them."""
    with handlers_kept():
        yield


@pytest.fixture(autouse=True)
def fixed_torch_seed() -> None:
    torch.manual_seed(20_240_607)


@pytest.fixture(scope="session")
def emulator(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    """Compiles each kernel once for all tests, those of other processes and of later runs too."""
    cache = getattr(pytestconfig, "cache", None)
    return Emulator(tmp_path_factory.mktemp("kernels") if cache is None else cache.mkdir("kernels"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: garbage is looked for once, instead of a hundred times as it grows."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """... and need not be looked for in it after every test, nor before the process ends, for seconds."""
    gc.freeze()
    atexit.register(gc.freeze)  # later than pytest collects garbage for the last time


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    files = list(dict.fromkeys(item.nodeid.partition("::")[0] for item in items))
    waiting = dict.fromkeys(file for start in WAITING for file in files if file.startswith(start))
    places = {file: 3 * i for i, file in enumerate(waiting)}
    others = (file for file in reversed(files) if file not in places)  # most of the long ones come last
    places |= {file: i + i // 2 + 1 for i, file in enumerate(others)}
    items.sort(key=lambda item: places[item.nodeid.partition("::")[0]])
    for item in items:
        if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="this machine has no CUDA device"))
        if item.get_closest_marker("large_gpu") is not None and item.config.getoption("--as-ampere"):
            item.add_marker(pytest.mark.skip(reason="the GPU is taken for a small one"))
