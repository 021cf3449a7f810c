"""Queries and keys of a few layers while the demo model reads a novel up to its last positions, recorded once.

What a model generates is not in the file: its attention after the context sees text that somebody wrote, which
changes its subject as a long answer does.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bench.timing import gate

TEXT = Path(__file__).parent.parent / "texts" / "novel.txt"
NUM_TOKENS = 8064
LAYERS = (3, 10, 17)  # of 30; the layers after the last of them need not run


@dataclass(frozen=True, slots=True)
class LongText:
    """Post-RoPE queries and keys of every token."""

    q: NDArray[np.float16]  # [num_layers, num_q_heads, num_tokens, head_dim]
    k: NDArray[np.float16]  # [num_layers, num_kv_heads, num_tokens, head_dim]
    frequencies: NDArray[np.float32]  # [head_dim // 2], RoPE's angle from one position to the next


def long_text() -> LongText:
    """What the file holds; it is made where there is none, in a few minutes."""
    cache = Path(os.environ.get("CSATTN_CACHE", "~/.cache/csattn")).expanduser()
    path = cache / "bench" / "long_text.npz"
    if not path.exists():
        _record(path)
    with np.load(path) as file:
        return LongText(file["q"], file["k"], file["frequencies"])


@torch.inference_mode()
def _record(path: Path) -> None:
    # transformers is not needed where the recording is only read
    from csattn.models import load_model
    from csattn.models.rope import model_frequencies
    from index_build.capture import prefill

    loaded = load_model()
    ids = torch.tensor(loaded.tokenizer(TEXT.read_text()).input_ids)
    gate(len(ids) >= NUM_TOKENS, f"{TEXT} has {len(ids)} tokens only")
    queries, keys = [], []
    for capture, _ in prefill(loaded.model, ids[:NUM_TOKENS]):
        print(f"layer {capture.layer_idx}", flush=True)
        if capture.layer_idx in LAYERS:
            queries.append(capture.q.half().numpy())
            keys.append(capture.kv[:, :, 0].half().numpy())
        if capture.layer_idx == LAYERS[-1]:
            break
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".part.npz")
    frequencies = model_frequencies(loaded.model.model.rotary_emb)[0].numpy()
    np.savez_compressed(scratch, q=np.stack(queries), k=np.stack(keys), frequencies=frequencies)
    scratch.rename(path)
