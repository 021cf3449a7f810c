"""Everything that the checks judge, gathered without loading any library into this process."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from csattn.cpus import available_cpus
from workers.child import module_command

IMPORTS = ("faiss", "cupy", "triton", "ray")
_FAMILIES = ("faiss", "cupy", "torch", "triton", "numba", "ray", "csattn")
_PROBE_TIMEOUT_S = 120.0
_running: set[subprocess.Popen[str]] = set()  # probes

Answer = Mapping[str, Any]  # of a probe; {"error": sentence} if it failed


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as the driver reports it."""

    name: str
    driver: str
    free_mib: int
    total_mib: int
    link: str = ""  # PCIe generation and width, if the driver reports them


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A machine, before any judgement."""

    python: tuple[int, int]
    packages: Mapping[str, str]  # installed distributions that matter here, with their versions
    gpus: tuple[Gpu, ...] = ()  # those that the driver shows
    # of torch, numba, memory, store, kept, and those of IMPORTS
    probes: Mapping[str, Answer] = field(default_factory=dict)
    store: Path = Path("store")
    openmp_waits: str | None = "passive"  # OMP_WAIT_POLICY
    num_cpus: int = 1  # that the process may run on
    cpu_quota: float | None = None  # the container's limit of CPU time, in CPUs; None: no limit
    shared_memory_bytes: int | None = None  # free in /dev/shm


def gather_facts(store: Path) -> Facts:
    """Gather all facts. Takes a few seconds: each library is loaded once, in a process of its own."""
    wanted: dict[str, tuple[str, ...]] = {name: (name,) for name in ("torch", "numba", "memory")}
    wanted |= {name: (name, str(store)) for name in ("store", "kept")} | {name: ("import", name) for name in IMPORTS}
    with ThreadPoolExecutor(min(4, available_cpus())) as pool, _ended_probes(pool):
        answers = {name: pool.submit(ask, *probe) for name, probe in wanted.items()}
        return Facts(
            python=sys.version_info[:2],
            packages=installed_packages(),
            gpus=visible_gpus(),
            probes={name: answer.result() for name, answer in answers.items()},
            store=store,
            openmp_waits=os.environ.get("OMP_WAIT_POLICY"),
            num_cpus=available_cpus(),
            cpu_quota=cpu_quota(),
            shared_memory_bytes=shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None,
        )


@contextmanager
def _ended_probes(pool: ThreadPoolExecutor) -> Iterator[None]:
    """If the block is interrupted, begin no more probes and end those that run: the pool would wait for all."""
    try:
        yield
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in tuple(_running):
            process.kill()
        raise


def ask(probe: str, *arguments: str, timeout_s: float = _PROBE_TIMEOUT_S) -> Answer:
    """Run a probe in its own process; return its answer, or why it failed."""
    command, environment = module_command("workers.doctor.probes", probe, *arguments)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, errors="replace", env=environment) as process:
        _running.add(process)
        try:
            printed, complaints = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return {"error": f"no answer within {timeout_s:g} s"}
        finally:
            _running.discard(process)
    if process.returncode < 0:
        return {"error": f"the process was killed by signal {-process.returncode}"}
    if process.returncode:
        lines = complaints.strip().splitlines()
        return {"error": lines[-1][:300] if lines else f"exit code {process.returncode}"}
    answers = [line for line in printed.splitlines() if line.startswith("{")]  # libraries print other lines
    answer: Answer = json.loads(answers[-1]) if answers else {"error": "the process ended without an answer"}
    return answer


def installed_packages() -> dict[str, str]:
    """Return versions of the distributions that matter; several may contain the same library."""
    found = {}
    for distribution in distributions():
        name = str(distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name.split("-")[0] in _FAMILIES:
            found[name] = distribution.version
    return dict(sorted(found.items()))


def visible_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that nvidia-smi lists; none if it is missing or fails."""
    if shutil.which("nvidia-smi") is None:
        return ()
    wanted = "name,driver_version,memory.free,memory.total,pcie.link.gen.max,pcie.link.width.max"
    query = ["nvidia-smi", f"--query-gpu={wanted}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_gpus(done.stdout)


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Parse lines of `name, driver, free MiB, total MiB, link generation, link width`; skip others."""
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines()]
    return tuple(
        Gpu(name, driver, int(free), int(total), f"{link}.0 x{width}" if link.isdigit() and width.isdigit() else "")
        for name, driver, free, total, link, width in (row for row in rows if len(row) == 6)
        if free.isdigit() and total.isdigit()
    )


def cpu_quota(cgroup: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the CPU time that the container may use, in CPUs; None if there is no limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)
