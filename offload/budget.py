"""Memory plans and what the machine has available: checked before any work, so that no decode fails midway."""

import os
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

from csattn.cuda import free_device_bytes
from offload.errors import MemoryPlanError

GIB = 1 << 30
SPARE_BYTES = 384 << 20  # of host memory, for steps, answers and other small things: up to 320 MiB were measured
_REMEDIES = "choose a smaller slot cache, another placement, a shorter context or fewer concurrent requests"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """The memory that one part of an engine takes."""

    name: str  # as it reads in a sentence: "the slot cache"
    device_bytes: int = 0
    pinned_bytes: int = 0  # of host memory, in addition to what is allocated already

    def __post_init__(self) -> None:
        assert self.device_bytes >= 0 and self.pinned_bytes >= 0, f"{self.name} takes a negative number of bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class AvailableMemory:
    """The free memory of a machine."""

    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of all parts of an engine."""

    parts: tuple[MemoryPart, ...]
    max_context_len: int  # rows of the longest context that the parts are sized for

    @property
    def device_bytes(self) -> int:
        return sum(part.device_bytes for part in self.parts)

    @property
    def pinned_bytes(self) -> int:
        return sum(part.pinned_bytes for part in self.parts)

    def __repr__(self) -> str:
        return (
            f"<MemoryPlan {self.device_bytes / GIB:.2f} GiB on the device, {self.pinned_bytes / GIB:.2f} GiB pinned, "
            f"contexts of up to {self.max_context_len} rows>"
        )

    def require(self, available: AvailableMemory) -> None:
        """Raise MemoryPlanError if the device or the host has less memory than the plan needs."""
        needed = [(part.name, part.device_bytes) for part in self.parts]
        _require("device memory", needed, available.device_bytes)
        needed = [(part.name, part.pinned_bytes) for part in self.parts]
        _require("pinned host memory", needed, available.host_bytes)


def _require(place: str, parts: Sequence[tuple[str, int]], available_bytes: int) -> None:
    needed_bytes = sum(num_bytes for _, num_bytes in parts)
    if needed_bytes <= available_bytes:
        return
    name, biggest_bytes = max(parts, key=lambda part: part[1])
    raise MemoryPlanError(
        f"the plan needs {_amount(needed_bytes)} of {place} and {_amount(available_bytes)} is available; the largest "
        f"part is {name} with {_amount(biggest_bytes)}: {_REMEDIES}"
    )


def _amount(num_bytes: int) -> str:
    return f"{num_bytes:,} bytes ({num_bytes / GIB:.1f} GiB)"


def available_memory(device: torch.device) -> AvailableMemory:
    """Return the free memory of this machine."""
    return AvailableMemory(device_bytes=free_device_bytes(device), host_bytes=host_memory_bytes())


def require_host_memory(what: str, needed_bytes: int, remedy: str) -> None:
    """Raise MemoryPlanError unless `needed_bytes` and SPARE_BYTES of host memory are available to this process."""
    available_bytes = host_memory_bytes()
    if needed_bytes + SPARE_BYTES > available_bytes:
        raise MemoryPlanError(
            f"{what} needs {_amount(needed_bytes)} of host memory and {_amount(available_bytes)} is available, "
            f"of which {_amount(SPARE_BYTES)} stay free for the work itself; {remedy}"
        )


def host_memory_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the host memory that this process can still allocate, by MemAvailable and its control groups' limits."""
    meminfo = proc / "meminfo"
    if not meminfo.exists():  # not Linux: all physical memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    system_bytes = int(lines["MemAvailable"].split()[0]) * 1024
    return min(system_bytes, *(_left_bytes(group, account) for group, account in _control_groups(proc, cgroup)))


@dataclass(frozen=True, slots=True)
class _Account:
    """The names of a control group's memory files."""

    limit: str
    used: str
    files: tuple[str, ...]  # keys of memory.stat: page cache, which the system reclaims when memory is needed


_ACCOUNTS = {
    "": _Account("memory.max", "memory.current", ("inactive_file", "active_file")),  # cgroup v2
    "memory": _Account("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}


def _control_groups(proc: Path, cgroup: Path) -> Iterator[tuple[Path, _Account]]:
    """Yield this process's control groups, from its own up to the root: any of them may have a limit.

    In a container, the paths may be those of the host, which do not exist there: its own group is then the root.
    """
    listed = proc / "self" / "cgroup"
    lines = listed.read_text().splitlines() if listed.exists() else []
    paths = {name: path for _, names, path in (line.split(":", 2) for line in lines) for name in names.split(",")}
    for name, account in _ACCOUNTS.items():
        path = PurePosixPath(paths.get(name, "/"))
        for level in (path, *path.parents):
            yield cgroup / name / level.relative_to("/"), account


def _left_bytes(group: Path, account: _Account) -> int:
    try:
        limit = (group / account.limit).read_text().strip()
        used = int((group / account.used).read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:  # the group does not exist here, or has no limit
        return 1 << 62
    if limit == "max":
        return 1 << 62
    return max(0, int(limit) - used + sum(int(counts.get(name, 0)) for name in account.files))


def locked_limit_bytes() -> int:
    """Return RLIMIT_MEMLOCK. Not every system counts CUDA's page locks against it, so use it only in messages."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return 1 << 62 if limit == resource.RLIM_INFINITY else limit
