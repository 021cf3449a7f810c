"""How many bytes contexts take, and how many contexts fit: arithmetic for doctor, service, residency and plans."""

import logging
import mmap
from typing import Any

from csattn.artifact import ArtifactSpec, KvDtype, ModelGeometry
from csattn.artifact.layout import file_layout, file_names, kv_file
from csattn.cache import cache_dir
from csattn.config import preset
from csattn.models.loader import DTYPES, are_copied, has_low_bit_weights, is_to_be_converted, read_config
from csattn.models.spec import ModelSpec
from csattn.models.weight_sizes import WeightBytes, conversion_bytes, is_converted_on_disk, weight_bytes
from offload.budget import host_memory_bytes, require_host_memory
from offload.codecs.formats import KvFormat
from offload.slot_cache import max_slots
from workers.doctor.findings import gib
from workers.engine.model_choice import index_key_share, latents_of, least_slots
from workers.settings import EngineSettings

_log = logging.getLogger(__name__)
CONTEXT_LENS = (32_768, 131_072, 1_048_576)  # lengths that are reported, as far as the model has positions


def spec_of(
    geometry: ModelGeometry, context_len: int, kv_dtype: KvDtype = "bfloat16", index: str = "default"
) -> ArtifactSpec:
    """Return the spec of an arbitrary context of that length, to compute sizes from. index: a preset's name."""
    return ArtifactSpec(
        model_name="any",
        model_fingerprint="any",
        model=geometry,
        tokenizer_hash="any",
        token_ids_sha256="any",
        context_len=context_len,
        index_config=preset(index),
        kv_dtype=kv_dtype,
    )


def context_bytes(spec: ArtifactSpec, kv_format: KvFormat | None = None) -> tuple[int, int]:
    """Return the bytes of a loaded context in whole pages: its KV in kv_format, and all its other files.

    The others are mainly the index.
    """
    kv = others = 0
    coded = [kv_file(i) for i in spec.model.indexed_layers if spec.model.kv_source(i) == i] if kv_format else []
    for name in file_names(spec):
        if name in coded:
            assert kv_format is not None
            kv += _in_pages(spec.model.num_kv_heads * spec.context_len * kv_format.row_bytes(spec.model.head_dim))
        elif ".kv." in name or ("compressed" in spec.model.kinds and ".state." in name):
            kv += _in_pages(file_layout(spec, name).size_bytes)
        else:
            others += _in_pages(file_layout(spec, name).size_bytes)
    return kv, others


def room_for_contexts(
    spec: ArtifactSpec,
    engine: EngineSettings,
    host_bytes: int,  # free once the weights are loaded
    device_bytes: int,  # free once the weights are loaded
    model: ModelSpec | None = None,  # needed if it may be a model of latents (MLA)
) -> int:
    """Return how many contexts like this one can be loaded at the same time."""
    kv, index = context_bytes(spec, engine.kv_format)
    searched = index + int(min(engine.slot_share, max_slots() / spec.context_len) * kv)
    if model is not None and (latent := latents_of(model)) is not None:
        slot_share = max(engine.slot_share, least_slots(latent, spec.context_len) / spec.context_len)
        searched = int((index_key_share(model) + slot_share) * kv)
    on_device = {"cpu": 0, "device": kv + index}.get(engine.placement, searched)
    on_host = {"cpu": kv + index, "device": 0}.get(engine.placement, kv)
    bounds = [have // takes for have, takes in ((host_bytes, on_host), (device_bytes, on_device)) if takes]
    if engine.context_bytes is not None:
        bounds.append(engine.context_bytes // (kv + index))
    if engine.placement != "cpu":
        bounds.append(engine.num_contexts)
    return max(0, min(bounds))


def require_room_for_weights(name: str | None, dtype: str, weights: str | None = None) -> None:
    """Raise MemoryPlanError if host memory has no room for the weights, before the system kills the process for them.

    Weights that are memory-mapped from their files need no room; if they exceed free memory, this is logged. Arguments
    as for `load_model`.
    """
    config = read_config(name, dtype)
    size = weight_bytes(config, DTYPES[dtype].itemsize, weights)
    is_converted = is_to_be_converted(name, dtype)
    if is_converted or are_copied(config, dtype, weights):
        _require_room_for_copies(config, size, dtype, is_converted)
    needed = size.on_host if dtype == "bfloat16" else size.decoded
    _warn_if_larger_than_memory(needed, can_be_rounded=not has_low_bit_weights(config, weights))


def _require_room_for_copies(config: Any, size: WeightBytes, dtype: str, is_converted: bool) -> None:
    remedy = "end other programs, or use a smaller model"
    if is_converted and dtype == "float32":
        remedy += "; in bfloat16 it takes less: --dtype bfloat16, for a service build.dtype"
    elif are_copied(config, dtype) and not are_copied(config, "bfloat16"):
        remedy += (
            "; in bfloat16, the dtype of its files, it is memory-mapped: --dtype bfloat16, for a service build.dtype"
        )
    what = f"the model, its weights {'converted' if is_converted else 'copied'} to {dtype},"
    needed = size.decoded + size.quantized - (size.mapped if dtype == "bfloat16" else 0)
    if is_converted:
        needed = conversion_bytes(config, DTYPES[dtype].itemsize)  # once converted, it is memory-mapped
        if not is_converted_on_disk(size.decoded):
            remedy += f"; with more room in {cache_dir()} it takes less"
    elif getattr(config, "dtype", None) in (None, DTYPES[dtype]):
        needed -= size.others  # these are memory-mapped
    else:
        needed = max(needed, size.decoded)  # all are cast before they are rounded
    require_host_memory(what, needed, remedy)


def _warn_if_larger_than_memory(needed: int, can_be_rounded: bool) -> None:
    """Warn of memory-mapped weights that exceed free memory: they load, but decoding on a CPU would be slow."""
    if needed <= (free := host_memory_bytes()):
        return
    remedy = "keep them in 4 bits (weights int4, dtype bfloat16)" if can_be_rounded else "use a smaller model"
    _log.warning(
        f"the model's weights take {gib(needed)} and {gib(free)} of memory is free: weights that do not fit are read "
        f"from the disk whenever they are needed, on a CPU for each token; {remedy}"
    )


def reported_context_lens(geometry: ModelGeometry) -> list[int]:
    """Return the context lengths for which sizes are reported."""
    return [length for length in CONTEXT_LENS if length < geometry.max_positions] or [geometry.max_positions]


def _in_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
