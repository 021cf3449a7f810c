"""What an index costs to build: time of the index work beside its prefill, and peak memory against its bound.

    python -m bench.build [--context-len 8191] [--preset default] [--json FILE]

Gate: the finished artifact verifies. Bound of memory: model + one layer's q, k, v + one layer's tables + 1 GiB.
"""

import argparse
import resource
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bench.timing import finish, gate, machine
from csattn.artifact import open_artifact, verify_artifact
from csattn.config import preset
from csattn.models import load_model
from index_build.pipeline import build_artifact

TEXT = Path(__file__).parent / "texts" / "novel.txt"
GIB = 2**30


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run(context_len: int, preset_name: str, model: str | None) -> dict[str, Any]:
    loaded = load_model(model)
    geometry = loaded.geometry
    ids = np.resize(np.asarray(loaded.tokenizer(TEXT.read_text()).input_ids, dtype=np.int32), context_len)
    model_bytes = sum(p.numel() * p.element_size() for p in loaded.model.parameters())
    before = peak_bytes()
    with tempfile.TemporaryDirectory() as store:
        report = build_artifact(loaded, ids, preset(preset_name, geometry.head_dim), Path(store))
        peak = peak_bytes()
        verify_artifact(report.path)
        gate(not report.reused, "the artifact was there already")
        with open_artifact(report.path) as artifact:
            tables = artifact.index_bytes / geometry.num_layers
            size = artifact.size_bytes
    heads = geometry.num_q_heads + 2 * geometry.num_kv_heads
    qkv = heads * context_len * geometry.head_dim * 4
    seconds = report.seconds
    return {
        "bench": "build",
        "preset": preset_name,
        "context_len": context_len,
        "seconds": {phase: round(value, 2) for phase, value in seconds.items()},
        "index_over_prefill": round(seconds["index"] / seconds["prefill"], 3),
        "artifact_bytes": size,
        "peak_bytes": peak,
        "peak_before_build_bytes": before,
        "bound_bytes": round(model_bytes + qkv + tables + GIB),
        "machine": machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context-len", type=int, default=8191)
    parser.add_argument("--preset", default="default")
    parser.add_argument("--model")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = run(arguments.context_len, arguments.preset, arguments.model)
    print(f"prefill {result['seconds']['prefill']} s, index {result['seconds']['index']} s "
          f"({result['index_over_prefill']:.0%}), write {result['seconds']['write']} s")  # fmt: skip
    print(f"peak memory {result['peak_bytes'] / GIB:.2f} GiB of {result['bound_bytes'] / GIB:.2f} GiB allowed")
    finish(result, arguments.json)


if __name__ == "__main__":
    main()
