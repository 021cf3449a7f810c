"""Checks of the arguments of this package's public functions. Errors say in words what came and what was wanted."""

from collections.abc import Sequence

import torch
from torch import Tensor

from csattn.errors import ArrayError, ConfigError


def require_array(
    name: str,
    array: Tensor,
    shape: Sequence[int | str],  # a number must match; a word names an axis of any size
    *dtypes: torch.dtype,  # allowed dtypes; none given: any
    like: Tensor | None = None,  # an array on the device where it must be
    any_row_stride: bool = False,  # of a matrix: allow any row stride, as of a view of a wider one
) -> None:
    """Raise ArrayError unless the array is contiguous and has this shape, dtype and device (the current GPU).

    Kernels are launched on the current device's stream, whatever device the arrays are on.
    """
    if not isinstance(array, Tensor):
        raise ArrayError(f"{name} is a {type(array).__name__}; wanted a torch.Tensor")
    fits = array.dim() == len(shape) and all(
        isinstance(want, str) or came == want for came, want in zip(array.shape, shape, strict=True)
    )
    wanted = ", ".join(map(str, shape))
    if not fits:
        raise ArrayError(f"{name} has shape {list(array.shape)}; wanted [{wanted}]")
    if dtypes and array.dtype not in dtypes:
        raise ArrayError(f"{name} is {_word(array.dtype)}; wanted {' or '.join(map(_word, dtypes))}: convert it first")
    if not (array.shape[1] <= 1 or array.stride(1) == 1 if any_row_stride else array.is_contiguous()):
        raise ArrayError(
            f"{name} of shape {list(array.shape)} has strides {list(array.stride())}; wanted contiguous "
            f"{'rows of ' if any_row_stride else ''}[{wanted}]: call .contiguous() first"
        )
    if like is not None and array.device != like.device:
        raise ArrayError(f"{name} is on {array.device}, the other arrays are on {like.device}; move it there first")
    if array.is_cuda and array.device.index != (current := torch.cuda.current_device()):
        raise ArrayError(
            f"{name} is on {array.device}, and torch's current device is cuda:{current}; call this within "
            f'torch.cuda.device("{array.device}")'
        )


def require_at_least(name: str, value: int, least: int, most: int | None = None) -> None:
    """Raise ConfigError unless least <= value <= most."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} is {value!r}; wanted a whole number")
    if value < least:
        raise ConfigError(f"{name} is {value}; wanted at least {least}")
    if most is not None and value > most:
        raise ConfigError(f"{name} is {value}; wanted at most {most}")


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
