"""The benchmark of latent attention, with the GPU's kernels compiled for the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench import latents
from bench.latents import InMemoryContext, measure, shrink
from bench.random_weights import random_weights
from bench.shapes import config_named
from tests.cuda_on_cpu.emulated import DEVICE, Emulator
from tests.workers.engine.emulated_engine import emulate

TINY = {
    "hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 16, "num_attention_heads": 4, "vocab_size": 90,
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 8, "qk_rope_head_dim": 16,
    "v_head_dim": 8, "index_n_heads": 6, "index_head_dim": 16, "index_topk": 8,
}  # fmt: skip


def timed(step: Callable[[], None], num_steps: int) -> list[float]:
    for _ in range(num_steps):
        step()
    return [1.0] * num_steps


def test_both_placements_generate_the_same_tokens(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(emulator, monkeypatch)
    monkeypatch.setattr(latents, "time_steps", timed)
    monkeypatch.setattr(latents, "kernel_times", lambda step, num: {"_score_kernel": 4.0, "norm": 2.0})
    monkeypatch.setattr(latents, "WARM_UP_STEPS", 2)
    config = config_named("deepseek-v3.2", **TINY, **shrink(num_layers=2, num_experts=9))
    weights = random_weights(config, DEVICE, torch.float32)
    contexts = [InMemoryContext(weights.spec, 100, seed, weights.embedding) for seed in range(2)]
    found: dict[str, Any] = {placement: measure(weights, contexts, placement, 3) for placement in ("device", "hybrid")}
    assert found["device"][1] == found["hybrid"][1]
    case = found["hybrid"][0]
    assert case["again_hit_rate"] == 1 and 0 < case["fed_hit_rate"] < 1
    assert case["parts_us"] == {"score": 2.0, "other": 1.0}
