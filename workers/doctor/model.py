"""What a model needs on this machine, in bytes, and what is refused for it: from its config, without its weights."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from csattn.artifact import ModelGeometry
from csattn.build_options import AUTO
from csattn.errors import ConfigError, ModelError
from csattn.models.checkpoint_files import require_weights
from csattn.models.description import describe
from csattn.models.identity import geometry_of
from csattn.models.loader import (
    dtype_for,
    has_low_bit_weights,
    is_to_be_converted,
    load_tokenizer,
    read_config,
    require_dtype_and_rounding,
    require_unrounded,
)
from csattn.models.source import model_name
from csattn.models.spec import ModelSpec
from csattn.models.weight_sizes import WeightBytes, conversion_bytes, weight_bytes
from offload.budget import SPARE_BYTES
from workers.capacity import context_bytes, reported_context_lens, room_for_contexts, spec_of
from workers.doctor.facts import Facts
from workers.doctor.findings import Finding, gib
from workers.engine.gpu.memory import require_heads
from workers.engine.model_choice import cached_row_kind, index_key_share, model_selects_rows, require_choice_placed
from workers.settings import EngineSettings
from workers.streaming.session import can_stream

_ITEM_BYTES = 2  # of bfloat16
_MODELS = "Name a directory with a config.json, a .gguf file or a hub id, of a family that docs/models.md lists."


def examine_model(name: str, facts: Facts, weights: str | None = None) -> list[Finding]:
    """Return findings about a model on this machine. name, weights: as for `load_model`."""
    require_dtype_and_rounding("bfloat16", weights)
    model_name(name)
    try:
        config = read_config(name)
        require_unrounded(config, weights)
        spec = describe(config)
        geometry = geometry_of(spec)
        size = weight_bytes(config, _ITEM_BYTES, weights)
        converting = conversion_bytes(config, _ITEM_BYTES) if is_to_be_converted(name, "bfloat16") else 0
    except Exception as error:  # a config may have anything in it
        said = str(error) if name in str(error) else f"{name}: {error}"
        return [Finding("model", "problem", said, _MODELS)]
    can_be_rounded = not has_low_bit_weights(config, weights)
    is_wide = not facts.probes["torch"].get("devices") and dtype_for("cpu", name, AUTO, weights) == "float32"
    needs = _needs(name, spec, geometry, size, can_be_rounded, converting, is_wide, facts)
    return [needs, *_faults_of_files(name, config), *_refusals(spec)]


def _faults_of_files(name: str, config: Any) -> Iterator[Finding]:
    """Yield findings about weights and a tokenizer that cannot be loaded; none if there are no weights yet: the config
    was enough."""
    folder = Path(os.path.expanduser(name))
    if not folder.is_dir() or not any(folder.glob("*.safetensors*")):
        return
    is_quantized = getattr(config, "quantization_config", None) is not None
    for load in (partial(require_weights, folder, is_quantized), partial(load_tokenizer, str(folder))):
        try:
            load()
        except ModelError as error:
            fault, _, remedy = str(error).rpartition("; ")
            text, remedy = f"{name} cannot be loaded: {fault}.", f"{remedy[0].upper()}{remedy[1:]}."
            yield Finding("model", "problem", text, remedy)


def _needs(
    name: str,
    model: ModelSpec,
    geometry: ModelGeometry,
    size: WeightBytes,
    can_be_rounded: bool,
    converting: int,  # bytes of memory that a first conversion takes; 0: none
    is_wide: bool,  # whether csattn computes in float32 here unless it is told otherwise
    facts: Facts,
) -> Finding:
    """Return the finding about the bytes of weights and contexts, and whether they fit."""
    indexed = len(geometry.indexed_layers)
    local, kept = geometry.num_layers - indexed, cached_row_kind(model)
    layers = f"{indexed} layers" if not local else f"{indexed} layers with full attention and {local} without"
    if not indexed:
        layers = f"{local} layers with {kept}, from which the model itself chooses"
    devices = facts.probes["torch"].get("devices") or []
    wide = f", {gib(2 * size.decoded)} in float32, the default" if is_wide else ""
    text = f"{name} has {layers}; its weights take {gib(size.decoded)} in bfloat16{wide}."
    if size.quantized:
        aside = f" (and, decoded, {gib(size.mapped)} of disk)" if size.mapped else ""
        text += (
            f" Kept in 8 or 4 bits, they take {gib(size.on_host)} of host memory{aside}, or {gib(size.on_gpu)} on a "
            "GPU."
        )
    if converting:
        text += (
            " The file is converted once for a dtype, which takes as much disk space ($CSATTN_CACHE) and, while it "
            f"runs, {gib(converting)} of memory."
        )
    memory = facts.probes["memory"].get("available_bytes", 0)
    free = max((device["free_bytes"] for device in devices), default=0)
    specs = [spec_of(geometry, context_len) for context_len in reported_context_lens(geometry)]
    for spec in specs:
        kv, sketch = context_bytes(spec)
        rows = f"{gib(kv)} of KV, {gib(sketch)} of sketch" if indexed else f"{gib(kv)} of {kept}"
        text += f" {spec.context_len:,} tokens of context, in bfloat16: {rows}."
    kv, sketch = context_bytes(specs[0])
    key_share = index_key_share(model)
    leaves_kv = bool(indexed or key_share)  # whether KV can be in host memory
    remedy = ""
    if devices and size.on_gpu + (sketch + int(key_share * kv) if leaves_kv else kv) > free:
        text += f" The device has {gib(free)} free."
        remedy = "Decode it on the CPU or on a larger device, or use a smaller model."
        if can_be_rounded:
            remedy = f"Keep its weights in 4 bits, with --weights int4; or {remedy[0].lower()}{remedy[1:]}"
    elif not devices and size.on_host > memory:
        text += f" This machine has {gib(memory)}."
        remedy = "Take a smaller model."
        if can_be_rounded:
            remedy = "Keep its weights in 4 bits, with --weights int4 --dtype bfloat16; or use a smaller model."
    elif converting and converting + SPARE_BYTES > memory:
        text += f" This machine has {gib(memory)}."
        remedy = "End other programs while it is converted, or use the model's directory instead of the file."
    else:
        engine = EngineSettings(placement="cpu" if not devices else "hybrid" if leaves_kv else "device")
        host_bytes, device_bytes = memory if devices else memory - size.on_host, free - size.on_gpu
        room = partial(room_for_contexts, engine=engine, host_bytes=host_bytes, device_bytes=device_bytes, model=model)
        rooms = [f"{room(spec)} of {spec.context_len:,}" for spec in specs]
        placed = f"`{engine.placement}`, engine.num_contexts {engine.num_contexts}" if devices else "this machine"
        text += f" Room for contexts ({placed}): {', '.join(rooms)}."
        if is_wide and 2 * size.decoded > memory:
            remedy = (
                "Use --dtype bfloat16, for a service --set build.dtype=bfloat16: in float32 the model does not fit."
            )
        elif is_wide:
            wide_specs = [spec_of(geometry, spec.context_len, "float32") for spec in specs]
            wide_room = partial(room, host_bytes=memory - 2 * size.decoded)
            rooms = [f"{wide_room(spec)} of {spec.context_len:,}" for spec in wide_specs]
            text += f" In float32, the default: {', '.join(rooms)}."
    return Finding("model", "warning" if remedy else "ok", text, remedy)


def _refusals(spec: ModelSpec) -> Iterator[Finding]:
    """Yield findings about what is refused for this model, in the words of the errors."""
    try:
        if model_selects_rows(spec):
            require_choice_placed(spec, "device")
        else:
            require_heads(spec, torch.bfloat16)
    except ConfigError as error:
        yield Finding("model", "warning", f"On a GPU: {error}", "Decode it on the CPU: --placement cpu.")
    if model_selects_rows(spec):
        text = "On a GPU, placement `host` is refused: the GPU that attends also scores the index keys."
        if not index_key_share(spec):
            kept = cached_row_kind(spec)
            text = f"On a GPU, all of its {kept} are on the device: placements `hybrid` and `host` are refused."
        yield Finding("model", "ok", text)
    if any(layer.attention.logit_cap is not None for layer in spec.layers):
        text = "Its attention logits are capped: rows that are not chosen are left out, and `rest` is refused."
        yield Finding("model", "warning", text, "Keep more rows: --keep 0.1.")
    if not can_stream(spec):
        text = "`csattn stream` refuses it: rows of some layers cannot be moved to other positions."
        yield Finding("model", "ok", text)
