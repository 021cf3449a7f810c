"""How long does it take to draw tokens of a step's logits?

    python -m bench.draws [--vocab-size 128256] [--rows 8] [--json FILE]

Logits are normal, of standard deviation 3. Told for each way to sample: milliseconds a row, one after another by one
thread, and for all rows in shares side by side, as a service draws them. Gate: the token is that of the definition.
"""

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np

from bench.timing import finish, gate, machine, measure
from csattn.cpus import available_cpus
from workers.serving.draw_reference import draw_reference
from workers.serving.messages import Sampling
from workers.serving.sampling import draw
from workers.serving.scheduler import MOST_DRAWERS, in_shares

WAYS: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.7, top_p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "temperature 0.7, top_p 0.95, top_k 20": {"temperature": 0.7, "top_p": 0.95, "top_k": 20},
    "temperature 1, min_p 0.05": {"temperature": 1.0, "min_p": 0.05},
}


def time_way(logits: np.ndarray, sampling: Sampling) -> dict[str, float]:
    """logits: [num_rows, vocab_size] float32."""
    for position, row in enumerate(logits[:2]):
        at = np.random.Generator(np.random.Philox(key=0, counter=position)).random()
        gate(draw(row, sampling, 0, position) in draw_reference(row, sampling, at), f"{sampling} draws wrongly")
    alone = measure(lambda: [draw(row, sampling, 0, 0) for row in logits])
    num_beside = min(MOST_DRAWERS, available_cpus() - 1)
    first, *others = in_shares(list(logits), len(logits), num_beside)

    def draw_share(rows: Sequence[np.ndarray]) -> list[int]:
        return [draw(row, sampling, 0, 0) for row in rows]

    with ThreadPoolExecutor(max(1, num_beside)) as threads:

        def draw_all() -> None:
            drawn = [threads.submit(draw_share, rows) for rows in others]
            draw_share(first)
            wait(drawn)

        beside = measure(draw_all)
    return {"ms_a_row": round(alone["p50_ms"] / len(logits), 3), "ms_all_rows_side_by_side": beside["p50_ms"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-size", type=int, default=128256)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    logits = (3 * rng.standard_normal((options.rows, options.vocab_size))).astype(np.float32)
    ways = {name: time_way(logits, Sampling(max_new_tokens=1, **way)) for name, way in WAYS.items()}
    for name, times in ways.items():
        print(f"{name:40} {times['ms_a_row']:.2f} ms a row, {times['ms_all_rows_side_by_side']:.2f} ms for all rows")
    finish(
        {"bench": "draws", "vocab_size": options.vocab_size, "rows": options.rows, **ways, "machine": machine()},
        options.json,
    )


if __name__ == "__main__":
    main()
