"""How long does it take to draw tokens from a step's logits?

    python -m bench.draws [--vocab-size 128256] [--rows 8] [--device cuda] [--json FILE]

Logits are normal with standard deviation 3. Reported for each way to sample: milliseconds a row, drawn one after
another by one thread, and for all rows, divided among threads as in a service on a CPU. With --device cuda: for all
rows as a GPU's engine draws them, from the host's call to tokens on the host. Gate: the token is that of the
definition.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch

from bench.timing import finish, gate, measure, options_parser
from csattn.cpus import available_cpus
from workers.engine.gpu.draws import DrawsOnDevice
from workers.model.runner import StepOutput
from workers.serving.draw_reference import draw_reference
from workers.serving.messages import Sampling
from workers.serving.sampling import adjust_logits, draw, draw_spec
from workers.serving.scheduler import MAX_SAMPLERS, in_shares
from workers.serving.step_engine import DrawSpec, StepRow

MASKED = "temperature 1, a random half allowed"
WAYS: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    MASKED: {"temperature": 1.0},
    "temperature 0.7, top_p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "temperature 0.7, top_p 0.95, top_k 20": {"temperature": 0.7, "top_p": 0.95, "top_k": 20},
    "temperature 1, min_p 0.05": {"temperature": 1.0, "min_p": 0.05},
}


def specs_of(sampling: Sampling, num_rows: int, mask: np.ndarray | None) -> list[DrawSpec]:
    allowed = None if mask is None else lambda vocab_size: lambda: mask
    return [draw_spec(sampling, 0, position, allowed=allowed) for position in range(num_rows)]


def gate_draw(token_id: int, row: np.ndarray, sampling: Sampling, how: DrawSpec, mask: np.ndarray | None) -> None:
    logits = row if mask is None else np.where(mask, row, np.float32(-np.inf))
    gate(token_id in draw_reference(logits, sampling, how.at), f"{sampling} draws wrongly")


def time_on_host(logits: np.ndarray, sampling: Sampling, mask: np.ndarray | None) -> dict[str, float]:
    """Time draws by one thread and by several. logits: [num_rows, vocab_size] float32; mask: the tokens allowed."""
    hows = specs_of(sampling, len(logits), mask)

    def draw_row(row: np.ndarray, how: DrawSpec) -> int:
        return draw(adjust_logits(row, how), how)

    for row, how in list(zip(logits, hows, strict=True))[:2]:
        gate_draw(draw_row(row, how), row, sampling, how, mask)
    how = hows[1]
    one_by_one = measure(lambda: [draw_row(row, how) for row in logits])
    num_threads = min(MAX_SAMPLERS, available_cpus() - 1)
    first, *others = in_shares(list(logits), len(logits), num_threads)

    def draw_share(rows: Sequence[np.ndarray]) -> list[int]:
        return [draw_row(row, how) for row in rows]

    with ThreadPoolExecutor(max(1, num_threads)) as threads:

        def draw_all() -> None:
            drawn = [threads.submit(draw_share, rows) for rows in others]
            draw_share(first)
            wait(drawn)

        in_parallel = measure(draw_all)
    return {"ms_a_row": round(one_by_one["p50_ms"] / len(logits), 3), "ms_all_rows_side_by_side": in_parallel["p50_ms"]}


def time_on_device(logits: np.ndarray, sampling: Sampling, mask: np.ndarray | None) -> dict[str, float]:
    """Time draws on the device, including launches and the tokens' copy to the host.

    logits: [num_rows, vocab_size] float32; mask: the tokens allowed.
    """
    on_device = DrawsOnDevice(torch.device("cuda"), len(logits))
    output = StepOutput(torch.from_numpy(logits).cuda(), torch.empty(len(logits), dtype=torch.int64, device="cuda"))
    hows = specs_of(sampling, len(logits), mask)

    def draw_all() -> list[int]:
        output.next_ids.zero_()
        on_device.enqueue([StepRow(0, 0, draw=how) for how in hows], output)
        drawn: list[int] = output.next_ids.tolist()
        return drawn

    for row, how, token_id in list(zip(logits, hows, draw_all(), strict=True))[:2]:
        gate_draw(token_id, row, sampling, how, mask)
    return {"ms_all_rows": measure(draw_all)["p50_ms"]}


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--vocab-size", type=int, default=128256)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    logits = (3 * rng.standard_normal((options.rows, options.vocab_size))).astype(np.float32)
    time_way = time_on_device if options.device == "cuda" else time_on_host
    mask = rng.random(options.vocab_size) < 0.5
    ways = {
        name: time_way(logits, Sampling(max_new_tokens=1, **way), mask if name == MASKED else None)
        for name, way in WAYS.items()
    }
    for name, times in ways.items():
        print(f"{name:40} {', '.join(f'{what} {time:.3f}' for what, time in times.items())}")
    asked = {"vocab_size": options.vocab_size, "rows": options.rows, "device": options.device}
    finish({"bench": "draws", **asked, **ways}, options.json)


if __name__ == "__main__":
    main()
