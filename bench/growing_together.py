"""How long do steps take while requests that began together all get segments for their own rows?

    python -m bench.growing_together [--requests 4] [--json FILE]
    python -m bench.growing_together --shape llama-3.1-8b --context-len 16K --placement device

Each request begins with nearly enough own rows for a segment, copies of the context's first rows. Then all of them
decode, one token each per step, until the segments are in use. Reported: a step's time before the segments are begun,
while they are made, and once they are read. Gate: every row has a next token.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from bench.accuracy.long import token_count
from bench.build import byte_ids, random_model, text_ids
from bench.timing import finish, gate, machine, options_parser
from csattn.artifact import open_artifact
from csattn.config import SearchConfig, preset
from csattn.models import load_model
from csattn.sketch.own import Growth
from index_build.pipeline import build_artifact
from workers.engine.cpu.engine import GROWTH
from workers.engine.gpu.memory import PLACEMENTS
from workers.engine.opening import open_engine
from workers.serving.step_engine import StepRow

STEPS_AROUND = 64  # steps before the segments are begun, and also steps after they are first read
SETTLING = 8  # first steps, which are not counted


def main() -> None:
    arguments = _arguments()
    on_gpu, config = arguments.placement != "cpu", SearchConfig(keep=arguments.keep)
    if arguments.shape:
        loaded = random_model(arguments.shape, arguments.layers, "cuda" if on_gpu else "cpu")
        ids = byte_ids(arguments.context_len)
    else:
        loaded = load_model(arguments.model, "float32", device="cuda" if on_gpu else "cpu")
        ids = text_ids(loaded, arguments.context_len)
    growth = Growth() if on_gpu else GROWTH
    near = growth.num_near(config.window_len)
    gate(arguments.context_len >= growth.segment_len, "the context has too few tokens")
    options = {"batch_sizes": (1, arguments.requests)} if on_gpu else {"max_rows": arguments.requests}
    times_ms = []
    with tempfile.TemporaryDirectory() as store:
        path = build_artifact(loaded, ids, preset("default"), Path(store)).path
        with (
            open_artifact(path) as artifact,
            open_engine(
                loaded, artifact, config, max_requests=arguments.requests, placement=arguments.placement, growth=growth,
                tail_capacity=growth.segment_len + near + STEPS_AROUND, **options,
            ) as engine,
        ):  # fmt: skip
            rows = torch.stack([kv[:, : growth.segment_len - STEPS_AROUND] for kv in artifact.indexed_kv()])
            for request_slot in range(arguments.requests):
                engine.open(request_slot, 0, config, "csattn")
                engine.write_rows(request_slot, rows)
            for _ in range(STEPS_AROUND + near + STEPS_AROUND):
                started = time.perf_counter()
                result = engine.step(
                    [StepRow(request_slot, int(ids[request_slot])) for request_slot in range(arguments.requests)]
                )
                times_ms.append((time.perf_counter() - started) * 1e3)
                gate(bool((result.next_ids >= 0).all()), "a row has no next token")
    report = {"bench": "growing_together", "machine": machine(), "model": loaded.name, "placement": arguments.placement}
    report |= {"context_len": len(ids), "requests": arguments.requests, "segment_len": growth.segment_len}
    report |= {
        "before": _summary(times_ms[SETTLING : STEPS_AROUND - 1]),
        "made": _summary(times_ms[STEPS_AROUND - 1 : STEPS_AROUND + near]),  # including the first step that reads them
        "read": _summary(times_ms[STEPS_AROUND + near :]),
    }
    finish(report, arguments.json)


def _summary(times_ms: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(times_ms, [50, 99])
    return {"p50_ms": round(float(p50), 2), "p99_ms": round(float(p99), 2), "most_ms": round(max(times_ms), 2)}


def _arguments() -> argparse.Namespace:
    parser = options_parser(__doc__)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--context-len", type=token_count, default="2048")
    parser.add_argument("--keep", type=float, default=SearchConfig().keep)
    parser.add_argument("--shape", help="time a model of this shape, such as llama-3.1-8b, with random weights")
    parser.add_argument("--layers", type=int, help="layers of the shape to use [default: all]")
    parser.add_argument("--placement", default="cpu", choices=("cpu", *PLACEMENTS))
    parser.add_argument("--model")
    return parser.parse_args()


if __name__ == "__main__":
    main()
