"""What the parts of an index cost per layer, on made-up queries and keys of a published model's shape.

The half of `bench.build` that needs no model. Layers are indexed as a build does it, their arrays copied to host
memory beside the next layer's work; nothing is prefilled or written. A part's time is wall clock with the device
waited for; `index_s` is all layers as a build runs them.
Gate: k-means fits as well as FAISS (1 %), and rows are those of the CPU to the bit.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

import index_build.layer as layer_module
from bench.timing import gate, machine
from csattn.config import IndexConfig
from csattn.cpus import available_cpus
from index_build import reference
from index_build.kmeans import set_kmeans_threads, spherical_kmeans
from index_build.layer import index_arrays
from index_build.outbox import make_outbox
from index_build.predictor import MAX_SAMPLES, fit_predictor
from index_build.tables import make_row_table
from workers.model_runner.shapes import ModelShape, shape_named

PARTS = {"basis": "make_bases", "kmeans": "make_codebooks", "tables": "make_row_table"}
NUM_GATED_PARTS = 4


def make_config(head_dim: int, kmeans: str) -> IndexConfig:
    return IndexConfig(
        layout="rows",
        num_subspaces=max(1, head_dim // 8),
        num_centroids=64,
        basis="key_whitened",
        center_keys=True,
        weigh_by_norm=True,
        share_group=True,
        kmeans=kmeans,  # type: ignore[arg-type]
    )


def make_heads(num_heads: int, context_len: int, head_dim: int, generator: torch.Generator) -> Tensor:
    """Rows as attention has them [num_heads, context_len, head_dim] bfloat16: topics, a few strong axes, noise."""
    options: dict[str, Any] = {"generator": generator, "device": generator.device}
    topics = torch.randn(num_heads, 64, head_dim, **options)
    shares = torch.rand(64, **options).pow(4)
    topic_ids = torch.multinomial(shares, context_len, replacement=True, generator=generator)
    strong = torch.randn(num_heads, 16, head_dim, **options)
    rows = topics[:, topic_ids] + torch.randn(num_heads, context_len, 16, **options) @ strong * 0.3
    return (rows + 0.5 * torch.randn(rows.shape, **options)).bfloat16()


def make_layer(shape: ModelShape, context_len: int, layer_idx: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """q [num_q_heads, context_len, head_dim] and kv [num_kv_heads, context_len, 2, head_dim]."""
    generator = torch.Generator(device).manual_seed(layer_idx)
    q = make_heads(shape.num_q_heads, context_len, shape.head_dim, generator)
    k = make_heads(shape.num_kv_heads, context_len, shape.head_dim, generator)
    return q, torch.stack([k, k], dim=2)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def wait_for_stream(device: torch.device) -> None:
    """For what has been computed, not for what is being copied."""
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()


@contextmanager
def timed_parts(device: torch.device, seconds: dict[str, float]) -> Iterator[None]:
    """While this lasts, the steps of `index_arrays` add up what each of them takes."""
    originals = {name: getattr(layer_module, function) for name, function in PARTS.items()}

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
            setattr(layer_module, function, timed(name))
        yield
    finally:
        for name, function in PARTS.items():
            setattr(layer_module, function, originals[name])


def check(q: Tensor, kv: Tensor, arrays: Mapping[str, Tensor], config: IndexConfig) -> dict[str, float]:
    """The gate, on some parts of the first head."""
    keys = ((kv[0, :, 0].float() - arrays["key_mean"][0]) @ arrays["key_basis"][0]).T.contiguous()
    width = keys.shape[0] // config.num_subspaces
    with ThreadPoolExecutor(1) as threads:
        codes, scales = make_row_table(arrays["codebooks"][:1], keys[None], config.score_bits, threads)
        codebooks, keys = arrays["codebooks"][:1].cpu(), keys.cpu()
        want_codes, want_scales = make_row_table(codebooks, keys[None], config.score_bits, threads)
    gate(torch.equal(codes.cpu(), want_codes) and torch.equal(scales.cpu(), want_scales), "rows differ from the CPU's")
    some = reference.centroid_scores(codebooks[0, 0, :2], keys[:width, :1000])
    gate(bool(((some / want_scales[0, 0, :2, None]).abs() < 100).all()), "a scale is far too small")
    queries = q.reshape(kv.shape[0], -1, q.shape[2])[0].float() @ arrays["query_basis"][0]
    ratios = []
    for part in range(NUM_GATED_PARTS):
        points = queries[:, part * width : (part + 1) * width]
        directions = torch.nn.functional.normalize(points, dim=1)
        faiss = spherical_kmeans(points.cpu().numpy(), config.num_centroids, config.num_iterations, config.seed)
        ours, theirs = (
            float((1 - (directions @ centroids.T).amax(1)).double().mean())
            for centroids in (arrays["codebooks"][0, part], torch.from_numpy(faiss).to(points.device))
        )
        ratios.append(ours / theirs)
    gate(max(ratios) <= 1.01, f"k-means fits worse than FAISS: {ratios}")
    return {"mean": round(sum(ratios) / len(ratios), 4), "max": round(max(ratios), 4)}


def time_parts(
    q: Tensor, kv: Tensor, samples: tuple[Tensor, Tensor], config: IndexConfig, threads: Executor
) -> dict[str, float]:
    """Seconds of each part of one layer, one after the other. Arguments as of `index_arrays` and `fit_predictor`."""
    seconds: dict[str, float] = {}
    with timed_parts(q.device, seconds):
        arrays = index_arrays(q, kv, config, threads)
    fit_predictor(*samples)
    started = time.perf_counter()
    fit_predictor(*samples)
    seconds["predictor"] = time.perf_counter() - started
    with make_outbox(q.device) as outbox:
        for _ in range(3):  # the first two lock host memory
            started = time.perf_counter()
            outbox.take_kv(kv)
            outbox.send(arrays, lambda arrays: None)
            wait(q.device)
            seconds["copy"] = time.perf_counter() - started
    return seconds


def run(shape_name: str, context_len: int, num_layers: int | None, device: torch.device, kmeans: str) -> dict[str, Any]:
    """Check, then measure the parts of one layer, then all layers in a row."""
    shape = shape_named(shape_name)
    config = make_config(shape.head_dim, kmeans)
    early = torch.randn(shape.num_q_heads, MAX_SAMPLES, shape.head_dim, device=device)
    samples = early, early + 0.1 * torch.randn_like(early)
    set_kmeans_threads(1)
    layer_s = []
    with ThreadPoolExecutor(available_cpus()) as threads:
        q, kv = make_layer(shape, context_len, 0, device)
        fit = check(q, kv, index_arrays(q, kv, config, threads), config)
        print(f"gate passed: {fit}", flush=True)
        part_s = time_parts(q, kv, samples, config, threads)
        print(f"seconds per layer: {part_s}", flush=True)
        with make_outbox(device) as outbox:
            for layer_idx in range(num_layers or shape.num_layers):
                q, kv = make_layer(shape, context_len, layer_idx, device)
                wait(device)
                started = time.perf_counter()
                outbox.take_kv(kv)
                fit_predictor(*samples)
                outbox.send(index_arrays(q, kv, config, threads), lambda arrays: None)
                wait_for_stream(device)  # the last copies go on beside what follows, as beside a prefill
                layer_s.append(time.perf_counter() - started)
    return {
        "bench": "build_parts",
        "shape": shape_name,
        "context_len": context_len,
        "num_layers": len(layer_s),
        "kmeans": config.kmeans,
        "num_subspaces": config.num_subspaces,
        "num_centroids": config.num_centroids,
        "kmeans_loss_over_faiss": fit,
        "part_s": {name: round(value, 4) for name, value in part_s.items()},
        "first_layers_s": [round(took, 3) for took in layer_s[:3]],  # two of them lock host memory
        "later_layer_s": round(float(np.median(layer_s[2:])), 4) if len(layer_s) > 2 else None,
        "index_s": round(sum(layer_s), 3),
        "device_peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "machine": machine(),
    }
