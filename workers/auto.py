"""What `auto` stands for: a placement on a GPU, if this machine has one with room for the model, and a dtype."""

import json
from dataclasses import replace
from typing import Any, Literal

import torch

from csattn.artifact import ArtifactSpec
from csattn.build_options import AUTO
from csattn.errors import CsattnError
from csattn.models.description import describe
from csattn.models.identity import geometry_of
from csattn.models.loader import DTYPES, dtype_for, read_config
from csattn.models.weight_sizes import weight_bytes
from offload.budget import available_memory
from offload.errors import NoDeviceError
from workers.capacity import room_for_contexts, spec_of
from workers.doctor.findings import gib
from workers.engine.gpu.memory import KERNELS_BYTES, require_weights
from workers.engine.opening import require_together
from workers.model.devices import require_device
from workers.settings import EngineSettings

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
        has = f"the GPU has {gib(free.device_bytes)} free"
        return "cpu", f"the model's weights take {gib(size.on_gpu)} in {dtype}, {has}"
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


def choose_for_service(given: str) -> dict[str, str]:
    """Choose a service's placement, its dtype, or both; say also why a GPU that is there is not used.

    The placement is chosen for contexts of as many tokens as the model has positions, at most 131,072. given, in JSON:
    the model's name, dtype, rounding and preset, the engine's settings, and the settings to choose, of UNTIL_CHOSEN.
    """
    name, dtype, weights, preset, fields, left = json.loads(given)
    engine, asked = EngineSettings(**fields), AUTO if "build.dtype" in left else dtype
    placement, reason = engine.placement, ""
    on_gpu: Any = dtype_for("cuda", name, asked, weights)
    if "engine.placement" in left:
        geometry = geometry_of(describe(read_config(name, on_gpu)))
        context_len = min(engine.max_context_len or _LONGEST, geometry.max_positions)
        spec = spec_of(geometry, context_len, on_gpu, preset)
        placement, reason = choose_placement(name, on_gpu, weights, engine, spec)
    dtype = dtype_for("cpu", name, asked, weights) if placement == "cpu" else on_gpu
    return {"placement": placement, "dtype": dtype, "reason": reason}
