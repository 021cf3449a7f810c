"""Random weights for a model of any config, for measuring speed."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal

import torch
from accelerate import init_empty_weights
from torch import Tensor

from csattn.models.module_weights import weights_of
from csattn.models.quantized_model import HEAD_ROUNDING
from csattn.models.quantized_weight import ROUNDINGS, QuantizedExperts, QuantizedWeight, Rounding
from csattn.models.share import require_shares
from csattn.models.text_part import class_of
from csattn.models.weights import ExpertWeights, LayerWeights, Linear, ModelWeights
from csattn.share import Share
from workers.model.weights import lay_out, require_dtype

Few = Rounding | Literal["mxfp4"]  # formats of linear layers and experts; mxfp4: of experts only
FEW: tuple[Few, ...] = (*ROUNDINGS, "mxfp4")
_INTO_STREAM = ("out", "down", "projection")  # matrices whose products are added to the residual stream


def random_weights(
    config: Any,  # of transformers
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    few: Few | None = None,  # format of weights in few bits; None: dtype
    share: Share | None = None,  # the part of the model for one of several devices; None: all of it
) -> ModelWeights:
    """Make weights that keep activations near 1; the same seed gives the same weights on the same kind of device.

    A share has the same numbers as in the whole model, of which embedding, head and one layer are in memory at a time.
    Raises ConfigError for models that cannot be shared out.
    """
    require_dtype(dtype)
    with init_empty_weights(include_buffers=False):  # shapes without memory; RoPE's angles are buffers
        there = weights_of(class_of(config)._from_config(deepcopy(config), dtype=dtype))  # it writes the dtype there
    spec = there.spec
    if share is not None:
        assert few is None, "random weights of few bits are not shared out"
        require_shares(spec, share.num_devices)
    generator, into_stream = torch.Generator(device).manual_seed(seed), (2 * spec.num_layers) ** -0.5
    draws = _Draws(torch.device(device), generator, into_stream, few)
    head_draws = replace(draws, few=HEAD_ROUNDING["int4"] if few == "int4" else None)
    embedding = draws.tensor(there.embedding, "embedding").mul_(spec.hidden_size**0.5)
    head = head_draws.drawn(there.head)
    if spec.tied_embedding:
        head = Linear(embedding, head.bias)
    others = {name: draws.drawn(getattr(there, name)) for name in ("final_norm", "ropes", "inputs", "join")}
    if others["inputs"] is not None:
        others["inputs"].table.mul_(spec.layer_input_width**0.5)
    whole = replace(there, layers=(), embedding=embedding, head=head, **others)
    layers: Iterator[LayerWeights] = map(draws.drawn, there.layers)
    return lay_out(whole, layers, device, dtype, share)


@dataclass(frozen=True, slots=True)
class _Draws:
    """Draws numbers for weights that have none yet."""

    device: torch.device
    generator: torch.Generator
    into_stream: float  # factor for what is added to the stream, which each layer does twice
    few: Few | None

    def drawn(self, part: Any, name: str = "") -> Any:
        """Return the same structure with numbers. name: of the field that it is."""
        if isinstance(part, Tensor):
            return self.tensor(part, name)
        if isinstance(part, Linear):
            weight = self.tensor(part.weight, name)
            bias = None if part.bias is None else torch.zeros_like(part.bias, device=self.device)
            of_few = self.few is not None and self.few != "mxfp4" and name != "router"
            return Linear(weight, bias, self._in_few(weight) if of_few else None)
        if isinstance(part, tuple):
            return tuple(self.drawn(each, name) for each in part)
        if not is_dataclass(part):
            return part
        drawn = {of.name: self.drawn(getattr(part, of.name), of.name) for of in fields(part)}
        with_numbers: Any = replace(part, **drawn)  # type: ignore[type-var]  # an instance
        return self._experts(with_numbers) if isinstance(with_numbers, ExpertWeights) else with_numbers

    def tensor(self, like: Tensor, name: str) -> Tensor:
        """Return a tensor: its own numbers if it has any, a matrix of normal ones, zeros for biases, or else ones."""
        if not like.is_meta:
            return like.to(self.device)
        if name.endswith("bias") or name == "sinks":
            return torch.zeros_like(like, device=self.device)
        if like.ndim == 1:
            return torch.ones_like(like, device=self.device)
        if name == "index_norm":  # LayerNorm's weights and biases
            return torch.tensor([[1.0], [0.0]], device=self.device).repeat(1, like.shape[1])
        std = like.shape[-1] ** -0.5 * (self.into_stream if name in _INTO_STREAM else 1.0)
        empty = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        return empty.normal_(std=std, generator=self.generator)

    def _experts(self, part: ExpertWeights) -> ExpertWeights:
        num_experts = len(part.gates)
        if part.by_token is not None:
            chosen = torch.randint(num_experts, part.by_token.shape, generator=self.generator, device=self.device)
            part = replace(part, by_token=chosen.int())
        if self.few is None:
            return part
        both = part.gates if part.ups is None else torch.cat([part.gates, part.ups], dim=1)
        in_few = (self._in_few(of.flatten(0, 1)) for of in (both, part.down))
        return replace(part, quantized=QuantizedExperts(*in_few))

    def _in_few(self, weight: Tensor) -> QuantizedWeight:
        assert self.few is not None
        if self.few != "mxfp4":
            return QuantizedWeight.rounded(weight, self.few)
        scale = torch.log2(weight.float().std() / 3).round() + 127  # random, with about the same standard deviation
        codes = torch.randint(16, weight.shape, dtype=torch.uint8, device=self.device, generator=self.generator)
        scales = scale.to(torch.uint8).expand(len(weight), -(-weight.shape[1] // 32))
        return QuantizedWeight.pack("fp4", codes, scales, 32)
