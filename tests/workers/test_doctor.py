"""`csattn doctor`: its findings about imaginary machines, and its probes of the real one."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import MambaConfig

from csattn.artifact.manifest import FORMAT_VERSION
from csattn.models import loader, weight_sizes
from csattn.models.description import describe
from csattn.models.identity import geometry_of
from csattn.models.loader import read_config
from csattn.models.weight_sizes import conversion_bytes, weight_bytes
from offload.budget import SPARE_BYTES
from tests.models.gguf_files import write_gguf
from tests.tiny import save, tiny_config
from workers.capacity import context_bytes, spec_of
from workers.doctor import Facts, Finding, checks, examine, facts, probes
from workers.doctor.checks import CHECKS, check_cpus, check_cupy, check_device, check_faiss, release
from workers.doctor.findings import gib
from workers.doctor.model import examine_model

GIB = 1 << 30
MISSING = {"error": "ModuleNotFoundError: No module named 'it'"}
H200 = facts.Gpu("NVIDIA H200", "570.1", 140_000, 143_771, "5.0 x16")
DEVICE = {
    "name": "NVIDIA H200", "capability": "9.0", "free_bytes": 130 * GIB, "total_bytes": 139 * GIB, "missing": None,
}  # fmt: skip
STORE = {
    "exists": True, "is_directory": True, "writable": True, "free_bytes": 90 * GIB, "artifacts": 2,
    "size_bytes": 3 * GIB, "broken": {}, "format_version": 2,
}  # fmt: skip


KEPT = {"num_contexts": 2, "context_bytes": 3 << 29, "row_bytes": 200 << 20, "most_bytes": 80 * GIB}


def machine(packages: dict[str, str] | None = None, probed: dict[str, Any] | None = None, **others: Any) -> Facts:
    """The facts of a healthy machine without a GPU, except for those given."""
    healthy = {
        "torch": {"version": "2.13.0+cpu", "cuda": None, "devices": [], "pinning": None},
        "numba": {"version": "0.68.1", "keeps": True},
        "memory": {"available_bytes": 20 * GIB, "total_bytes": 24 * GIB, "locked_limit_bytes": 8 << 20},
        "store": STORE,
        "kept": KEPT,
        "faiss": {"version": "1.15.1"},
        "cupy": MISSING,
        "triton": {"version": "3.9.0"},
        "ray": {"version": "2.60.0"},
    }
    given = {"packages": packages or {"faiss-cpu": "1.15.1", "ray": "2.60.0"}, "python": (3, 11), "num_cpus": 4}
    return Facts(**{**given, "probes": {**healthy, **(probed or {})}, **others})


def gpu_machine(packages: dict[str, str] | None = None, probed: dict[str, Any] | None = None, **others: Any) -> Facts:
    """The facts of a healthy machine with a GPU, except for those given."""
    torch = {"version": "2.11.0", "cuda": "12.8", "devices": [DEVICE], "pinning": {"pinned": True, "how": "in place"}}
    packages = {"faiss-cpu": "1", "cupy-cuda12x": "14.2"} if packages is None else packages
    memory = {"available_bytes": 120 * GIB, "total_bytes": 128 * GIB, "locked_limit_bytes": 1 << 62}
    probed = {"torch": torch, "cupy": {"version": "14.2"}, "memory": memory, **(probed or {})}
    return machine(packages, probed, gpus=(H200,), **others)


def one(found: list[Finding], check: str) -> Finding:
    """The worst of the findings of a check."""
    return max((f for f in found if f.check == check), key=lambda f: ("ok", "warning", "problem").index(f.status))


@pytest.mark.parametrize("healthy", [machine(), gpu_machine()], ids=["cpu", "gpu"])
def test_a_healthy_machine_has_only_ok_findings(healthy: Facts) -> None:
    found = examine(healthy)
    assert {finding.status for finding in found} == {"ok"}, found
    assert len(found) >= len(CHECKS) - 1


CPU = {"version": "2.13.0+cpu", "cuda": None, "devices": [], "pinning": None}
BLIND = {"version": "2.15.0", "cuda": "13.2", "devices": [], "pinning": None}
SICK = {"pinned": False, "how": "the driver refused to page-lock 1048576 bytes of host memory: out of memory"}


@pytest.mark.parametrize(
    ("sick", "check", "status", "words", "remedy"),
    [
        (machine(probed={"torch": MISSING}), "torch", "problem", "cannot be loaded: ModuleNotFound", "pip install"),
        (machine(probed={"torch": {**CPU, "version": "2.7.1"}}), "torch", "problem", "2.8 or later", "--upgrade torch"),
        (machine(gpus=(H200,)), "torch", "warning", "has a GPU that it cannot use", "pytorch.org"),
        (machine(gpus=(H200,), probed={"torch": BLIND}), "device", "problem", "570.1 shows NVIDIA H200", "driver"),
        (
            gpu_machine(probed={"torch": {**BLIND, "devices": [{**DEVICE, "free_bytes": GIB}]}}),
            "device", "warning", "1.0 GiB of 139.0 GiB free", "nvidia-smi",
        ),
        (gpu_machine({}, {"cupy": MISSING}), "cupy", "warning", "not installed", "pip install 'csattn[gpu]'"),
        (
            gpu_machine({}, {"cupy": MISSING, "torch": {**BLIND, "devices": [DEVICE]}}),
            "cupy", "warning", "not installed", "pip install 'csattn[gpu-cu13]'",
        ),
        (
            gpu_machine(probed={"torch": {**BLIND, "devices": [DEVICE]}}),
            "cupy", "warning", "made for CUDA 12, while torch is made for CUDA 13", "uninstall -y cupy-cuda12x",
        ),
        (gpu_machine(probed={"cupy": MISSING}), "cupy", "problem", "cannot be loaded", "cupy-cuda12x"),
        (machine({"cupy-cuda12x": "14"}), "cupy", "warning", "cannot be loaded", "cupy-cuda12x"),
        (
            machine({"cupy": "13", "cupy-cuda12x": "14"}, {"cupy": {"version": "14"}}),
            "cupy", "problem", "cupy and cupy-cuda12x are both installed", "pip uninstall -y cupy cupy-cuda12x",
        ),
        (gpu_machine(probed={"triton": MISSING}), "triton", "problem", "cannot be loaded", "Reinstall torch"),
        (
            gpu_machine(probed={"torch": {**BLIND, "devices": [DEVICE], "pinning": SICK}}),
            "pinning", "warning", "cannot be pinned for the GPU: the driver refused", "ulimit memlock",
        ),
        (
            machine({"faiss-cpu": "1", "faiss-gpu-cuvs": "1"}),
            "faiss", "problem", "overwrite each other's files",
            "pip uninstall -y faiss-cpu faiss-gpu-cuvs && pip install faiss-cpu",
        ),
        (
            machine(probed={"faiss": {"error": "the process was killed by signal 4"}}),
            "faiss", "problem", "killed by signal 4", "faiss-cpu",
        ),
        (machine(probed={"numba": MISSING}), "numba", "problem", "cannot be loaded", "numba"),
        (
            machine(probed={"numba": {"version": "1", "keeps": False}}),
            "numba", "warning", "every process compiles", "NUMBA_CACHE_DIR",
        ),
        (machine(openmp_waits="active"), "openmp", "warning", "OMP_WAIT_POLICY is active", "passive"),
        (machine(probed={"ray": MISSING}), "ray", "problem", "cannot be loaded", "ray[serve]"),
        (machine(probed={"ray": {"version": "2.9.3"}}), "ray", "problem", "2.52 or later", "--upgrade"),
        (machine(cpu_quota=1.5), "cpus", "warning", "4 CPUs are visible, but the container's quota is 1.5", "1."),
        (
            machine(probed={"memory": {"available_bytes": GIB, "total_bytes": 24 * GIB, "locked_limit_bytes": 0}}),
            "memory", "warning", "1.0 GiB of host memory", "memory limit",
        ),
        (machine(probed={"memory": MISSING}), "memory", "warning", "unknown", ""),
        (
            gpu_machine(
                probed={"memory": {"available_bytes": 9 * GIB, "total_bytes": 9 * GIB, "locked_limit_bytes": 1 << 16}}
            ),
            "memory", "warning", "ulimit -l", "--ulimit memlock=-1",
        ),
        (machine(shared_memory_bytes=64 << 20), "memory", "warning", "/dev/shm has 0.1 GiB free", "--shm-size"),
        (machine(probed={"store": MISSING}), "store", "problem", "cannot be examined", "--store"),
        (
            machine(probed={"store": {**STORE, "is_directory": False}}),
            "store", "problem", "not a directory", "--store",
        ),
        (
            machine(probed={"store": {**STORE, "writable": False, "refusal": "Read-only file system"}}),
            "store", "warning", "cannot be written to (Read-only file system)", "permissions",
        ),
        (machine(probed={"store": {**STORE, "free_bytes": GIB}}), "store", "warning", "1.0 GiB free", "csattn gc"),
        (
            machine(probed={"kept": {"error": "unknown setting kept.bytes"}}),
            "kept", "warning", "is unknown: unknown setting kept.bytes.", "",
        ),
        (
            machine(probed={"store": {**STORE, "broken": {"0123": "it is of format 1, not 2"}}}),
            "store", "problem", "0123 is not usable: it is of format 1, not 2.", "rm -r store/0123",
        ),
        (
            machine(probed={"store": {**STORE, "broken": {"0123": "it is broken"}}}, store=Path("my store")),
            "store", "problem", "0123 is not usable", "rm -r 'my store/0123'",
        ),
    ],
)  # fmt: skip
def test_each_problem_is_reported_with_its_remedy(
    sick: Facts, check: str, status: str, words: str, remedy: str
) -> None:
    found = examine(sick)
    worst = one(found, check)
    assert (worst.status, words in worst.text, remedy in worst.remedy) == (status, True, True), worst
    others = [f for f in found if f.status == "problem" and f.check != check]
    assert not others, others


def test_all_probes_failing_at_once_are_reported() -> None:
    sick = machine(probed=dict.fromkeys(machine().probes, MISSING))
    found = examine(sick)
    assert {f.check for f in found if f.status == "problem"} == {"torch", "faiss", "numba", "ray", "store"}
    assert not any(f.check == "device" for f in found), "without torch nothing is known of a GPU"
    assert one(found, "store").remedy == "Repair torch first."
    assert all(finding.text.endswith(".") for finding in found)
    assert all(finding.remedy for finding in found if finding.status == "problem")


def test_missing_optional_packages_are_ok() -> None:
    bare = machine({"faiss-cpu": "1"}, {"triton": MISSING, "ray": MISSING})
    assert {finding.status for finding in examine(bare)} == {"ok"}
    assert "csattn[serve]" in one(examine(bare), "ray").remedy


def test_a_cpu_quota_above_the_number_of_cpus_is_ok() -> None:
    assert check_cpus(machine(cpu_quota=64.0))[0].status == "ok"


def test_versions_are_compared_as_numbers() -> None:
    assert release("2.13.0+cpu") == (2, 13) > release("2.6.0")
    assert release("3") == (3, 0) and release("2.7rc1") == (2, 0) and release("unknown") == (0, 0)


def test_every_gpu_is_reported() -> None:
    torch = {"version": "2.11.0", "cuda": "12.8", "devices": [DEVICE, DEVICE], "pinning": None}
    found = list(check_device(gpu_machine(probed={"torch": torch})))
    assert [finding.text[:5] for finding in found] == ["GPU 0", "GPU 1"]
    assert "driver 570.1" in found[0].text


def test_a_gpu_too_old_for_the_kernels_is_a_warning() -> None:
    older = DEVICE | {"missing": "compute capability 8.0 or more, and Tesla T4 has 7.5"}
    torch = {"version": "2.11.0", "cuda": "12.8", "devices": [older], "pinning": None}
    (finding,) = check_device(gpu_machine(probed={"torch": torch}))
    assert finding.status == "warning" and "csattn cannot decode on it: its kernels need compute cap" in finding.text


@pytest.mark.parametrize("fast", [True, False])
def test_a_cpu_that_multiplies_bfloat16_is_reported(monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    monkeypatch.setattr(checks, "multiplies_bfloat16", lambda: fast)
    (finding,) = check_device(machine())
    assert finding.status == "ok" and "run on the CPU." in finding.text
    assert ("instructions for bfloat16" in finding.text) == fast


def test_a_library_installed_without_a_package_is_reported_by_its_version() -> None:
    assert "CuPy 14.2." in check_cupy(gpu_machine({}))[0].text
    assert check_faiss(machine({"ray": "2.60.0"}))[0].text.endswith("from no package.")


@pytest.mark.parametrize(("kmeans", "status"), [("faiss", "problem"), ("torch", "ok")])
def test_missing_faiss_is_ok_only_where_torch_runs_kmeans(monkeypatch, kmeans: str, status: str) -> None:
    monkeypatch.setattr(checks, "KMEANS_ON_CPU", kmeans)
    assert check_faiss(machine({"ray": "2.60.0"}, {"faiss": MISSING}))[0].status == status


def test_faiss_is_reported_as_unneeded_on_a_usable_gpu() -> None:
    assert check_faiss(gpu_machine({}))[0].text.endswith("torch is faster on a GPU, and faiss-gpu is not needed.")
    assert "faster" not in check_faiss(machine(gpus=(H200,)))[0].text, "torch cannot use it"


def test_parse_gpus_skips_unreadable_lines_of_nvidia_smi() -> None:
    broken = "failed to read, 570.1, [N/A], [N/A], 5, 16"
    text = f"NVIDIA H200, 570.1, 140000, 143771, 5, 16\n{broken}\n\nNo devices were found\n"
    assert facts.parse_gpus(text) == (H200,)
    assert facts.parse_gpus(text.replace("16", "[N/A]")) == (replace(H200, link=""),)


@pytest.mark.parametrize(
    ("text", "quota"), [("max 100000", None), ("150000 100000", 1.5), ("nonsense", None), (None, None)]
)
def test_cpu_quota_is_read_from_cpu_max(tmp_path: Path, text: str | None, quota: float | None) -> None:
    if text is not None:
        (tmp_path / "cpu.max").write_text(text)
    assert facts.cpu_quota(tmp_path) == quota


def test_probing_a_store_creates_no_files(tmp_path: Path) -> None:
    store = tmp_path / "deep" / "store"
    found = probes.probe_store(str(store))
    assert (found["exists"], found["is_directory"], found["writable"]) == (False, True, True)
    assert not list(tmp_path.iterdir()), "a probe makes nothing"
    (store / ("0123456789abcdef")).mkdir(parents=True)
    found = probes.probe_store(str(store))
    assert found["exists"] and found["artifacts"] == 0 and found["free_bytes"] > 0
    assert list(found["broken"]) == ["0123456789abcdef"]
    assert found["format_version"] == FORMAT_VERSION
    assert [entry.name for entry in store.iterdir()] == ["0123456789abcdef"]


@pytest.mark.parametrize(
    ("artifacts", "num_bytes", "words"),
    [(0, 0, "0 usable artifacts"), (1, 43_620_762, "1 usable artifact of format 2 (41.6 MiB), and 90.00 GiB free.")],
)
def test_a_store_is_summarised_in_readable_units(artifacts: int, num_bytes: int, words: str) -> None:
    store = {**STORE, "artifacts": artifacts, "size_bytes": num_bytes}
    assert f"The store at store has {words}" in one(examine(machine(probed={"store": store})), "store").text


def test_kept_files_are_reported_only_where_there_are_any() -> None:
    finding = one(examine(machine()), "kept")
    assert finding.status == "ok"
    assert "store/kept takes 1.70 GiB, of at most 80.00 GiB; contexts and rows may each" in finding.text
    none = {**KEPT, "context_bytes": 0, "row_bytes": 0}
    assert not [of for of in examine(machine(probed={"kept": none})) if of.check == "kept"]


def test_kept_files_are_measured_against_the_environments_settings(tmp_path: Path, monkeypatch) -> None:
    (place := tmp_path / "kept" / ("0" * 32) / "0123456789abcdef").mkdir(parents=True)
    (place / "layer").write_bytes(b"1234567")
    (tmp_path / "kept" / "0.block").write_bytes(b"123")
    monkeypatch.setenv("CSATTN_KEPT_DISK_BYTES", "1000")
    found = {"num_contexts": 1, "context_bytes": 7, "row_bytes": 3, "most_bytes": (64 << 30) + 1000}
    measured = probes.probe_kept(str(tmp_path))
    assert measured["context_bytes"] - 7 < 10_000, "directories count on some file systems"
    assert measured | {"context_bytes": 7} == found
    assert probes.probe_kept(str(tmp_path / "none"))["num_contexts"] == 0


def test_a_file_is_not_a_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        assert probes.probe_store(str(path))["is_directory"] is False


def test_a_read_only_store_is_reported_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(probes.tempfile, "TemporaryFile", refuse)
    found = probes.probe_store(str(tmp_path))
    assert (found["writable"], found["refusal"]) == (False, "Read-only file system")


def test_numba_without_a_cache_directory_is_reported_and_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    import numba

    assert probes.probe_numba()["keeps"] is True
    real = numba.njit

    def no_place(*args: Any, cache: bool = False) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return real(*args)

    monkeypatch.setattr(numba, "njit", no_place)
    assert probes.probe_numba() == {"version": numba.__version__, "keeps": False}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise ImportError('libcudart.so.12: cannot open')", "ImportError: libcudart.so.12: cannot open"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "killed by signal 4"),
        ("import sys; sys.exit(3)", "exit code 3"),
        ("import os; os._exit(0)", "without an answer"),
    ],
    ids=["error", "signal", "exit", "silence"],
)
def test_a_library_that_fails_to_import_is_reported_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, words: str
) -> None:
    (tmp_path / "ailing.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert words in facts.ask("import", "ailing")["error"]


def test_a_library_that_hangs_on_import_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hanging.py").write_text("import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert facts.ask("import", "hanging", timeout_s=0.5) == {"error": "no answer within 0.5 s"}


def test_an_interrupt_does_not_wait_for_probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hanging.py").write_text("import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(facts, "ask", lambda probe, *more, ask=facts.ask: ask("import", "hanging"))

    def interrupted() -> tuple[facts.Gpu, ...]:
        while not facts._running:
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(facts, "visible_gpus", interrupted)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        facts.gather_facts(tmp_path)
    assert time.monotonic() - started < 30


def test_output_of_a_library_does_not_disturb_its_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "chatty.py").write_text(
        "import atexit\nprint('hello')\natexit.register(print, 'bye')\n__version__ = '1.2'\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert facts.ask("import", "chatty") == {"version": "1.2"}


@pytest.mark.gpu
def test_a_gpu_is_found_and_memory_can_be_pinned() -> None:
    torch = probes.probe_torch()
    assert torch["devices"] and torch["devices"][0]["free_bytes"] > 0
    assert torch["pinning"]["pinned"], torch["pinning"]


def test_a_models_memory_needs_and_limitations_are_reported(tmp_path: Path) -> None:
    """The config is enough: there are no weights here."""
    sizes = {"max_position_embeddings": 65_536, "head_dim": 24}
    tiny_config("gemma2", **sizes).save_pretrained(tmp_path)
    found = examine_model(str(tmp_path), machine())
    assert [finding.status for finding in found] == ["ok", "warning", "warning", "ok"]
    geometry = geometry_of(describe(tiny_config("gemma2", **sizes)))
    kv, sketch = context_bytes(spec_of(geometry, 32_768))
    assert 0 <= kv - (32_768 + 2 * 37) * 2 * 2 * 24 * 2 < 3 * 8192 and 0 < sketch < kv
    left = machine().probes["memory"]["available_bytes"] - weight_bytes(read_config(str(tmp_path)), 2).decoded
    assert f"Room for contexts (this machine): {left // (kv + sketch)} of 32,768." in found[0].text
    left -= weight_bytes(read_config(str(tmp_path)), 2).decoded
    kv, sketch = context_bytes(spec_of(geometry, 32_768, "float32"))
    assert f"In float32, the default: {left // (kv + sketch)} of 32,768." in found[0].text
    assert "1 layers with full attention and 2 without" in found[0].text
    assert "multiples of 16" in found[1].text and "capped" in found[2].text
    small = machine(probed={"memory": {"available_bytes": 1000, "total_bytes": 1000, "locked_limit_bytes": 0}})
    assert one(examine_model(str(tmp_path), small)[:1], "model").status == "warning"
    weights = weight_bytes(read_config(str(tmp_path)), 2).decoded
    narrow = {"available_bytes": 2 * weights - 1, "total_bytes": GIB, "locked_limit_bytes": 0}
    told = examine_model(str(tmp_path), machine(probed={"memory": narrow}))[0]
    assert told.status == "warning" and "--dtype bfloat16" in told.remedy and "in float32, the default" in told.text
    assert "float32" not in examine_model(str(tmp_path), gpu_machine())[0].text


def test_a_models_memory_needs_when_quantized_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sizes, "has_disk_space", lambda num_bytes: True)
    monkeypatch.setattr(loader, "multiplies_bfloat16", lambda: False)
    config = tiny_config("llama", hidden_size=1024, intermediate_size=3072, num_hidden_layers=20, vocab_size=1000)
    config.save_pretrained(tmp_path)
    matrices = 20 * 1024 * (3 * 3072 + 2 * (config.num_attention_heads + config.num_key_value_heads) * config.head_dim)
    plain = weight_bytes(config, 2).decoded
    assert weight_bytes(config, 2) == (plain, 0, 0, 0) and plain > 2 * matrices
    assert weight_bytes(config, 2, "fp8").on_gpu == pytest.approx(plain - matrices, rel=0.01)
    in_4_bits = matrices // 2 + matrices // 128 * 4
    head = 1000 * (1024 + 4)  # in 8 bits with a scale for each row
    decoded = 2 * (matrices + 1000 * 1024)
    size = weight_bytes(config, 2, "int4")
    assert size == (plain, in_4_bits + head, decoded, 0)
    assert size.on_gpu == size.on_host == plain - decoded + in_4_bits + head
    (found, *_) = examine_model(str(tmp_path), machine(), "int4")
    assert f"weights take {gib(plain)} in bfloat16, {gib(2 * plain)} in float32, the default." in found.text
    assert (
        f"Kept in 8 or 4 bits, they take {gib(size.on_host)} of host memory (and, decoded, {gib(decoded)} of "
        f"disk), or {gib(size.on_gpu)} on a GPU." in found.text
    )
    with monkeypatch.context() as patch:
        patch.setattr(loader, "multiplies_bfloat16", lambda: True)
        assert "float32" not in examine_model(str(tmp_path), machine(), "int4")[0].text
    little = {"available_bytes": plain - 1, "total_bytes": GIB, "locked_limit_bytes": 0}
    small = machine(probed={"memory": little})
    assert "--weights int4 --dtype bfloat16" in examine_model(str(tmp_path), small)[0].remedy
    assert "Room for contexts (this machine)" in examine_model(str(tmp_path), small, "int4")[0].text
    monkeypatch.setattr(weight_sizes, "has_disk_space", lambda num_bytes: False)
    assert (
        size.on_host == plain + in_4_bits + head
        and "of disk" not in examine_model(str(tmp_path), machine(), "int4")[0].text
    )
    config.tie_word_embeddings = True  # the embedding, which is also the head, stays
    tied = plain - 2 * 1000 * 1024
    assert weight_bytes(config, 2, "int4") == (tied, in_4_bits + head, 2 * matrices, 0)
    config.tie_word_embeddings = False
    config.quantization_config = {"quant_method": "awq", "bits": 4, "group_size": 64}
    assert weight_bytes(config, 2) == (plain, matrices // 2 + matrices // 64 * 4, 2 * matrices, 0)
    config.quantization_config = {"quant_method": "gptq", "bits": 8, "group_size": 64}
    assert weight_bytes(config, 2) == (plain, 0, 0, 0)


@pytest.mark.parametrize("devices", [[], [{**DEVICE, "free_bytes": 1000}]], ids=["cpu", "gpu"])
def test_quantizing_is_not_suggested_for_a_model_published_in_8_bits(
    devices: list[dict[str, Any]], tmp_path: Path
) -> None:
    """`load_model` refuses to round it."""
    config = tiny_config("llama")
    config.quantization_config = {"quant_method": "gptq", "bits": 8, "group_size": 128}
    config.save_pretrained(tmp_path)
    little = {"available_bytes": 1000, "total_bytes": GIB, "locked_limit_bytes": 0}
    small = machine(probed={"memory": little, "torch": {"version": "2.13.0", "cuda": "12.8", "devices": devices}})
    found = examine_model(str(tmp_path), small)[0]
    assert found.status == "warning" and "smaller model" in found.remedy and "--weights" not in found.remedy
    [found] = examine_model(str(tmp_path), small, "int4")
    assert found.status == "problem" and "already published in 8 or 4 bits" in found.text


def test_the_reported_disk_need_includes_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sizes, "has_disk_space", lambda num_bytes: True)
    config = tiny_config("mixtral", hidden_size=256, intermediate_size=8192, num_local_experts=8)
    config.save_pretrained(tmp_path)
    size = weight_bytes(config, 2, "int4")
    assert size.mapped == size.linears + size.experts > size.experts > 3 * size.quantized
    assert size.on_host == size.on_gpu == size.others + size.quantized
    assert f"(and, decoded, {gib(size.mapped)} of disk)" in examine_model(str(tmp_path), machine(), "int4")[0].text
    little = {"available_bytes": size.decoded - 1, "total_bytes": GIB, "locked_limit_bytes": 0}
    small = machine(probed={"memory": little})
    assert "--weights int4 --dtype bfloat16" in examine_model(str(tmp_path), small)[0].remedy


def test_a_model_that_streams_refuse_is_reported(tmp_path: Path) -> None:
    """Its norms after RoPE are of rows at their first positions."""
    for family, is_refused in (("hunyuan_v1_dense", True), ("llama", False)):
        tiny_config(family, max_position_embeddings=65_536).save_pretrained(tmp_path)
        texts = [finding.text for finding in examine_model(str(tmp_path), machine())]
        assert any("csattn stream" in text for text in texts) == is_refused


def test_placements_of_models_with_their_own_selection_are_reported(tmp_path: Path) -> None:
    tiny_config("deepseek_v32", max_position_embeddings=65_536).save_pretrained(tmp_path)
    found = needs, on_gpu, stream = examine_model(str(tmp_path), machine())
    assert (
        "3 layers with latents, from which the model itself chooses" in needs.text
        and "Room for contexts (this machine)" in needs.text
    )
    assert [finding.status for finding in found[1:]] == ["ok", "ok"]
    assert "placement `host` is refused" in on_gpu.text and "csattn stream" in stream.text
    tiny_config("deepseek_v3", max_position_embeddings=65_536).save_pretrained(tmp_path)
    assert "all of its latents are on the device" in examine_model(str(tmp_path), machine())[1].text
    tiny_config("deepseek_v32", kv_lora_rank=36).save_pretrained(tmp_path)
    needs, on_gpu, *_ = examine_model(str(tmp_path), machine())
    assert on_gpu.status == "warning" and "latents have 36 numbers; a GPU takes powers of two" in on_gpu.text


@pytest.mark.parametrize(
    "damage",
    [{"rms_norm_eps": 0}, {"num_attention_heads": 0}, {"num_key_value_heads": 3}, {"max_position_embeddings": 0}],
)
def test_a_model_with_a_damaged_config_is_a_problem(tmp_path: Path, damage: dict[str, object]) -> None:
    path = save(tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    [finding] = examine_model(str(tmp_path), machine())
    assert finding.status == "problem" and finding.text.startswith(str(tmp_path))


def test_an_unsupported_or_missing_model_is_a_problem(tmp_path: Path) -> None:
    MambaConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    for name in (str(tmp_path), str(tmp_path / "none")):
        (finding,) = examine_model(name, machine())
        assert finding.status == "problem" and finding.remedy


def test_weights_that_are_damaged_or_not_all_there_are_a_problem(tmp_path: Path) -> None:
    save(tmp_path)
    assert [finding.status for finding in examine_model(str(tmp_path), machine())] == ["ok"]
    for content, match in ((b"version https://git-lfs.github.com/spec/v1", "pointer of git-lfs"), (b"", "cannot be")):
        (tmp_path / "model.safetensors").write_bytes(content)
        finding = examine_model(str(tmp_path), machine())[1]
        assert finding.status == "problem" and match in finding.text and finding.remedy.endswith(".")


@pytest.mark.parametrize("damage", [Path.unlink, partial(Path.write_text, data="{")])
def test_a_tokenizer_that_is_missing_or_damaged_is_a_problem(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    damage(save(tmp_path) / "tokenizer.json")
    finding = examine_model(str(tmp_path), machine())[1]
    assert (
        finding.status == "problem" and f"{tmp_path} cannot be loaded: its tokenizer could not be read" in finding.text
    )
    assert finding.remedy.startswith("Put tokenizer.json and tokenizer_config.json there")


def test_a_gguf_file_is_examined_without_being_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path))
    file = str(write_gguf(tmp_path / "model.gguf"))
    needed = conversion_bytes(read_config(file), 2)
    finding = examine_model(file, machine())[0]
    assert "converted once" in finding.text and f"and, while it runs, {gib(needed)} of memory." in finding.text
    assert finding.status == "ok" and not (tmp_path / "models").exists()
    little = {"available_bytes": needed + SPARE_BYTES - 1, "total_bytes": GIB, "locked_limit_bytes": 0}
    finding = examine_model(file, machine(probed={"memory": little}))[0]
    assert finding.status == "warning" and finding.remedy.startswith("End other programs while it is converted")
