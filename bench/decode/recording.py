"""Rows and queries of a few layers of a small model, recorded in a file: what the benchmarks decode with.

    python -m bench.decode record [--recording FILE]
    python -m bench.accuracy long --texts manual --context-len 64K --stretch 8 --record FILE --layers 13

The first has the demo model read a novel; the second records any text, up to 64K tokens. Keys and values are stored in
8 bits, scaled by dimension: a layer of SmolLM2 takes 3 MB at 8K tokens and 25 MB at 64K. `widened.py` makes the heads
of a larger shape out of them.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.timing import gate
from csattn.cache import cache_dir


@dataclass(frozen=True, slots=True)
class Recording:
    """A context's rows, and the queries of the steps that follow it: the layer's own, and those predicted for it."""

    keys: NDArray[np.int8]  # [num_layers, num_kv_heads, context_len, head_dim], after RoPE
    key_steps: NDArray[np.float32]  # [num_layers, num_kv_heads, 1, head_dim]: a key is int8 times this
    values: NDArray[np.int8]  # as `keys`
    value_steps: NDArray[np.float32]
    context_q: NDArray[np.float16]  # [num_layers, num_q_heads, num_sampled, head_dim], after RoPE
    own: NDArray[np.float16]  # [num_layers, num_q_heads, num_steps, head_dim], after RoPE
    predicted: NDArray[np.float16]  # as `own`, predicted from the input of the layer before
    layer_ids: NDArray[np.int64]  # [num_layers], which layers of the model these are
    stretch: float  # factor by which the model's positions were extended (YaRN)
    text_sha256: str

    @property
    def num_layers(self) -> int:
        return int(self.keys.shape[0])

    @property
    def num_kv_heads(self) -> int:
        return int(self.keys.shape[1])

    @property
    def context_len(self) -> int:
        return int(self.keys.shape[2])

    @property
    def num_steps(self) -> int:
        return int(self.own.shape[2])

    def rows(self, layer: int) -> Tensor:
        """Return K and V of one recorded layer side by side: [num_kv_heads, context_len, 2, head_dim] float32."""
        k, v = self.keys[layer] * self.key_steps[layer], self.values[layer] * self.value_steps[layer]
        return torch.stack([torch.from_numpy(k), torch.from_numpy(v)], dim=2)

    def describe(self) -> dict[str, Any]:
        """Describe the recording, for the header of a result file."""
        layers = [int(layer) for layer in self.layer_ids]
        return {"text": self.text_sha256, "context_len": self.context_len, "layers": layers, "stretch": self.stretch}


def default_path() -> Path:
    return cache_dir() / "bench" / "recorded.npz"


def save_recording(recording: Recording, path: Path) -> None:
    arrays: dict[str, Any] = {field.name: getattr(recording, field.name) for field in fields(Recording)}
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".part.npz")
    np.savez_compressed(scratch, **arrays)
    scratch.rename(path)


def load_recording(path: Path) -> Recording:
    """Read a file of `save_recording`. Raises GateError if it is missing or lacks an array."""
    gate(path.exists(), f"there is no recording at {path}; make one with `python -m bench.decode record`")
    with np.load(path) as file:
        missing = [field.name for field in fields(Recording) if field.name not in file]
        gate(not missing, f"the recording at {path} has no {', '.join(missing)}; record anew")
        arrays: dict[str, Any] = {field.name: file[field.name] for field in fields(Recording)}
    arrays |= {"stretch": float(arrays["stretch"]), "text_sha256": str(arrays["text_sha256"])}
    return Recording(**arrays)
