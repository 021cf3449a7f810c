"""The model for benchmarks of a service: the demo's, a tiny one, or random weights of a published shape."""

from pathlib import Path

import torch

from bench.build import random_model
from tests.tiny import byte_tokenizer, make_model

MAX_POSITIONS = 16384  # of the tiny model


def saved_model(name: str, layers: int | None, place: Path) -> tuple[Path | None, str]:
    """Write the model `tiny` or of a shape to `place`; return its path (None for `demo`) and dtype.

    Its tokens are bytes, without an end token.
    """
    if name == "demo":
        return None, "bfloat16"
    path, dtype = place / name, "bfloat16"
    if name == "tiny":
        make_model("llama", max_position_embeddings=MAX_POSITIONS).save_pretrained(path)
        dtype = "float32"
    else:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        random_model(name, layers, device).model.save_pretrained(path)
        torch.cuda.empty_cache()  # the service needs the device next
    byte_tokenizer().save_pretrained(path)
    return path, dtype
