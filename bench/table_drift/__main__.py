"""How an index serves a generation that outgrows its context: what it still finds, what it costs, whether to rebuild.

    python -m bench.table_drift [--json FILE]                  both parts
    python -m bench.table_drift --only quality|mechanism

**Quality** (`quality.py`): the demo model's own queries and keys, a context of 2048 tokens and up to 5632 more.
**Mechanism** (`mechanism.py`): 30 000 rows after that context. Gates: codes and searches are right to the bit.
A file's other figures stay in it.
"""

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from bench.table_drift.makings import Layer
from bench.table_drift.mechanism import measure_mechanism
from bench.table_drift.quality import KEEP, WINDOW_LEN, layers_of, measure_point
from bench.table_drift.recording import LAYERS, long_text
from bench.timing import finish, machine
from csattn.config import preset

CONTEXT_LEN = 2048
TAIL_LENS = [0, 512, 1024, 2048, 4096, 5632]
LONG_TAIL_LENS = [0, 1000, 4000, 10_000, 20_000, 30_000]
LAYOUTS = ("default", "lists")
DRIFT = ("clipped_codes", "cosine_to_centroid", "cosine_turned_back")


def quality(layers: list[Layer], name: str) -> list[dict[str, Any]]:
    """Means over the recorded layers, for every length of the tail."""
    config = preset(name, layers[0].k.shape[2])
    points = []
    with ThreadPoolExecutor(2) as threads:
        for tail_len in TAIL_LENS:
            point = _mean([measure_point(layer, CONTEXT_LEN, tail_len, config, threads) for layer in layers])
            points.append(point)
            print(f"{name}, tail {tail_len}:", *(f"{key} {point[key]:.4f}" for key in DRIFT))
            for form in ("makings", "shared_out"):
                for making, figures in point[form].items():
                    print(
                        f"  {form:10} {making:13}",
                        *(f"{key} {value:.4f}" for key, value in figures.items()),
                        flush=True,
                    )
    return points


def mechanism(layer: Layer, name: str) -> list[dict[str, Any]]:
    config = preset(name, layer.k.shape[2])
    with ThreadPoolExecutor(2) as threads:
        index = layer.index_of(slice(0, CONTEXT_LEN), config, threads)
    return measure_mechanism(layer, index, LONG_TAIL_LENS)


def _mean(values: list[Any]) -> Any:
    """The mean of nested figures of the same form."""
    if isinstance(values[0], dict):
        return {key: _mean([value[key] for value in values if key in value]) for key in values[0]}
    return round(float(np.mean(values)), 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("quality", "mechanism"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    layers = layers_of(long_text())
    setting = {"context_len": CONTEXT_LEN, "layers": LAYERS, "keep": KEEP, "window_len": WINDOW_LEN}
    result: dict[str, Any] = {"bench": "table_drift", "machine": machine(), **setting}
    if arguments.only != "mechanism":
        result["quality"] = {name: quality(layers, name) for name in LAYOUTS}
    if arguments.only != "quality":
        result["mechanism"] = {name: mechanism(layers[1], name) for name in LAYOUTS}
    earlier = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}
    finish({**earlier, **result}, arguments.json)


if __name__ == "__main__":
    main()
