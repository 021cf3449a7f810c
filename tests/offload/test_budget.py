"""Plans that do not fit in memory are refused before any work, with advice."""

from pathlib import Path

import pytest

from offload import budget
from offload.budget import AvailableMemory, MemoryPart, MemoryPlan, host_memory_bytes, locked_limit_bytes
from offload.errors import MemoryPlanError

GIB = 1 << 30
PLAN = MemoryPlan(
    (
        MemoryPart(name="the weights", device_bytes=15 * GIB),
        MemoryPart(name="the slot cache", device_bytes=3 * GIB),
        MemoryPart(name="the context's KV", pinned_bytes=17 * GIB),
    ),
    max_context_len=131072,
)


def test_a_plan_that_fits_exactly_is_accepted() -> None:
    PLAN.require(AvailableMemory(device_bytes=18 * GIB, host_bytes=17 * GIB))
    MemoryPlan((), max_context_len=1).require(AvailableMemory(device_bytes=0, host_bytes=0))


def test_too_little_device_memory_is_refused_with_both_numbers_and_a_remedy() -> None:
    with pytest.raises(MemoryPlanError) as refusal:
        PLAN.require(AvailableMemory(device_bytes=18 * GIB - 1, host_bytes=64 * GIB))
    assert str(refusal.value) == (
        "the plan needs 19,327,352,832 bytes (18.0 GiB) of device memory and 19,327,352,831 bytes (18.0 GiB) is "
        "available; the largest part is the weights with 16,106,127,360 bytes (15.0 GiB): choose a smaller slot cache, "
        "another placement, a shorter context or fewer concurrent requests"
    )


def test_too_little_host_memory_is_refused() -> None:
    with pytest.raises(MemoryPlanError, match=r"\(17.0 GiB\) of pinned host memory and .* largest part is the context"):
        PLAN.require(AvailableMemory(device_bytes=80 * GIB, host_bytes=16 * GIB))


def test_the_repr_of_a_plan_shows_its_needs() -> None:
    assert repr(PLAN) == "<MemoryPlan 18.00 GiB on the device, 17.00 GiB pinned, contexts of up to 131072 rows>"


def make_proc(path: Path, available_kib: int) -> Path:
    (path / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable:    {available_kib} kB\nHugePages_Total: 0\n")
    return path


def test_host_memory_is_the_available_memory_of_meminfo(tmp_path: Path) -> None:
    assert host_memory_bytes(make_proc(tmp_path, 4096), tmp_path / "none") == 4 << 20
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory_bytes(tmp_path, tmp_path) == 4 << 20


def test_host_memory_is_limited_by_the_containers_control_group(tmp_path: Path) -> None:
    make_proc(tmp_path, 4096)
    (tmp_path / "memory.max").write_text(f"{3 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{2 << 20}\n")
    (tmp_path / "memory.stat").write_text("anon 17\ninactive_file 5000\n")
    assert host_memory_bytes(tmp_path, tmp_path) == (1 << 20) + 5000
    (tmp_path / "memory.current").write_text(f"{9 << 20}\n")
    assert host_memory_bytes(tmp_path, tmp_path) == 0


def make_group(path: Path, names: tuple[str, str], limit: object, used: int, stat: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / names[0]).write_text(f"{limit}\n")
    (path / names[1]).write_text(f"{used}\n")
    (path / "memory.stat").write_text(stat)


V1, V2 = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")


def test_any_enclosing_control_group_limits_host_memory(tmp_path: Path) -> None:
    make_proc(tmp_path, 4096)
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/system.slice/csattn.service\n")
    group = tmp_path / "fs" / "system.slice"
    make_group(group, V2, 3 << 20, 2 << 20, "inactive_file 5\nactive_file 7\nfile 10000\n")
    make_group(group / "csattn.service", V2, "max", 1 << 20, "inactive_file 5\n")
    assert host_memory_bytes(tmp_path, tmp_path / "fs") == (1 << 20) + 12
    make_group(group / "csattn.service", V2, (1 << 20) + 9, 1 << 20, "anon 5\n")
    assert host_memory_bytes(tmp_path, tmp_path / "fs") == 9


@pytest.mark.parametrize("path", ["/docker/0123", "/"], ids=["of the host", "of the container"])
def test_control_groups_v1_limit_host_memory(tmp_path: Path, path: str) -> None:
    make_proc(tmp_path, 4096)
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(f"9:cpu,cpuacct:/x\n4:hugetlb,memory:{path}\n0::/\n")
    stat = "inactive_file 1\ntotal_inactive_file 5000\ntotal_active_file 500\n"
    make_group(tmp_path / "fs" / "memory", V1, 3 << 20, 2 << 20, stat)
    assert host_memory_bytes(tmp_path, tmp_path / "fs") == (1 << 20) + 5500
    make_group(tmp_path / "fs" / "memory", V1, 9223372036854771712, 2 << 20, stat)
    assert host_memory_bytes(tmp_path, tmp_path / "fs") == 4 << 20


def test_require_host_memory_keeps_a_reserve(monkeypatch) -> None:
    monkeypatch.setattr(budget, "host_memory_bytes", lambda: 1000 + budget.SPARE_BYTES)
    budget.require_host_memory("the context", 1000, "take less")
    with pytest.raises(MemoryPlanError, match=r"the context needs 1,001 bytes .* 402,654,184 bytes .*; take less"):
        budget.require_host_memory("the context", 1001, "take less")


def test_this_machine_reports_host_memory_and_a_lock_limit() -> None:
    assert host_memory_bytes() > 0 and locked_limit_bytes() > 0
