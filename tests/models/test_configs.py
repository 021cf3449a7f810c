"""What configs say of models: what is computed, and what is refused with the reason."""

from typing import Any

import pytest
import torch

from bench.accuracy.attending.rotation import rotate_for
from csattn.errors import ModelError
from csattn.models import load_model
from csattn.models.description import describe
from csattn.models.families import FAMILIES
from csattn.models.positions import stretch_positions
from csattn.models.query import queries_before_rope
from csattn.models.rope import model_frequencies
from index_build.capture import prefill
from tests.tiny import ALL_FAMILIES, make_model, save, tiny_config, token_ids


@pytest.mark.parametrize(
    ("family", "changes", "match"),
    [
        ("mistral", {"sliding_window": 128}, "every layer of this model attends through a sliding window"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 128}, "every layer of this model"),
        ("ministral", {"layer_types": 3 * ["sliding_attention"]}, "every layer of this model"),
        (
            "qwen2",
            {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
            "layers of the type 'linear_attention', which csattn computes in other families, but not in 'qwen2'",
        ),
        (
            "llama",
            {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 37},
            "full_attention, sliding_attention in layer_types.*layers of family 'llama' are alike",
        ),
        (
            "llama",
            {
                "layer_types": 3 * ["full_attention"],
                "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 500.0}},
            },
            "full_attention in layer_types.* are alike",
        ),
        (
            "ministral3",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "lack llama_4_scaling_beta or original_max_position_embeddings; add them",
        ),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        ("llama", {"model_type": "olmo"}, "'olmo' is not supported: its norms have no weights"),
        (
            "gemma4_text",
            {"num_kv_shared_layers": 3},
            "share the rows of an earlier full_attention layer, and there is none",
        ),
        (
            "gemma4_text",
            {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 200},
            "embeddings of only some tokens",
        ),
        (
            "gemma4_text",
            {"per_layer_config": {1: {"head_dim": 24}}},
            "with the same attention span have different heads",
        ),
        ("gpt_oss", {"swiglu_limit": 5.0}, "clamped in a way that csattn does not compute"),
        ("deepseek_v4", {"swiglu_limit": 7.0}, "'silu' of gates limited to 7"),
        ("deepseek_v4", {"hidden_act": "relu"}, "'relu' of gates limited to 10"),
        ("deepseek_v4", {"n_shared_experts": 2}, "has 2 shared experts"),
        ("deepseek_v4", {"scoring_func": "sigmoid"}, "routes tokens to experts in another way"),
        ("olmoe", {"clip_qkv": 8.0}, "clips queries"),
        ("cohere", {"use_qk_norm": True}, "with separate weights"),
        ("hunyuan_v1_dense", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "scaled by .dynamic"),
        ("ernie4_5_moe", {"moe_norm_min": 0.9}, r"by at least 0\.9 \(moe_norm_min\), .* is at most 1e-06"),
        ("ernie4_5_moe", {"moe_norm_min": float("nan")}, "by at least nan"),
        ("deepseek_v3", {"n_group": 5}, "3 of 12 experts, of 2 of 5 groups"),
        ("dots1", {"n_group": 12}, "of 2 of 12 groups"),
        ("glm4_moe", {"topk_group": 0}, "of 0 of 4 groups"),
        ("solar_open", {"topk_group": 1, "num_experts_per_tok": 4}, "4 of 12 experts, of 1 of 4 groups"),
        ("qwen3_next", {"hidden_act": "gelu_pytorch_tanh"}, "activation 'gelu_pytorch_tanh' after the convolution"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "activation 'gelu' after the convolution"),
        ("nemotron_h", {"moe_latent_size": 32}, "a projection of the layer's input"),
        ("nemotron_h", {"layers_block_type": ["linear_attention", "mlp"]}, "keeps a state or is an MLP alone"),
        ("qwen3", {"layer_types": ["full_attention", "moe", "full_attention"]}, "some layers of this model are moe"),
        ("granitemoehybrid", {"layer_types": 5 * ["linear_attention"]}, "every layer of this model"),
        ("granitemoehybrid", {"mamba_n_groups": 2}, "in 2 groups"),
        ("granitemoehybrid", {"mamba_d_conv": 1}, "convolutions of this model see 1 token"),
        ("granitemoehybrid", {"time_step_limit": None}, "steps of at most None"),
        ("granitemoehybrid", {"time_step_limit": (0.0, 0.1)}, r"at most 0\.1 \(time_step_limit\)"),
        ("lfm2", {"layer_types": ["full_attention", *3 * ["linear_attention"]]}, "not in 'lfm2'"),
        ("mistral", {"sliding_window": 0}, "config has sliding_window 0, and csattn needs at least 1"),
        ("gemma2", {"sliding_window": 0}, "config has sliding_window 0, and csattn needs at least 1"),
        ("llama", {"num_hidden_layers": 0}, "config has num_hidden_layers 0, and csattn needs at least 1; use its"),
        ("llama", {"model_type": "t5"}, "'t5' is not supported; csattn supports afmoe"),
        ("llama", {"hidden_act": "gelu"}, "activation 'gelu', which csattn does not compute"),
        ("hyperclovax", {"use_post_norm": False}, "no norms after attention and MLP"),
        ("phi3", {"sliding_window": 64}, "every layer"),
        ("gemma", {"use_bidirectional_attention": True}, "later tokens"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "later tokens"),
    ],
)
def test_configs_that_csattn_does_not_compute_are_refused_with_the_reason(family, changes, match) -> None:
    config = tiny_config(family, **{name: value for name, value in changes.items() if name != "model_type"})
    if "model_type" in changes:
        config.model_type = changes["model_type"]
    with pytest.raises(ModelError, match=match):
        describe(config)


def test_a_sliding_window_over_all_positions_is_ignored() -> None:
    """Ministral 8B and Phi-3 128K have windows as long as all positions."""
    for family, window in (("mistral", 1024), ("mixtral", 4096), ("phi3", 262144)):
        assert len(describe(tiny_config(family, sliding_window=window)).indexed_layers) == 3


@pytest.mark.parametrize(
    ("family", "stray"),
    [
        (
            "llama",
            {
                "query_pre_attn_scalar": 7,
                "residual_multiplier": 0.1,
                "no_rope_layers": [0, 0, 0],
                "logits_scaling": 9.0,
                "num_kv_shared_layers": 1,
                "attention_k_eq_v": True,
                "hidden_size_per_layer_input": 8,
            },
        ),
        ("smollm3", {"attn_temperature_tuning": True, "attn_scale": 0.3, "floor_scale": 7}),
        ("deepseek_v32", {"indexer_types": ["full", "shared", "full"]}),
        ("mixtral", {"moe_intermediate_size": 20}),
        ("qwen3_moe", {"shared_expert_intermediate_size": 0}),  # so in Qwen3-Coder
        ("qwen3_5_moe_text", {"norm_topk_prob": False}),
        ("gemma2", {"hidden_act": "relu"}),
    ],
)
def test_config_fields_of_other_families_are_ignored(family: str, stray: dict[str, Any]) -> None:
    """A config may carry any field; those that a family's model does not read change nothing."""
    config = tiny_config(family)
    before = describe(config)
    for name, value in stray.items():
        setattr(config, name, value)
    assert describe(config) == before


@pytest.mark.parametrize(
    ("family", "field", "layer_idx", "width"),
    [
        ("hy_v3", "num_shared_experts", 1, 96),
        ("exaone_moe", "num_shared_experts", 1, None),
        ("nemotron_h", "moe_shared_expert_intermediate_size", 2, 96),
    ],
)
def test_without_shared_experts_the_mlp_is_that_of_transformers(
    family: str, field: str, layer_idx: int, width: int | None
) -> None:
    mlp = describe(tiny_config(family, **{field: 0})).layers[layer_idx].mlp
    assert (mlp and mlp.intermediate_size) == width


def test_a_layer_without_rope_is_described_without_rope() -> None:
    def ropes(family: str, **changes: object) -> list[int | None]:
        return [layer.attention.rope for layer in describe(tiny_config(family, **changes)).layers]

    assert ropes("smollm3") == [0, None, 0]
    assert ropes("exaone4") == ropes("cohere2") == [0, None, 0]  # the other layers are local
    full = 3 * ["full_attention"]
    assert ropes("exaone4", layer_types=full) == ropes("cohere2", layer_types=full) == [None, None, None]
    assert ropes("exaone4", sliding_window=None, layer_types=full) == [0, 0, 0]
    assert ropes("gemma3_text") == [0, 1, 1]  # numbered in the order of its config


def has_queries(name: str) -> bool:
    """Whether an index is made from the family's queries."""
    family = FAMILIES[name.partition(",")[0]]
    return not family.latents and not family.compressed


@pytest.mark.parametrize("family", [name for name in ALL_FAMILIES if has_queries(name)])
def test_queries_computed_from_a_layers_input_equal_the_captured_ones(family: str) -> None:
    model, ids = make_model(family), torch.from_numpy(token_ids(40)).long()
    num_compared = 0
    for capture, _ in prefill(model, ids):
        if capture.state is not None or not capture.q.shape[1]:
            continue  # a layer without queries
        with torch.no_grad():
            q = queries_before_rope(model, capture.layer_idx, capture.hidden_in)
            q = rotate_for(model.model, capture.layer_idx, q, torch.arange(40))
        torch.testing.assert_close(q, capture.q, rtol=1e-4, atol=1e-4)
        num_compared += 1
    assert num_compared


def test_stretched_positions_scale_max_positions_and_rope_frequencies(tmp_path) -> None:
    source = str(save(tmp_path / "a"))
    plain, stretched = load_model(source), load_model(source, stretch=4)
    assert stretched.geometry.max_positions == 4 * plain.geometry.max_positions
    assert stretched.fingerprint != plain.fingerprint == load_model(source, stretch=1).fingerprint
    frequencies, factor = model_frequencies(stretched.model.model.rotary_emb)
    before, _ = model_frequencies(plain.model.model.rotary_emb)
    # the fastest pair rotates as before, the slowest a quarter as fast, and logits are scaled up a little
    torch.testing.assert_close(frequencies[0], before[0])
    torch.testing.assert_close(frequencies[-1], before[-1] / 4)
    assert factor > 1
    for factor in (0.5, float("inf")):
        with pytest.raises(ModelError, match="stretched by a factor of 1 to 1024, got"):
            load_model(source, stretch=factor)


def test_max_positions_include_the_yarn_factor() -> None:
    """Qwen 2.5's and 3's model cards add YaRN and leave max_position_embeddings as it is."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
    for most, positions in ((640, 2048), (2048, 2048), (4096, 4096)):
        config = tiny_config("qwen3", rope_parameters=yarn, max_position_embeddings=most)
        assert describe(config).max_positions == positions


def test_positions_that_are_scaled_already_cannot_be_stretched() -> None:
    config = tiny_config("llama", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(ModelError, match="scaled by 'linear' already"):
        stretch_positions(config, 2.0)


@pytest.mark.parametrize("family", ["nemotron_h", "granitemoehybrid"])
def test_positions_of_a_model_without_rope_cannot_be_stretched(family: str) -> None:
    with pytest.raises(ModelError, match="no RoPE, so its positions cannot be stretched"):
        stretch_positions(tiny_config(family), 2.0)
