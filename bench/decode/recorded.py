"""What the benchmarks decode with: a small model's queries and keys, and indexes of them, recorded once.

    python -m bench.decode record [--out FILE]

The demo model reads a novel. Of a few layers, the keys of the first `CONTEXT_LEN` tokens are kept and, of the next
`NUM_STEPS` tokens, the queries that a decode step brings: the layer's own, and those that looking ahead predicts
from the input of the layer before. `widened.py` makes the heads of a larger shape out of them; the indexes of those
heads' keys are built here, by `index_build` from the widened queries of the context, and kept in the same file.
"""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.decode.widened import HEAD_DIM, NUM_WIDE_LAYERS, Recording, wide_heads, wide_keys
from bench.timing import gate
from csattn.config import IndexConfig, SearchConfig, preset
from csattn.models.query import queries_before_rope, rotate

TEXT = Path(__file__).parent.parent / "texts" / "novel.txt"
CONTEXT_LEN, NUM_STEPS = 7680, 256
LAYERS = (3, 6, 10, 13, 17, 20, 24, 27)  # of 30: early, middle and late; layer 0 has no layer before it to predict from

# name -> how it is built, and of how many wide layers (`paper` has a codebook per query head)
INDEXES: dict[str, tuple[IndexConfig, int]] = {
    "default": (preset("default", HEAD_DIM), NUM_WIDE_LAYERS),
    "pooled": (preset("pooled", HEAD_DIM), NUM_WIDE_LAYERS),
    "rows 32x32": (replace(preset("default", HEAD_DIM), num_subspaces=32, num_centroids=32), NUM_WIDE_LAYERS),
    "lists": (preset("lists", HEAD_DIM), 2),
    "paper": (preset("paper", HEAD_DIM), 2),
}

# name -> the recorded one of which it has every second centroid: half the memory, where a whole one does not fit
HALVES = {"default 32": "default", "pooled 32": "pooled"}


def of_variant(variant: str, search: SearchConfig) -> tuple[str, SearchConfig]:
    """The recorded index and the search of a variant; `default+rest`: the rows that are not read are estimated."""
    name, rest, _ = variant.partition("+rest")
    return name, replace(search, estimate_rest=bool(rest))


@dataclass(frozen=True, slots=True)
class WideIndex:
    """An index without its table: that follows from the keys, whatever their number."""

    config: IndexConfig
    query_basis: NDArray[np.float32]  # [num_index_heads, head_dim, head_dim], see `csattn.index.LayerIndex`
    key_basis: NDArray[np.float32]  # likewise
    key_mean: NDArray[np.float32]  # [num_index_heads, head_dim]
    codebooks: NDArray[np.float32]  # [num_index_heads, num_subspaces, num_centroids, subspace_dim]


@dataclass(frozen=True, slots=True)
class Recorded:
    """All that the file holds."""

    recording: Recording
    indexes: dict[str, list[WideIndex]]  # per name, one for each wide layer that has it


def default_path() -> Path:
    cache = Path(os.environ.get("CSATTN_CACHE", "~/.cache/csattn")).expanduser()
    return cache / "bench" / "recorded.npz"


def record(path: Path) -> Recorded:
    """Run the demo model, build the indexes, write the file: some minutes on two cores."""
    recording, context_q = record_model()
    recorded = Recorded(recording, build_indexes(recording, context_q))
    save(recorded, path)
    return recorded


@torch.inference_mode()
def record_model() -> tuple[Recording, Tensor]:
    """The recording, and the context's own queries [num_layers, num_q_heads, context_len, head_dim] float16."""
    # transformers and faiss are not needed where a recording is only read
    from csattn.models import load_model
    from index_build.capture import prefill

    loaded = load_model()
    text = TEXT.read_bytes()
    ids = torch.tensor(loaded.tokenizer(text.decode()).input_ids)
    gate(len(ids) >= CONTEXT_LEN + NUM_STEPS, f"{TEXT} has {len(ids)} tokens only")
    ids = ids[: CONTEXT_LEN + NUM_STEPS]
    steps = slice(CONTEXT_LEN, CONTEXT_LEN + NUM_STEPS)
    model = loaded.model.model
    keys, own, predicted, context_q = [], [], [], []
    early: Tensor | None = None
    for capture, leaving in prefill(loaded.model, ids):
        print(f"layer {capture.layer_idx}", flush=True)
        if capture.layer_idx in LAYERS:
            assert early is not None
            keys.append(capture.kv[:, :CONTEXT_LEN, 0].clone())
            own.append(capture.q[:, steps].half())
            predicted.append(early.half())
            context_q.append(capture.q[:, :CONTEXT_LEN].half())
        if capture.layer_idx + 1 in LAYERS:
            following = model.layers[capture.layer_idx + 1]
            early = predict(model, following, capture.hidden_in, leaving, steps)
    stacked = torch.stack(keys)
    key_steps = stacked.abs().amax(2, keepdim=True) / 127
    recording = Recording(
        keys=(stacked / key_steps).round().to(torch.int8).numpy(),
        key_steps=key_steps.numpy(),
        own=torch.stack(own).numpy(),
        predicted=torch.stack(predicted).numpy(),
        layer_ids=np.array(LAYERS),
        text_sha256=hashlib.sha256(text).hexdigest(),
    )
    return recording, torch.stack(context_q)


def predict(model: Any, following: Any, hidden_in: Tensor, leaving: Tensor, steps: slice) -> Tensor:
    """The following layer's queries at some tokens, as a session looks ahead: [num_q_heads, num_tokens, head_dim]."""
    from index_build.predictor import fit_predictor, sample_rows

    rows = sample_rows(CONTEXT_LEN)
    samples = [queries_before_rope(following, hidden[:CONTEXT_LEN][rows]) for hidden in (hidden_in, leaving)]
    weights = torch.from_numpy(fit_predictor(*samples))
    positions = torch.arange(steps.start, steps.stop)[None]
    cos, sin = model.rotary_emb(hidden_in[None], position_ids=positions)
    early = queries_before_rope(following, hidden_in[steps])
    return rotate(early @ weights[:, :-1] + weights[:, -1:], cos[0], sin[0])


def build_indexes(recording: Recording, context_q: Tensor) -> dict[str, list[WideIndex]]:
    """Index the wide layers' keys over the recorded context; context_q as `record_model` returns it."""
    from index_build.kmeans import set_kmeans_threads
    from index_build.layer import build_layer_index

    set_kmeans_threads(1)
    indexes: dict[str, list[WideIndex]] = {}
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for name, (config, num_layers) in INDEXES.items():
            indexes[name] = []
            for wide_idx in range(num_layers):
                print(f"index {name!r}, wide layer {wide_idx}", flush=True)
                keys = wide_keys(recording, wide_idx)
                q = wide_heads(context_q, recording.keys.shape[1], wide_idx)
                kv = keys[:, :, None].expand(-1, -1, 2, -1)
                shortest = replace(config, list_len=1 / kv.shape[1])  # lists are made for the length that is asked for
                index = build_layer_index(q, kv, shortest, threads, None)
                indexes[name].append(
                    WideIndex(config, index.query_basis, index.key_basis, index.key_mean, index.codebooks)
                )
    return indexes


ARRAYS = ("query_basis", "key_basis", "key_mean", "codebooks")


def save(recorded: Recorded, path: Path) -> None:
    recording = recorded.recording
    arrays: dict[str, Any] = {name: getattr(recording, name) for name in Recording.__slots__}
    for name, layers in recorded.indexes.items():
        for array in ARRAYS:
            arrays[f"{name}/{array}"] = np.stack([getattr(layer, array) for layer in layers])
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".part.npz")
    np.savez_compressed(scratch, **arrays)
    scratch.rename(path)


def load(path: Path) -> Recorded:
    """Read what `save` wrote."""
    gate(path.exists(), f"there is no recording at {path}; make one with `python -m bench.decode record`")
    with np.load(path) as file:
        fields = {name: file[name] for name in Recording.__slots__}
        fields["text_sha256"] = str(fields["text_sha256"])
        indexes = {}
        for name, (config, num_layers) in INDEXES.items():
            if f"{name}/codebooks" in file:
                arrays = [file[f"{name}/{array}"] for array in ARRAYS]
                recorded_shape = arrays[ARRAYS.index("codebooks")].shape[2:4]
                wanted_shape = config.num_subspaces, config.num_centroids
                gate(
                    recorded_shape == wanted_shape,
                    f"{path} has an index {name!r} of {recorded_shape}, wanted is {wanted_shape}; record anew",
                )
                indexes[name] = [WideIndex(config, *(a[i] for a in arrays)) for i in range(num_layers)]
    for half, whole in HALVES.items():
        if whole in indexes:
            indexes[half] = [halved(layer) for layer in indexes[whole]]
    return Recorded(Recording(**fields), indexes)


def halved(index: WideIndex) -> WideIndex:
    """The same with every second centroid. On the recorded steps 5 % of the rows then miss 5.8 % of the softmax weight
    instead of 5.7 % (`pooled`), and 5.1 % instead of 5.0 % (`default`)."""
    config = replace(index.config, num_centroids=index.config.num_centroids // 2)
    return replace(index, config=config, codebooks=np.ascontiguousarray(index.codebooks[:, :, ::2]))
