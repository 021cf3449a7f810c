"""What placement `auto` stands for: that of a GPU, if this machine has one with room for the model, else cpu."""

import json
from dataclasses import asdict, replace
from typing import Any, Literal

import torch

from csattn.artifact import ArtifactSpec
from csattn.errors import CsattnError
from csattn.models.description import describe
from csattn.models.identity import geometry_of
from csattn.models.loader import DTYPES, read_config
from csattn.models.weight_sizes import weight_bytes
from offload.budget import available_memory
from offload.errors import NoDeviceError
from workers.capacity import room_for_contexts, spec_of
from workers.doctor.facts import ask, visible_gpus
from workers.doctor.findings import gib
from workers.engine.gpu.memory import KERNELS_BYTES, require_weights
from workers.engine.opening import require_together
from workers.model.devices import require_device
from workers.settings import EngineSettings, Settings

Chosen = Literal["cpu", "device", "hybrid"]
_ON_GPU: tuple[Chosen, ...] = ("device", "hybrid")  # the faster one first
_LONGEST = 131_072  # tokens of the contexts that a service is placed for
_FOR_CONTEXTS = 0.75  # their share of the memory that weights leave free; the rest is for requests' own rows


def choose_placement(
    name: str | None,
    dtype: str,
    weights: str | None,  # all as `load_model` takes them
    engine: EngineSettings,  # apart from its placement
    spec: ArtifactSpec,  # of one of engine.num_contexts contexts
) -> tuple[Chosen, str]:
    """Return the placement and, if it is cpu although there is a GPU, the reason.

    `device` if all contexts have room there, `hybrid` if one of them has.
    """
    if not torch.cuda.is_available() or engine.num_search_workers:
        return "cpu", ""
    try:
        require_device()
    except NoDeviceError as error:
        return "cpu", str(error)
    config, free, reason = read_config(name, dtype), available_memory(torch.device("cuda")), ""
    size = weight_bytes(config, DTYPES[dtype].itemsize, weights)
    device_bytes = engine.num_devices * (free.device_bytes - KERNELS_BYTES) - size.on_gpu
    if device_bytes <= 0:
        return (
            "cpu",
            f"the model's weights take {gib(size.on_gpu)} in {dtype}, the GPU has {gib(free.device_bytes)} free",
        )
    for placement in _ON_GPU:
        try:
            require_together(placement, engine.selector, None, engine.num_devices, engine.kv_format)
            if engine.num_devices == 1:
                require_weights(name, dtype, weights, placement)
        except CsattnError as error:
            reason = reason or str(error)
            continue
        placed = replace(engine, placement=placement, context_bytes=None)
        room = room_for_contexts(spec, placed, free.host_bytes, int(_FOR_CONTEXTS * device_bytes), describe(config))
        if room == engine.num_contexts or (room and placement != "device"):
            return placement, ""
        reason = reason or f"the GPU has no room for a context of {spec.context_len:,} tokens"
    return "cpu", reason


def choose_for_service(settings: Settings) -> tuple[Chosen, str]:
    """Do `choose_placement` for contexts of as many tokens as the model has positions, at most 131,072.

    A GPU is examined in another process: this one may live as long as the service, and holds no memory of the device.
    """
    if not visible_gpus():
        return "cpu", ""
    model, build = settings.model, settings.build
    given = [model.name, build.dtype, model.weights, build.preset, asdict(settings.engine)]
    found = ask("placement", json.dumps(given))
    return found.get("placement", "cpu"), found.get("reason") or found.get("error", "")


def answer_probe(given: str) -> dict[str, Any]:
    """Compute what `choose_for_service` asks for."""
    name, dtype, weights, preset, fields = json.loads(given)
    geometry, engine = geometry_of(describe(read_config(name, dtype))), EngineSettings(**fields)
    context_len = min(engine.max_context_len or _LONGEST, geometry.max_positions)
    placement, reason = choose_placement(name, dtype, weights, engine, spec_of(geometry, context_len, dtype, preset))
    return {"placement": placement, "reason": reason}
