"""Layer offloading: if a model does not fit on the device, its layers stay on the host and are copied one at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from csattn.cuda import free_device_bytes

MAX_SHARE = 0.75  # of the device's free memory, for weights: activations need some, too


def place(model: Any, device: str) -> Any:
    """Move a model to a device; its layers stay on the host unless the device has room for all of them."""
    model.layers_are_offloaded = not _has_room(model, device)
    if not model.layers_are_offloaded:
        return model.to(device)
    body = model.model
    for name, part in body.named_children():
        if name != "layers":
            part.to(device)
    for tensor in (*body.parameters(recurse=False), *body.buffers(recurse=False)):
        tensor.data = tensor.data.to(device)
    return model


@contextmanager
def layer_on_device(model: Any, layer_idx: int, parts: tuple[str, ...] = ()) -> Iterator[Any]:
    """Yield a layer of a placed model with its weights on the model's device, copied there while open if necessary.

    parts: submodules of the layer to copy; default: all of it.
    """
    layer = model.model.layers[layer_idx]
    if not is_offloaded(model):
        yield layer
        return
    modules = [getattr(layer, part) for part in parts if hasattr(layer, part)] or [layer]
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    host_data = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.to(model.device, copy=True)
        yield layer
    finally:
        for tensor, on_host in zip(tensors, host_data, strict=True):
            tensor.data = on_host


def is_offloaded(model: Any) -> bool:
    """Whether the model's layers stay on the host."""
    return getattr(model, "layers_are_offloaded", False)


def _has_room(model: Any, device: str) -> bool:
    if torch.device(device).type != "cuda":
        return True
    needed = sum(int(parameter.nbytes) for parameter in model.parameters())
    return needed <= MAX_SHARE * free_device_bytes(device)
