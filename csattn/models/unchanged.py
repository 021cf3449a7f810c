"""Whether a model in memory stays what it was: steps are computed beside its modules, over a context's KV of then."""

from typing import Any

import torch
from torch import Tensor

from csattn.errors import ModelError

_SAMPLED_VALUES = 16  # of each parameter


class Unchanged:
    """A model as it is now, by a few values of each of its weights: some milliseconds, now and whenever it is asked."""

    def __init__(self, model: Any, name: str) -> None:
        self._model, self._name = model, name
        self._parameters, self._values = _glance(model)

    def require(self) -> None:
        """Raise ModelError where weights have changed, or where layers have hooks, which such steps do not call."""
        parameters, values = _glance(self._model)
        if parameters != self._parameters or not torch.equal(values, self._values):
            raise changed(self._name)
        for name, module in self._model.named_modules():
            hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
            if name and not all(map(_is_of_transformers, hooks)):
                raise ModelError(
                    f"{name} of {self._name} has a forward hook, which a request's steps do not call; remove it, or "
                    "call the model without the request"
                )


def changed(name: str) -> ModelError:
    """What is raised where a model is not what it was when it was loaded."""
    return ModelError(
        f"the weights of {name} are not those that it was loaded with: an adapter, another dtype, training or an edit "
        "has changed them; undo that, or save the model as it is now (adapters merged), load it, and build its "
        "contexts with it"
    )


def _glance(model: Any) -> tuple[list[tuple[Any, ...]], Tensor]:
    """Names and kinds of all parameters, and some bits of each."""
    parameters, values = [], [torch.zeros(0, dtype=torch.int32)]
    for name, parameter in model.named_parameters():
        # inference tensors count no changes
        version = None if parameter.is_inference() else parameter._version
        parameters.append((name, parameter.dtype, parameter.shape, parameter.is_meta, version))
        if not parameter.is_meta:
            flat = parameter.detach().reshape(-1)
            sample = flat[:: max(1, len(flat) // _SAMPLED_VALUES)].float().cpu()
            values.append(sample.view(torch.int32))  # NaN equals itself
    return parameters, torch.cat(values)


def _is_of_transformers(hook: Any) -> bool:
    """Those that tell what a layer gave, and change nothing, stay on the layers."""
    return str(getattr(hook, "__module__", "")).startswith("transformers.")
