"""Gate: `bench.accuracy long` gives the same KLs as csattn's own artifact and session."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bench.accuracy.attending.attend import Codes, attend
from bench.accuracy.attending.context import RealContext, read_context
from bench.accuracy.long_contenders import LongContender, contenders
from bench.timing import gate
from csattn.artifact import open_artifact
from csattn.config import SearchConfig, preset
from csattn.models import LoadedModel
from index_build.pipeline import build_artifact
from workers.evaluate import full_attention, measure

_TOLERANCE = 0.02  # relative, of a KL
OF_THE_SKETCH = "default", "default+ahead", "default+rest=moments", "default+rest=none"
SELECTORS = "exact", "window", "quest", "sparq", "pqcache", "h2o", "magicpig"  # contenders named as csattn's selectors


def require_product(
    loaded: LoadedModel,  # on the CPU, where csattn's own path runs
    context: NDArray[np.int32],  # [context_len] token ids
    following: NDArray[np.int32],  # [num_tokens + 1]
) -> dict[str, tuple[float, float]]:
    """Return each contender's KL measured here, and by csattn's own path. Raises GateError where they differ."""
    read = read_context(loaded, context, following)
    named = {c.name: c for c in contenders()}
    compared: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as store:
        report = build_artifact(loaded, context, preset("default"), Path(store))
        with open_artifact(report.path) as artifact:
            baseline = full_attention(loaded, artifact, following)
            for name in (*OF_THE_SKETCH, *SELECTORS):
                search = _search(named[name])
                selector = name if name in SELECTORS else "csattn"
                product = measure(loaded, artifact, search, selector, following, baseline).kl
                compared[name] = kl_of(read, named[name], search.keep), product
    for name, (ours, product) in compared.items():
        gate(
            abs(ours - product) <= _TOLERANCE * product, f"the KL of {name} is {ours:.6f}, the product's {product:.6f}"
        )
    return compared


def kl_of(context: RealContext, contender: LongContender, keep: float) -> float:
    codes: list[Codes | None] = [contender.codes(layer) for layer in context.layers]
    reading = contender.reading(keep, context.context_len)
    log_probs = context.predict(
        lambda layer_idx, step: attend(context.layers[layer_idx], step, codes[layer_idx], reading), contender.ahead
    )
    with torch.inference_mode():
        return float(context.kl(log_probs).mean())


def _search(contender: LongContender) -> SearchConfig:
    rests = {"none": "none", "codes": "sketch", "moments": "moments"}
    rest = None if contender.group == "others" else rests[contender.rest]  # other methods: None, as published
    return SearchConfig(lookahead=int(contender.ahead), rest=rest)  # type: ignore[arg-type]  # one of its kinds
