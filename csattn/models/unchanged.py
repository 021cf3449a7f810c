"""Detect that a model in memory has changed. Steps bypass its modules, and a context's KV is of the model as it was."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from csattn.errors import ModelError

_SAMPLED_VALUES = 16  # about so many of each parameter


class Unchanged:
    """A snapshot of a model by a few values of each weight. Taking or comparing it takes some milliseconds."""

    def __init__(self, model: Any, name: str) -> None:
        self._model, self._name = model, name
        self._parameters, self._values, self._shared = _glance(model)

    def require(self) -> None:
        """Raise ModelError if weights have changed or moved to shared memory, or if `require_original_forward` does."""
        parameters, values, shared = _glance(self._model)
        if parameters != self._parameters or not torch.equal(values, self._values):
            raise changed(self._name)
        # the move freed the memory that this session reads
        if any(now and not before for now, before in zip(shared, self._shared, strict=True)):
            raise ModelError(
                f"the weights of {self._name} have moved to shared memory (`share_memory`, or a queue of "
                "torch.multiprocessing), and this session reads them where they were; open a new one"
            )
        require_original_forward(self._model, self._name)


def require_original_forward(model: Any, model_name: str) -> None:
    """Raise ModelError if a module has a hook that may change results, or a `forward` that is not its class's."""
    for name, module in model.named_modules():
        if not name:
            continue  # the whole model's hooks and forward are called in any case
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        forward = getattr(module.forward, "_torchdynamo_orig_callable", module.forward)  # compiled, it is the same
        if (moved := getattr(module, "_hf_hook", None)) is not None and _is_of_library(type(moved).__module__):
            forward = getattr(module, "_old_forward", forward)  # accelerate's wrapper moves weights, then calls this
        is_original = getattr(forward, "__func__", None) is type(module).forward
        is_original = is_original or (moved is None and _changes_nothing(forward))
        is_original = is_original and getattr(forward, "__self__", module) is module
        if not is_original or not all(map(_changes_nothing, hooks)):
            raise ModelError(
                f"{name} of {model_name} has a forward {'hook' if is_original else 'put in the place of its own'}, "
                "which contexts are not built with and requests do not call; remove it, or call the model without "
                "a request"
            )


def changed(name: str) -> ModelError:
    """Return the error for a model that is not what it was when it was loaded."""
    return ModelError(
        f"{name} is not the model that was loaded: an adapter, another dtype, training or an edit has changed its "
        "weights or its config; undo that and open a new session, or save the model as it is now (adapters merged), "
        "load it, and build its contexts with it"
    )


def _glance(model: Any) -> tuple[list[tuple[Any, ...]], Tensor, list[bool]]:
    """Return names and kinds of all parameters, a sample of their bits, and which are in shared memory."""
    parameters, values, shared = [], [torch.zeros(0, dtype=torch.int32)], []
    for name, parameter in model.named_parameters():
        # inference tensors have no version counter
        version = None if parameter.is_inference() else parameter._version
        parameters.append((name, parameter.dtype, parameter.shape, parameter.is_meta, version))
        shared.append(parameter.is_cpu and parameter.untyped_storage().is_shared())
        if not parameter.is_meta:
            now, size = parameter.detach(), parameter.numel()
            if now.dtype.itemsize == 1:
                now = now.view(torch.int8)  # torch has no `take` for FP8
            places = torch.arange(0, size, max(1, size // _SAMPLED_VALUES), device=now.device)
            sample = now.take(places).float().cpu()  # `reshape` would copy a transposed one
            values.append(sample.view(torch.int32))  # as bits, NaN equals itself
    return parameters, torch.cat(values), shared


def _changes_nothing(call: Any) -> bool:
    """Whether a hook is harmless: transformers' record outputs, accelerate's move weights, csattn's serve caches."""
    written = call.func if isinstance(call, partial) else call
    # not `__module__`, which functools.wraps copies
    home = getattr(written, "__globals__", {}).get("__name__", "")
    return _is_of_library(str(home))


def _is_of_library(module_name: str) -> bool:
    return module_name.startswith(("transformers.", "accelerate.", "csattn."))
