"""What the parts of a sketch cost per layer, on made-up queries and keys of a published model's shape.

The half of `bench.build` that needs no model. Layers are indexed as in a build, and their arrays are copied to host
memory during the next layer's work; nothing is prefilled or written. A part's time is wall-clock time with the device
synchronised; on a CPU it is the sum over the heads, which run in parallel. `index_s` is the time of all layers, run as
in a build. Gate: the sketch loses less than a tenth of the variance of the keys' logits.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.shapes import shape_named
from bench.timing import gate, machine
from csattn.artifact.layout import index_from_arrays
from csattn.config import SketchConfig
from csattn.cpus import available_cpus
from csattn.models.spec import ModelSpec
from csattn.sketch import SketchIndex, reference
from csattn.sketch import build as sketch
from index_build.layer import index_arrays
from index_build.outbox import make_outbox
from index_build.predictor import fit_predictor, sample_rows

PARTS = {
    "queries": "fit_queries",
    "keys": "fit_keys",
    "codes": "encode",
    "values": "fit_values",
    "words": "pack",
    "marks": "mark",
}


def make_heads(num_heads: int, context_len: int, head_dim: int, generator: torch.Generator) -> Tensor:
    """Make rows like real ones [num_heads, context_len, head_dim] bfloat16: topics, a few strong axes and noise."""
    options: dict[str, Any] = {"generator": generator, "device": generator.device}
    topics = torch.randn(num_heads, 64, head_dim, **options)
    shares = torch.rand(64, **options).pow(4)
    topic_ids = torch.multinomial(shares, context_len, replacement=True, generator=generator)
    strong = torch.randn(num_heads, 16, head_dim, **options)
    rows = topics[:, topic_ids] + torch.randn(num_heads, context_len, 16, **options) @ strong * 0.3
    return (rows + 0.5 * torch.randn(rows.shape, **options)).bfloat16()


def make_layer(shape: ModelSpec, context_len: int, layer_idx: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Make q [num_q_heads, context_len, head_dim] and kv [num_kv_heads, context_len, 2, head_dim]."""
    generator = torch.Generator(device).manual_seed(layer_idx)
    q = make_heads(shape.num_q_heads, context_len, shape.head_dim, generator)
    k = make_heads(shape.num_kv_heads, context_len, shape.head_dim, generator)
    return q, torch.stack([k, k], dim=2)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def wait_for_stream(device: torch.device) -> None:
    """Wait for computations, but not for copies in progress."""
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()


@contextmanager
def timed_parts(device: torch.device, seconds: dict[str, float]) -> Iterator[None]:
    """In this context, the steps of `sketch_arrays` add their times to `seconds`."""
    originals = {name: getattr(sketch, function) for name, function in PARTS.items()}

    def timed(name: str) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            wait(device)
            started = time.perf_counter()
            result = originals[name](*arguments)
            wait(device)
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started
            return result

        return run

    try:
        for name, function in PARTS.items():
            setattr(sketch, function, timed(name))
        yield
    finally:
        for name, function in PARTS.items():
            setattr(sketch, function, originals[name])


def check(q: Tensor, kv: Tensor, arrays: Mapping[str, Tensor], config: SketchConfig) -> float:
    """Return the share of the last queries' logit variance that the sketch loses, averaged over KV heads.

    Raises GateError if it is a tenth or more in any head.
    """
    index = index_from_arrays(config, kv.shape[1], {name: array.cpu().numpy() for name, array in arrays.items()})
    assert isinstance(index, SketchIndex)
    lost = []
    for row in range(0, len(q), len(q) // len(kv)):
        head, query = row * len(kv) // len(q), q[row, -1].float().cpu().numpy()
        exact = kv[head, :, 0].float().cpu().numpy() @ query
        bases, exponent, scores = reference.score_group(query[None], index, head, 1.0 / reference.LOG2_E)
        lost.append(np.square(bases[0] + 2.0**exponent * scores[0] - exact).mean() / exact.var())
    gate(max(lost) < 0.1, f"the sketch loses too much of the logits' variance: {lost}")
    return float(np.mean(lost))


def time_parts(
    q: Tensor, kv: Tensor, samples: tuple[Tensor, Tensor], config: SketchConfig, threads: Executor
) -> dict[str, float]:
    """Return the seconds of each part of one layer, run one after another.

    Arguments are those of `index_arrays` and (samples) `fit_predictor`.
    """
    seconds: dict[str, float] = {}
    with timed_parts(q.device, seconds):
        arrays = index_arrays(q, kv, config, threads)
    fit_predictor(*samples)
    wait(q.device)
    started = time.perf_counter()
    fit_predictor(*samples)
    wait(q.device)
    seconds["predictor"] = time.perf_counter() - started
    with make_outbox(q.device, kv.nbytes) as outbox:
        for _ in range(3):  # the first two page-lock host memory
            started = time.perf_counter()
            outbox.send(kv, lambda: arrays, lambda arrays: None)
            outbox.settle()  # returns when the arrays are made
            wait(q.device)
            seconds["copy"] = time.perf_counter() - started
    return seconds


def run(shape_name: str, contexts: list[int], num_layers: int | None, device: torch.device) -> dict[str, Any]:
    """For each context length: check, then measure the parts of one layer, then all layers in sequence."""
    return {
        "bench": "build_parts",
        "shape": shape_name,
        "index_config": SketchConfig().to_json(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "machine": machine(),
        "cases": [run_case(shape_name, context_len, num_layers, device) for context_len in contexts],
    }


def run_case(shape_name: str, context_len: int, num_layers: int | None, device: torch.device) -> dict[str, Any]:
    shape = shape_named(shape_name)
    config = SketchConfig()
    num_samples = len(range(context_len)[sample_rows(context_len, shape.head_dim)])
    early = torch.randn(shape.num_q_heads, num_samples, shape.head_dim, device=device)
    samples = early, early + 0.1 * torch.randn_like(early)
    layer_s = []
    with ThreadPoolExecutor(available_cpus()) as threads:
        q, kv = make_layer(shape, context_len, 0, device)
        error = check(q, kv, index_arrays(q, kv, config, threads), config)
        print(f"gate passed: {error:.3f} of the logits' variance is lost", flush=True)
        part_s = time_parts(q, kv, samples, config, threads)
        print(f"seconds per layer: {part_s}", flush=True)
        with make_outbox(device, kv.nbytes) as outbox:
            for layer_idx in range(num_layers or shape.num_layers):
                q, kv = make_layer(shape, context_len, layer_idx, device)
                wait(device)
                started = time.perf_counter()
                fit_predictor(*samples)
                outbox.send(kv, partial(index_arrays, q, kv, config, threads), lambda arrays: None)
                outbox.settle()
                wait_for_stream(device)  # copies overlap with the next layer's work, as in a build
                layer_s.append(time.perf_counter() - started)
    return {
        "context_len": context_len,
        "num_layers": len(layer_s),
        "lost_variance": round(error, 4),
        "part_s": {name: round(value, 4) for name, value in part_s.items()},
        "first_layers_s": [round(took, 3) for took in layer_s[:4]],  # these page-lock host memory
        "later_layer_s": round(float(np.median(layer_s[4:])), 4) if len(layer_s) > 4 else None,
        "index_s": round(sum(layer_s), 3),
        "device_peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
    }
