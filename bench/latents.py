"""Times decode steps of models that attend to latents or compressed rows, at their real widths.

    python -m bench.latents [--kinds chosen,all,compressed] [--layers 8] [--experts 16] [--contexts 131072]
                            [--batches 1,8] [--json FILE]

The kinds, all with fewer layers and experts and with random weights, each request over its own made-up context:
`chosen` has DeepSeek-V3.2's shape, whose indexer chooses rows, with latents on the device or in host memory; `all` has
no indexer and attends to all latents (DeepSeek-V3); `compressed` has DeepSeek-V4-Flash's shape, whose rows stand for
several tokens each. Random weights choose other rows for each token; a real model's choices change less. So steps are
timed twice: `fed` with the token of the last step, and `again`, the same step repeated, whose rows are all in cache
slots. A real model's time lies between the two; `hit_rate` shows where. Gate: both placements give the same tokens.
"""

import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.decode.end_to_end import time_steps
from bench.decode.gpu_timing import device_machine
from bench.decode.kernel_times import kernel_times, times_by_purpose
from bench.decode.steps import greedy_step
from bench.random_weights import random_weights
from bench.shapes import config_named
from bench.timing import finish, gate, numbers, options_parser
from csattn.config import SearchConfig, SketchConfig
from csattn.models.identity import geometry_of
from csattn.models.spec import ModelSpec
from csattn.models.weights import ModelWeights
from workers.engine.gpu.engine import GpuEngine
from workers.engine.gpu.latent_memory import CachedLatents
from workers.engine.gpu.step_model import StepModel
from workers.serving.step_engine import StepRow

KINDS = "chosen", "all", "compressed"
DTYPE, TAIL_CAPACITY, WARM_UP_STEPS, PROFILED_STEPS = torch.bfloat16, 512, 16, 4
NUM_TOKENS = 8  # first tokens, which must be the same in both placements
PURPOSES = {  # part of a kernel's name -> its purpose
    "_score_kernel": "score",
    "select_": "choose",
    "count_far": "gather",
    "look_up_rows": "gather",
    "gather_rows": "gather",
    "place_chosen": "gather",
    "_attend_kernel": "attend",
    "_merge_kernel": "attend",
    "attend_prefill": "attend",
}


class InMemoryContext:
    """A stand-in for an artifact, with normally distributed latents, like the output of norms."""

    index_bytes = 0

    def __init__(self, spec: ModelSpec, context_len: int, seed: int, like: Tensor) -> None:
        """like: a tensor with the latents' dtype, on the device that draws them."""
        self.spec = SimpleNamespace(context_len=context_len, index_config=SketchConfig())
        generator, size = torch.Generator(like.device).manual_seed(seed), (1, context_len, 2, spec.head_dim)
        options: dict[str, Any] = {"dtype": like.dtype, "device": like.device, "generator": generator}
        self._layers = [torch.randn(size, **options).cpu() for _ in range(spec.num_layers)]

    def local_kv(self) -> list[Tensor]:
        return self._layers

    def require_model(self, fingerprint: str, geometry: object, tokenizer_hash: str) -> None:
        """Accept any model and tokenizer."""


class InMemoryCompressed(InMemoryContext):
    """A stand-in for an artifact whose rows stand for several tokens each."""

    def __init__(self, spec: ModelSpec, context_len: int, seed: int, like: Tensor) -> None:
        geometry, generator = geometry_of(spec), torch.Generator(like.device).manual_seed(seed)
        about = {"context_len": context_len, "index_config": SketchConfig(), "kv_dtype": "bfloat16"}
        self.spec = SimpleNamespace(model=geometry, **about)

        def make(name: str, shape: tuple[int, int]) -> Any:
            drawn = torch.randn(shape, generator=generator, device=like.device).cpu()
            return drawn.numpy() if name == "pending" else drawn.bfloat16().view(torch.uint16).numpy()

        self._states = [
            {name: make(name, shape) for name, shape in geometry.compressed_sizes(layer_idx, context_len).items()}
            for layer_idx in range(spec.num_layers)
        ]

    def indexed_kv(self) -> list[Tensor]:
        return []

    def states(self) -> list[dict[str, Any]]:
        return self._states


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--contexts", default="131072")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--steps", type=int, default=64)
    arguments = parser.parse_args()
    gate(torch.cuda.is_available(), "this benchmark needs a CUDA device, and torch finds none")
    changes = shrink(arguments.layers, arguments.experts)
    few = {name: changes[name] for name in ("num_hidden_layers", "n_routed_experts")}
    configs = {
        "chosen": config_named("deepseek-v3.2", **changes),
        "all": config_named("deepseek-v3.2", model_type="deepseek_v3", **changes),
        "compressed": config_named("deepseek-v4-flash", **few),
    }
    report: dict[str, Any] = {"bench": "latents", "machine": device_machine(), "layers": arguments.layers, "cases": []}
    with torch.no_grad():
        for kind in arguments.kinds.split(","):
            weights = random_weights(configs[kind], "cuda", DTYPE)
            spec, make = weights.spec, InMemoryCompressed if kind == "compressed" else InMemoryContext
            for context_len in numbers(arguments.contexts):
                most = max(numbers(arguments.batches))
                contexts = [make(spec, context_len, seed, weights.embedding) for seed in range(most)]
                for batch_size in numbers(arguments.batches):
                    all_ids: dict[str, list[Any]] = {}
                    for placement in ("device", "hybrid") if kind == "chosen" else ("device",):
                        case = {"latents": kind, "context_len": context_len, "batch_size": batch_size}
                        timed, all_ids[placement] = measure(weights, contexts[:batch_size], placement, arguments.steps)
                        gc.collect()  # frees CUDA graphs and their memory
                        torch.cuda.empty_cache()
                        report["cases"].append({**case, "placement": placement, **timed})
                        print(report["cases"][-1], flush=True)
                    gate(len({str(ids) for ids in all_ids.values()}) == 1, f"other tokens by placement: {all_ids}")
            del weights
            gc.collect()
            torch.cuda.empty_cache()
    finish(report, arguments.json)


def shrink(num_layers: int, num_experts: int) -> dict[str, Any]:
    """Return changes of a config: the first layer is dense, the others have experts without groups."""
    kinds = ["dense"] + ["sparse"] * (num_layers - 1)
    sizes = {"num_hidden_layers": num_layers, "n_routed_experts": num_experts, "first_k_dense_replace": 1}
    return {**sizes, "mlp_layer_types": kinds, "n_group": 1, "topk_group": 1}


def measure(
    weights: ModelWeights, contexts: list[InMemoryContext], placement: str, num_steps: int
) -> tuple[dict[str, Any], list[Any]]:
    """Return the times of steps, and the tokens of the first `NUM_TOKENS` steps."""
    batch_size, spec = len(contexts), weights.spec
    model = StepModel(
        name="random",
        fingerprint="",
        geometry=geometry_of(spec),
        tokenizer_hash="",
        spec=spec,
        dtype=weights.dtype,
        num_bytes=0,
        take=lambda _: weights,
    )
    engine = GpuEngine(
        model,
        SearchConfig(),
        placement,
        batch_sizes=(batch_size,),
        max_requests=batch_size,
        tail_capacity=TAIL_CAPACITY,
        num_contexts=batch_size,
        max_context_len=contexts[0].spec.context_len,
        device=weights.device,
    )
    with engine:
        for number, context in enumerate(contexts):
            engine.add_context(number, context)  # type: ignore[arg-type]
            engine.open(number, number, SearchConfig(), "csattn")
        token_ids, tokens = [], [7 + number for number in range(batch_size)]
        for _ in range(NUM_TOKENS):
            tokens = engine.step([StepRow(number, token) for number, token in enumerate(tokens)]).next_ids.tolist()
            token_ids.append(tokens)
        placed = engine._placing.placed
        assert placed is not None
        runner, far = placed.runner, placed.far

        def repeat_step() -> None:
            runner.step(batch_size)

        timed: dict[str, Any] = {"hbm_bytes": torch.cuda.memory_allocated()}
        for name, step in (("again", repeat_step), ("fed", greedy_step(runner, batch_size))):
            for _ in range(WARM_UP_STEPS):
                step()
            if isinstance(far, CachedLatents):
                far.cache.clear_statistics()
            times_us = time_steps(step, num_steps)
            p50, p99 = (round(float(x), 1) for x in np.percentile(times_us, [50, 99]))
            timed |= {f"{name}_p50_us": p50, f"{name}_p99_us": p99}
            if isinstance(far, CachedLatents):
                counts = far.cache.statistics()
                found, selected = (sum(getattr(x, part) for x in counts) for part in ("num_found", "num_selected"))
                timed[f"{name}_hit_rate"] = round(found / selected, 4)
        timed["parts_us"] = _parts(kernel_times(repeat_step, PROFILED_STEPS), spec.num_layers)
    return timed, token_ids


def _parts(times_us: dict[str, float], num_layers: int) -> dict[str, float]:
    """Return purpose -> µs a layer; "other" is products, norms and projections."""
    parts = times_by_purpose(times_us, num_layers, PURPOSES)
    return {**parts, "other": round(sum(times_us.values()) / num_layers - sum(parts.values()), 2)}


if __name__ == "__main__":
    main()
