"""What does a decode step cost besides attention? `python -m bench.model_step [--shape ...] [--json FILE]`, on a GPU.

Random bf16 weights of a published shape. Each product of a layer is timed alone, as the decode loop runs it (norm,
SiLU and residual sum included) and as cuBLAS runs the bare product, on weights that are in no cache. Then the whole
step is timed as the runner captures it, around an attention that does nothing. Gate: products agree with torch,
and a step repeats to the bit.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bench.decode.gpu_timing import device_machine, num_input_sets, time_graph, time_replays
from bench.timing import finish, gate
from csattn.batch import StepRows
from workers.model_runner import ModelRunner, ModelShape, ModelWeights, random_weights, shape_named
from workers.model_runner.ops import Stream, num_squares
from workers.model_runner.torch_ops import TorchOps
from workers.model_runner.triton_ops import TritonOps

CONTEXT_POSITION = 100_000
MAX_ERROR = 1e-2  # of the norm; bf16
REPEATS = 20  # of a step, whose logits must be the same bits each time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench.model_step measures a GPU, and there is no CUDA device here; run it on one")
    shape = shape_named(options.shape)
    with torch.no_grad():
        products = [row for size in options.batch_sizes for row in time_products(shape, size)]
        steps = time_steps(random_weights(shape, "cuda"), options.batch_sizes)
    finish(
        {"bench": "model_step", "shape": options.shape, "products": products, "steps": steps, **device_machine()},
        options.json,
    )


class NoAttention:
    """Leaves `out` as it is: zero."""

    in_graph = True

    def __init__(self, shape: ModelShape, num_tails: int, lookahead: bool) -> None:
        self.lookahead = lookahead
        size = shape.num_layers, num_tails, shape.num_kv_heads, 1, 2, shape.head_dim
        self.tails = torch.zeros(size, dtype=torch.bfloat16, device="cuda")

    def begin_step(self, rows: StepRows) -> None:
        pass

    def look_ahead(self, layer_idx: int, q: Tensor, rows: StepRows) -> None:
        pass

    def attend(self, layer_idx: int, q: Tensor, rows: StepRows, out: Tensor) -> None:
        pass

    def end_step(self, rows: StepRows) -> None:
        pass


def time_steps(weights: ModelWeights, batch_sizes: list[int]) -> list[dict[str, Any]]:
    """The step around no attention, with and without the predicted queries."""
    shape, results = weights.shape, []
    maps = torch.randn(1, shape.num_layers, shape.num_q_heads, shape.head_dim + 1, shape.head_dim, device="cuda")
    for lookahead in (False, True):
        attention = NoAttention(shape, max(batch_sizes), lookahead)
        runner = ModelRunner(weights, attention, batch_sizes, next_query=maps / shape.head_dim if lookahead else None)
        for size in batch_sizes:
            runner.fill(size, [7] * size, [CONTEXT_POSITION] * size, [0] * size, list(range(size)), [1] * size)
            logits = runner.step(size).logits
            gate(bool(logits.isfinite().all()), "logits are not finite")
            first = logits.clone()
            gate(all(torch.equal(first, runner.step(size).logits) for _ in range(REPEATS)), "a step's logits change")
            timing = time_replays(partial(runner.step, size), 1)
            gbps = weights.streamed_bytes / timing.p50_us / 1e3
            print(
                f"step, batch {size}, lookahead {lookahead}: {timing.p50_us / 1e3:.3f} ms, {gbps:.0f} GB/s", flush=True
            )
            results.append({"batch_size": size, "lookahead": lookahead, "gbps": round(gbps), **timing.to_json()})
    return results


def time_products(shape: ModelShape, batch_size: int) -> list[dict[str, Any]]:
    sizes = {  # rows and columns of the weights
        "qkv": (shape.qkv_width, shape.hidden_size),
        "out": (shape.hidden_size, shape.q_width),
        "gate_up": (2 * shape.intermediate_size, shape.hidden_size),
        "down": (shape.hidden_size, shape.intermediate_size),
        "head": (shape.vocab_size, shape.hidden_size),
    }
    return [_time_product(shape, name, num_out, num_in, batch_size) for name, (num_out, num_in) in sizes.items()]


def _time_product(shape: ModelShape, name: str, num_out: int, num_in: int, batch_size: int) -> dict[str, Any]:
    num_bytes = 2 * num_out * num_in
    sets = [
        torch.empty(num_out, num_in, dtype=torch.bfloat16, device="cuda").normal_(std=num_in**-0.5)
        for _ in range(num_input_sets(num_bytes, 12))
    ]
    stream = _random_stream(shape, batch_size)
    x = torch.randn(batch_size, num_in, dtype=torch.bfloat16, device="cuda")
    ours, definition = TritonOps(torch.device("cuda")), TorchOps()
    error = _difference(
        _run(ours, name, sets[0], x, replace(stream, hidden=stream.hidden.clone()))(),
        _run(definition, name, sets[0], x, replace(stream, hidden=stream.hidden.clone()))(),
    )
    gate(error < MAX_ERROR, f"{name} differs from torch by {error:.1e} of its norm")
    timing = time_graph([_run(ours, name, weight, x, stream) for weight in sets])
    cublas = time_graph([partial(functional.linear, x, weight) for weight in sets])
    gbps, cublas_gbps = num_bytes / timing.p50_us / 1e3, num_bytes / cublas.p50_us / 1e3
    print(
        f"batch {batch_size} {name:8} {timing.p50_us:7.1f} us {gbps:5.0f} GB/s, "
        f"cuBLAS {cublas.p50_us:7.1f} us {cublas_gbps:5.0f} GB/s, error {error:.1e}",
        flush=True,
    )
    return {
        "batch_size": batch_size,
        "product": name,
        "bytes": num_bytes,
        "gbps": round(gbps),
        "cublas_p50_us": round(cublas.p50_us, 2),
        "cublas_gbps": round(cublas_gbps),
        **timing.to_json(),
    }


def _run(ops: TritonOps | TorchOps, name: str, weight: Tensor, x: Tensor, stream: Stream) -> Callable[[], Tensor]:
    """The product as the decode loop runs it; called, it gives what it wrote."""
    num_out = len(weight) // 2 if name == "gate_up" else len(weight)
    out = torch.empty(len(x), num_out, dtype=torch.float32 if name == "head" else torch.bfloat16, device="cuda")
    norm = torch.ones_like(stream.hidden[0])

    def call() -> Tensor:
        if name in ("out", "down"):
            ops.linear_add(x, weight, stream, norm, None)
            return stream.hidden
        if name == "gate_up":
            ops.normed_gate_up(stream.scaled, stream.squares, 1e-5, weight, out)
        else:
            ops.normed_linear(stream.scaled, stream.squares, 1e-5, weight, None, out)
        return out

    return call


def _random_stream(shape: ModelShape, batch_size: int) -> Stream:
    hidden = torch.randn(batch_size, shape.hidden_size, dtype=torch.bfloat16, device="cuda")
    squares = torch.empty(num_squares(shape.hidden_size), batch_size, device="cuda")
    stream = Stream(hidden, hidden.clone(), hidden.clone(), squares)
    nothing = torch.zeros(shape.hidden_size, 16, dtype=torch.bfloat16, device="cuda")
    TorchOps().linear_add(hidden[:, :16], nothing, stream, torch.ones_like(hidden[0]), None)
    return stream


def _difference(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


if __name__ == "__main__":
    main()
