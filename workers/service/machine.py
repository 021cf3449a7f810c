"""One line about a service's machine, and how many contexts it has room for."""

import shutil

import torch

from csattn.cpus import available_cpus
from csattn.models import LoadedModel
from csattn.models.description import describe
from csattn.models.weight_sizes import device_bytes as weights_on_device
from offload.budget import host_memory_bytes
from workers.capacity import reported_context_lens, room_for_contexts, spec_of
from workers.doctor.facts import Gpu, visible_gpus
from workers.doctor.findings import gib
from workers.settings import Settings


def describe_machine(settings: Settings, loaded: LoadedModel, num_workers: int = 1) -> str:
    """Describe this process's machine, once the model is loaded. num_workers: processes that share its memory."""
    device_bytes, host_bytes = 0, host_memory_bytes()
    if settings.engine.placement != "cpu":
        of_first = torch.cuda.mem_get_info()[0]  # others have as much each, and hold a share of contexts and weights
        device_bytes = settings.engine.num_devices * of_first - weights_on_device(loaded.model)
    rooms, model = [], describe(loaded.model.config)
    for context_len in reported_context_lens(loaded.geometry):
        spec = spec_of(loaded.geometry, context_len, settings.build.dtype, settings.build.preset)
        room = room_for_contexts(spec, settings.engine, host_bytes // num_workers, device_bytes, model)
        rooms.append(f"{room} contexts of {context_len:,} tokens")
    free_bytes = shutil.disk_usage(settings.store.path).free
    memory = f"{gib(host_bytes)} of memory" + (f", shared by {num_workers} workers," if num_workers > 1 else "")
    return (
        f"{_gpus(visible_gpus())}, {available_cpus()} CPUs, {memory} and {gib(free_bytes)} of disk "
        f"for the store; room at the same time for {' or '.join(rooms)}"
    )


def _gpus(gpus: tuple[Gpu, ...]) -> str:
    if not gpus:
        return "no GPU"
    one = gpus[0]
    link = f", PCIe {one.link}" if one.link else ""
    return f"{len(gpus)} × {one.name} ({gib(one.free_mib << 20)} of {gib(one.total_mib << 20)} free{link})"
