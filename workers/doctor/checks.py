"""The checks: small functions from facts to findings, so that tests can try any machine without having it."""

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from csattn.config import KMEANS_ON_CPU
from csattn.cpus import multiplies_bfloat16
from workers.doctor.facts import Answer, Facts
from workers.doctor.findings import GIB, Finding, Status, gib, sentence
from workers.words import counted, size

LOW_HOST_BYTES = 2 * GIB
LOW_SHARED_BYTES = GIB // 2
LOW_DEVICE_BYTES = 4 * GIB
LOW_DISK_BYTES = 2 * GIB


def examine(facts: Facts) -> list[Finding]:
    """Run all checks, in the order in which one would fix problems."""
    return [finding for check in CHECKS for finding in check(facts)]


def check_python(facts: Facts) -> Sequence[Finding]:
    return [Finding("python", "ok", f"Python is {'.'.join(map(str, facts.python))}.")]  # an older one cannot run this


def check_torch(facts: Facts) -> Sequence[Finding]:
    torch = facts.probes["torch"]
    if "error" in torch:
        return [_not_loaded("torch", torch, "pip install --force-reinstall torch")]
    if release(torch["version"]) < (2, 8):
        text = f"torch is {torch['version']}; 2.8 or later is needed."
        return [Finding("torch", "problem", text, "pip install --upgrade torch")]
    built_for = f"for CUDA {torch['cuda']}" if torch["cuda"] else "without CUDA"
    text = f"torch {torch['version']}, built {built_for}."
    if facts.gpus and not torch["cuda"]:
        remedy = "Install a CUDA build of torch to decode on the GPU: see https://pytorch.org/get-started/locally."
        return [Finding("torch", "warning", f"{text} This machine has a GPU that it cannot use.", remedy)]
    return [Finding("torch", "ok", text)]


def check_device(facts: Facts) -> Iterator[Finding]:
    torch, seen = facts.probes["torch"], facts.gpus
    if "error" in torch:
        return
    if not torch["devices"] and seen and torch.get("cuda"):
        text = f"The driver {seen[0].driver} shows {seen[0].name}, but torch for CUDA {torch['cuda']} cannot use it."
        remedy = "Update the driver, or install a torch for an older CUDA; also check CUDA_VISIBLE_DEVICES."
        yield Finding("device", "problem", text, remedy)
    elif not torch["devices"]:
        text = "No GPU is in use: prefill, search and decoding run on the CPU."
        if multiplies_bfloat16():
            text += " It has instructions for bfloat16, and computes models in bfloat16 or in fewer bits with them."
        yield Finding("device", "ok", text)
    driver = f", driver {seen[0].driver}" if seen else ""
    for idx, device in enumerate(torch["devices"]):
        free_bytes = device["free_bytes"]
        text = (
            f"GPU {idx} is {device['name']} (compute capability {device['capability']}{driver}) with "
            f"{gib(free_bytes)} of {gib(device['total_bytes'])} free."
        )
        if device["missing"] is not None:
            text = f"{text[:-1]}, but csattn cannot decode on it: its kernels need {device['missing']}."
            yield Finding("device", "warning", text, "Decode on the CPU, or on another GPU, such as an H100.")
        elif free_bytes < LOW_DEVICE_BYTES:
            yield Finding("device", "warning", text, "End the processes that hold its memory: `nvidia-smi` lists them.")
        else:
            yield Finding("device", "ok", text)


def check_cupy(facts: Facts) -> Sequence[Finding]:
    """CuPy compiles the kernels of the GPU placements and pins host memory."""
    cupy, has_gpu = facts.probes["cupy"], _has_gpu(facts)
    packages = [name for name in facts.packages if name.split("-")[0] == "cupy"]
    extra = "gpu-cu13" if _major(facts.probes["torch"].get("cuda")) == "13" else "gpu"
    if len(packages) > 1:
        return [_overlap("cupy", packages, f"'csattn[{extra}]'")]
    if not packages and "error" in cupy:
        if has_gpu:
            text = "CuPy is not installed, so csattn cannot decode on the GPU."
            return [Finding("cupy", "warning", text, f"pip install 'csattn[{extra}]'")]
        return [Finding("cupy", "ok", "CuPy is not installed; it is needed only on a GPU.")]
    if "error" in cupy:
        return [_not_loaded("cupy", cupy, f"pip install --force-reinstall {packages[0]}", needed=has_gpu)]
    cuda_major = packages[0].removeprefix("cupy-cuda").removesuffix("x") if packages else ""
    text = f"CuPy {cupy['version']}" + (f", made for CUDA {cuda_major}." if cuda_major.isdigit() else ".")
    torch_major = _major(facts.probes["torch"].get("cuda"))
    if has_gpu and cuda_major.isdigit() and torch_major and cuda_major != torch_major:
        text = f"{text[:-1]}, while torch is made for CUDA {torch_major}: both load, each with its own toolkit."
        remedy = f"pip uninstall -y {packages[0]} && pip install 'csattn[{extra}]'"
        return [Finding("cupy", "warning", text, remedy)]
    return [Finding("cupy", "ok", text)]


def check_triton(facts: Facts) -> Sequence[Finding]:
    """Triton compiles the model's kernels on a GPU."""
    triton, has_gpu = facts.probes["triton"], _has_gpu(facts)
    if "error" not in triton:
        return [Finding("triton", "ok", f"Triton {triton['version']}.")]
    if not has_gpu:
        return [Finding("triton", "ok", "Triton cannot be loaded; it is needed only on a GPU.")]
    return [_not_loaded("triton", triton, "Reinstall torch: its CUDA build brings the Triton that it needs.")]


def check_pinning(facts: Facts) -> Sequence[Finding]:
    pinning = facts.probes["torch"].get("pinning")
    if pinning is None:
        return []
    if pinning["pinned"]:
        return [Finding("pinning", "ok", f"Host memory can be pinned for the GPU ({pinning['how']}).")]
    text = f"Host memory cannot be pinned for the GPU: {sentence(pinning['how'])}"
    remedy = "Only placement `device` works; install CuPy, and in a container run with --ulimit memlock=-1."
    return [Finding("pinning", "warning", text, remedy)]


def check_faiss(facts: Facts) -> Sequence[Finding]:
    faiss = facts.probes["faiss"]
    packages = [name for name in facts.packages if name.split("-")[0] == "faiss"]
    if len(packages) > 1:
        return [_overlap("faiss", packages, "faiss-cpu")]
    if "error" in faiss and not packages and KMEANS_ON_CPU == "torch":
        return [Finding("faiss", "ok", "FAISS is not installed; torch places the centroids of lists.")]
    if "error" in faiss:
        return [_not_loaded("faiss", faiss, "pip install --force-reinstall faiss-cpu")]
    text = f"FAISS {faiss['version']} from {packages[0] if packages else 'no package'}."
    if facts.probes["torch"].get("devices"):
        text += " Builds of lists use it with --kmeans faiss; torch is faster on a GPU, and faiss-gpu is not needed."
    return [Finding("faiss", "ok", text)]


def check_numba(facts: Facts) -> Sequence[Finding]:
    numba = facts.probes["numba"]
    if "error" in numba:
        return [_not_loaded("numba", numba, "pip install --upgrade --force-reinstall numba")]
    text = f"numba {numba['version']} compiles kernels"
    if numba["keeps"]:
        return [Finding("numba", "ok", f"{text} and caches them.")]
    text += ", but has no directory to cache them: every process compiles its kernels again, which takes some seconds."
    return [Finding("numba", "warning", text, "Set NUMBA_CACHE_DIR to a writable directory.")]


def check_openmp(facts: Facts) -> Sequence[Finding]:
    if facts.openmp_waits and facts.openmp_waits.lower() == "passive":
        return [Finding("openmp", "ok", "OpenMP's threads sleep while they wait (OMP_WAIT_POLICY=passive).")]
    text = f"OMP_WAIT_POLICY is {facts.openmp_waits}: waiting threads spin, which costs busy threads milliseconds."
    return [Finding("openmp", "warning", text, "Unset it, or set OMP_WAIT_POLICY=passive.")]


def check_ray(facts: Facts) -> Sequence[Finding]:
    ray = facts.probes["ray"]
    if "ray" not in facts.packages and "error" in ray:
        text = "Ray is not installed; it is needed only for builds and services over several processes or machines."
        return [Finding("ray", "ok", text, "pip install 'csattn[serve]'")]
    if "error" in ray:
        return [_not_loaded("ray", ray, "pip install --force-reinstall 'ray[serve]'")]
    if release(ray["version"]) < (2, 52):
        text = f"Ray is {ray['version']}; 2.52 or later is needed."
        return [Finding("ray", "problem", text, "pip install --upgrade 'ray[serve]'")]
    return [Finding("ray", "ok", f"Ray {ray['version']}.")]


def check_memory(facts: Facts) -> Iterator[Finding]:
    memory = facts.probes["memory"]
    if "error" in memory:
        yield Finding("memory", "warning", f"The amount of memory is unknown: {sentence(memory['error'])}")
        return
    available, total = memory["available_bytes"], memory["total_bytes"]
    text = f"{gib(available)} of host memory is available, of {gib(total)} in the machine."
    remedy = "" if available >= LOW_HOST_BYTES else "End other programs, or raise the container's memory limit."
    yield Finding("memory", "warning" if remedy else "ok", text, remedy)
    if facts.probes["torch"].get("devices") and memory["locked_limit_bytes"] < available:
        text = (
            f"`ulimit -l` lets a process lock {gib(memory['locked_limit_bytes'])}; some drivers count pinned memory "
            "towards it."
        )
        yield Finding("memory", "warning", text, "If pinning fails: ulimit -l unlimited, or --ulimit memlock=-1.")
    shared = facts.shared_memory_bytes
    if shared is not None and shared < LOW_SHARED_BYTES:
        text = f"/dev/shm has {gib(shared)} free; Ray and searches in other processes exchange data there."
        yield Finding("memory", "warning", text, "Start the container with --shm-size=4g.")


def check_cpus(facts: Facts) -> Sequence[Finding]:
    text = f"{facts.num_cpus} CPUs are available."
    if facts.cpu_quota is not None and facts.cpu_quota < facts.num_cpus:
        text = f"{facts.num_cpus} CPUs are visible, but the container's quota is {facts.cpu_quota:g} CPUs."
        return [Finding("cpus", "warning", text, f"Give --threads {max(1, int(facts.cpu_quota))}.")]
    return [Finding("cpus", "ok", text)]


def check_store(facts: Facts) -> Iterator[Finding]:
    store, path = facts.probes["store"], facts.store
    if "error" in store:
        text = f"The store at {path} cannot be examined: {sentence(store['error'])}"
        remedy = "Give another one with --store, or correct its permissions."
        yield Finding("store", "problem", text, "Repair torch first." if "error" in facts.probes["torch"] else remedy)
        return
    if not store["is_directory"]:
        text = f"The store at {path} is, or lies below, something that is not a directory."
        yield Finding("store", "problem", text, "Give a directory with --store.")
        return
    yield _store_itself(facts)
    if store["writable"] and store["free_bytes"] < LOW_DISK_BYTES:
        text = f"The disk of the store at {path} has {gib(store['free_bytes'])} free."
        yield Finding("store", "warning", text, "Free some space: `csattn gc` removes unfinished builds.")
    for name, why in store["broken"].items():
        remedy = f"Remove it and build it again: rm -r {shlex.quote(str(path / name))}"
        yield Finding("store", "problem", f"Artifact {name} is not usable: {sentence(why)}", remedy)


def check_kept(facts: Facts) -> Iterator[Finding]:
    """Report what services keep of prompts and turns; no finding if they keep nothing."""
    kept, place = facts.probes["kept"], facts.store / "kept"
    if "error" in kept:
        text = f"The size of what services keep in {place} is unknown: {sentence(kept['error'])}"
        yield Finding("kept", "warning", text)
    elif there := kept["context_bytes"] + kept["row_bytes"]:
        text = (
            f"What services have kept of prompts and turns in {place} takes {size(there)}, of at most "
            f"{size(kept['most_bytes'])}; contexts and rows may each fill up to half of the space that is free without "
            "them."
        )
        yield Finding("kept", "ok", text)


CHECKS: tuple[Callable[[Facts], Iterable[Finding]], ...] = (
    check_python,
    check_cpus,
    check_memory,
    check_torch,
    check_device,
    check_cupy,
    check_triton,
    check_pinning,
    check_faiss,
    check_numba,
    check_openmp,
    check_ray,
    check_store,
    check_kept,
)


def release(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version; parts that are not numbers count as 0."""
    parts = [part if part.isdigit() else "0" for part in version.split("+")[0].split(".")] + ["0", "0"]
    return int(parts[0]), int(parts[1])


def _store_itself(facts: Facts) -> Finding:
    store, path = facts.probes["store"], facts.store
    if not store["writable"]:
        refusal = store.get("refusal", "unknown")
        text = f"The store at {path} cannot be written to ({refusal}): it can only be decoded from."
        return Finding("store", "warning", text, "To build, correct its permissions or give another one with --store.")
    if not store["exists"]:
        return Finding("store", "ok", f"The store at {path} does not exist yet; the first build makes it.")
    artifacts = f"{counted(store['artifacts'], 'usable artifact')} of format {store['format_version']}"
    text = f"The store at {path} has {artifacts} ({size(store['size_bytes'])}), and {size(store['free_bytes'])} free."
    return Finding("store", "ok", text)


def _has_gpu(facts: Facts) -> bool:
    return bool(facts.gpus or facts.probes["torch"].get("devices"))


def _not_loaded(name: str, answer: Answer, remedy: str, needed: bool = True) -> Finding:
    status: Status = "problem" if needed else "warning"
    return Finding(name, status, f"{name} cannot be loaded: {sentence(answer['error'])}", remedy)


def _overlap(name: str, packages: Sequence[str], wanted: str) -> Finding:
    """Return the finding about packages that install the same files: removing either breaks the other."""
    text = f"{' and '.join(packages)} are both installed and overwrite each other's files."
    return Finding(name, "problem", text, f"pip uninstall -y {' '.join(packages)} && pip install {wanted}")


def _major(version: Any) -> str:
    return str(version).split(".")[0] if version else ""
