"""Reads checkpoints with quantized weights: decodes them, and keeps the quantized form if products can read it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from csattn.cpu.heap import trim_heap
from csattn.errors import ModelError
from csattn.models.checkpoint_tensors import SCALES, CheckpointTensors
from csattn.models.quantization import Quantization
from csattn.models.quantized_formats import Matrix, awq, fp4, gptq, mxfp4, packed, scaled
from csattn.models.quantized_weight import FP4_MAX_EXPONENT, QuantizedWeight, joined

_BYTE_TYPES = (torch.float8_e4m3fn, torch.int8)
# tensors beside a quantized matrix, which a decoded one does not need; those of the last line scale activations
_PARTS = (
    *(*SCALES, "weight_zero_point", "weight_shape", "weight_g_idx"),
    *("qzeros", "scales", "g_idx"),
    *("input_scale", "input_scale_ub", "input_zero_point", "output_scale", "activation_scale"),
)
# of 8-bit attention, which csattn does not compute
_OF_ROWS = ("q_scale", "k_scale", "v_scale", "kv_scale", "k_zero_point", "v_zero_point")


def read_state(
    folder: Path,  # with safetensors files
    quantization_config: Mapping[str, Any],
    dtype: torch.dtype,
    named: Callable[[str], str | None] = str,  # the model's name of a tensor; None: it has none
    store_decoded: Callable[[Tensor], Tensor] | None = None,  # of a quantized form; None: in memory
) -> tuple[dict[str, Tensor], dict[str, QuantizedWeight]]:
    """Return a checkpoint's tensors by their names in the model, and the quantized form of those that products read.

    Decoded tensors are in `dtype`. The quantized form of experts in one tensor is stacked.
    Raises ModelError if a tensor is missing, does not have the shape that its scales imply, or cannot be read.
    """
    quantization, files = Quantization.read(quantization_config), CheckpointTensors(folder)
    state: dict[str, Tensor] = {}
    quantized: dict[str, QuantizedWeight] = {}
    mover = None if store_decoded is None else _DecodedMover(state, store_decoded)
    for name in files.names:
        if _is_part(files, name) or named(name) is None:
            continue
        try:
            whole, tensor, quantized_form = _decoded(files, name, quantization, dtype)
        except (RuntimeError, IndexError, ValueError) as error:  # from torch, for shapes that do not fit
            whole, what = name.removesuffix("_blocks"), str(error).splitlines()[0]
            raise ModelError(f"{whole} cannot be decoded: {what}; the checkpoint is damaged") from error
        place = named(whole) or whole
        state[place] = tensor
        if quantized_form is not None:
            quantized[place] = quantized_form
            if mover is not None:
                mover.put(place)
    if mover is not None:
        mover.end()
    return state, quantized


def _is_part(files: CheckpointTensors, name: str) -> bool:
    """Whether a tensor is not read on its own: it is part of another, or is not needed."""
    module, _, last = name.rpartition(".")
    if last in _PARTS and any(f"{module}.{kind}" in files for kind in ("weight", "qweight", "weight_packed")):
        return True
    return last in _OF_ROWS or (name.endswith("_scales") and f"{name.removesuffix('_scales')}_blocks" in files)


def _decoded(
    files: CheckpointTensors, name: str, quantization: Quantization, dtype: torch.dtype
) -> tuple[str, Tensor, QuantizedWeight | None]:
    """Return the name of the whole that a tensor is part of, its values, and its quantized form, if products read it.

    Values are decoded to `dtype`; those of a tensor that is not quantized are as stored.
    """
    module = name.rpartition(".")[0]
    if name.endswith("_blocks"):
        whole = name.removesuffix("_blocks")
        experts = mxfp4(files.read(name), files.read_scales(f"{whole}_scales"))
        decoded = torch.stack([expert.decoded(dtype).T for expert in experts])  # [experts, num_in, num_out]
        return whole, decoded, _if_readable(joined(experts))
    if quantization.method == "fp8" and files.dtype(name) == torch.int8:
        pairs = fp4(module, files.read(name), files.scale(module))
        return name, pairs.decoded(dtype), _if_readable(pairs)
    if (matrix := _matrix(files, name, quantization)) is not None:
        quantized = matrix.to_quantized()
        return (
            f"{module}.weight",
            matrix.decoded().to(dtype) if quantized is None else quantized.decoded(dtype),
            quantized,
        )
    tensor = files.read(name)
    if tensor.dtype == torch.float8_e8m0fnu:
        raise ModelError(f"the checkpoint has the scales {name} but not their weights; download all of it")
    if tensor.dtype.itemsize == 1 and tensor.dtype != torch.bool:
        raise ModelError(
            f"its {name} is in {str(tensor.dtype).removeprefix('torch.')}, a format that csattn does not read; use a "
            "checkpoint in float8_e4m3fn or int8, with a matrix for each expert"
        )
    return name, tensor, None


def _if_readable(weight: QuantizedWeight | None) -> QuantizedWeight | None:
    """Return a matrix of 4-bit floats; None if a scale is too large for products to read."""
    return None if weight is None or int(weight.scales.max()) > FP4_MAX_EXPONENT else weight


class _DecodedMover:
    """Passes decoded tensors to `store_decoded`: a layer's experts together, as each call may hold a file open."""

    def __init__(self, state: dict[str, Tensor], store_decoded: Callable[[Tensor], Tensor]) -> None:
        self._state, self._store_decoded = state, store_decoded
        self._block, self._places = "", list[str]()  # of experts not moved yet

    def put(self, place: str) -> None:
        """Move the tensor of this name. Experts of a block must follow each other; they move when the block ends."""
        block, is_of_experts, _ = place.partition(".experts.")
        if not is_of_experts:
            self._state[place] = self._store_decoded(self._state[place])
            return
        if block != self._block:
            self.end()
        self._block = block
        self._places.append(place)

    def end(self) -> None:
        """Move the experts that were put and not moved yet."""
        if not self._places:
            return
        tensors = [self._state[place] for place in self._places]
        together = self._store_decoded(torch.cat([tensor.flatten() for tensor in tensors]))
        parts = torch.split(together, [tensor.numel() for tensor in tensors])
        for place, tensor, part in zip(self._places, tensors, parts, strict=True):
            self._state[place] = part.view(tensor.shape)
        self._places.clear()
        del tensors, tensor
        trim_heap()


def _matrix(files: CheckpointTensors, name: str, quantization: Quantization) -> Matrix | None:
    """Return the matrix that a tensor is part of; None if it is not quantized."""
    module, _, last = name.rpartition(".")
    if last == "qweight":
        return awq(files, module, quantization) if quantization.method == "awq" else gptq(files, module, quantization)
    if last == "weight_packed":
        return packed(files, module, quantization)
    if last == "weight" and files.dtype(name) in _BYTE_TYPES:
        return scaled(files, module, files.read(name), files.scale(module).float(), quantization)
    return None
