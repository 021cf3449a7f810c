"""Models that compute different results have different fingerprints."""

from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch

from csattn.models import load_model
from csattn.models.identity import _sample_stride
from csattn.models.loader import wrap_model
from tests.tiny import byte_tokenizer, loaded, make_model, save


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"hidden_act": "relu"}),
        ("llama", {"rms_norm_eps": 1e-2}),
        ("llama", {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}),
        ("smollm3", {"no_rope_layers": [1, 1, 0]}),
        ("deepseek_v4", {"hc_sinkhorn_iters": 6}),
        ("deepseek_v4", {"hc_eps": 1e-3}),
        ("deepseek_v4", {"index_topk": 30}),
    ],
)
def test_config_fields_that_change_results_change_the_fingerprint(family, changes) -> None:
    """A corrected config.json makes a different model, even if no tensor changes."""
    before, after = make_model(family), make_model(family, **changes)
    after.load_state_dict(before.state_dict())
    assert wrap_model(after, byte_tokenizer(), "x").fingerprint != wrap_model(before, byte_tokenizer(), "x").fingerprint


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_moe"])
def test_max_positions_do_not_change_the_fingerprint(family: str) -> None:
    """KV does not depend on the number of positions."""
    before, after = make_model(family), make_model(family, max_position_embeddings=2048)
    after.load_state_dict(before.state_dict())
    assert wrap_model(after, byte_tokenizer(), "x").fingerprint == wrap_model(before, byte_tokenizer(), "x").fingerprint


def test_a_change_of_one_tensor_changes_the_fingerprint() -> None:
    model = make_model()
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight += 1e-3
    assert wrap_model(model, byte_tokenizer(), "x").fingerprint != loaded().fingerprint


@pytest.mark.parametrize("shape", [(64, 512), (576, 576), (192, 576), (320, 960), (4096, 14336), (8, 128, 96)])
def test_a_fingerprint_samples_few_values_but_every_input_column(shape: tuple[int, ...]) -> None:
    at = np.arange(0, prod(shape), _sample_stride(shape))
    assert len({*(at % shape[-1])}) == shape[-1] and len(at) < 1.2 * max(4096, shape[-1])


def test_an_expert_routing_bias_changes_the_fingerprint() -> None:
    """In most families this bias is a buffer, not a parameter."""
    model = make_model("minimax_m2")
    model.model.layers[1].mlp.e_score_correction_bias += 0.1
    assert wrap_model(model, byte_tokenizer(), "x").fingerprint != loaded("minimax_m2").fingerprint


def test_the_table_of_experts_per_token_changes_the_fingerprint() -> None:
    model = make_model("deepseek_v4")
    model.model.layers[0].mlp.gate.tid2eid[0] = model.model.layers[0].mlp.gate.tid2eid[0].roll(1)
    assert wrap_model(model, byte_tokenizer(), "x").fingerprint != loaded("deepseek_v4").fingerprint


def test_a_layer_scalar_changes_the_fingerprint(tmp_path: Path) -> None:
    first = load_model(str(save(tmp_path, "gemma4_text")))
    assert first.fingerprint == load_model(str(tmp_path)).fingerprint
    first.model.model.layers[1].layer_scalar += 0.1
    assert wrap_model(first.model, first.tokenizer, "other").fingerprint != first.fingerprint
