"""Reads tensors of a checkpoint's safetensors files, whatever their types."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from csattn.errors import ModelError
from csattn.models.checkpoint_files import open_safetensors, safetensors_files

SCALES = ("weight_scale_inv", "weight_scale", "scale")  # of FP8 and int8 weights; all are factors, `_inv` too


class CheckpointTensors:
    """The tensors of a folder's safetensors files, by name."""

    def __init__(self, folder: Path):
        self._file_of: dict[str, Any] = {}
        for path in safetensors_files(folder):
            file = open_safetensors(path)
            self._file_of |= dict.fromkeys(file.keys(), file)

    @property
    def names(self) -> list[str]:
        return sorted(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str) -> Tensor:
        if name not in self:
            raise ModelError(f"the checkpoint has no {name}, without which its weights cannot be decoded")
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype of a tensor of FP8 or int8; None for other dtypes."""
        return {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8}.get(self._file_of[name].get_slice(name).get_dtype())

    def scale(self, module: str) -> Tensor:
        """Return the scales of a module's FP8 or int8 weights, as stored."""
        name = next((x for part in SCALES if (x := f"{module}.{part}") in self), None)
        if name is None:
            raise ModelError(
                f"the checkpoint has no scales of {module}.weight ({', '.join(SCALES)}), without which it cannot be "
                "decoded; download all of it"
            )
        return self.read_scales(name)

    def read_scales(self, name: str) -> Tensor:
        """Read a tensor of scales; uint8 are exponents. Raises ModelError if any is not finite, or an integer."""
        scales = self.read(name)
        if scales.dtype == torch.uint8:
            scales = scales.view(torch.float8_e8m0fnu)
        if not scales.is_floating_point():
            raise ModelError(
                f"{name} has scales in {str(scales.dtype).removeprefix('torch.')}, which csattn cannot read; use a "
                "checkpoint with scales in float32, bfloat16 or exponents of 8 bits"
            )
        if not scales.float().isfinite().all():
            raise ModelError(f"{name} has scales that are not finite; download the checkpoint again")
        return scales
