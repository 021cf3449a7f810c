"""What GGUF files say of their model and is not read is refused; what is read gives the same logits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from csattn.errors import ModelError
from csattn.models import load_model
from csattn.models.gguf_checks import require_tensors_read
from tests.models.gguf_files import EMBEDDING, LFM2_NAMES, gguf_of, write_gguf
from tests.tiny import make_model, token_ids

GEMMA_3 = {"family": "gemma3", "gemma3__block_count": 6, "gemma3__attention__key_length": 256}


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"split__count": 3}, "it is one of 3 parts; join them"),
        ({"llama__rope__scaling__type": "yarn"}, r"its positions are scaled \(yarn\)"),
        (
            # transformers 5.24 reads the lengths of these fields' names in place of their values
            {"family": "gpt-oss", "gpt-oss__rope__scaling__type": "yarn", "gpt-oss__rope__scaling__factor": 32.0},
            r"its positions are scaled \(yarn\)",
        ),
        ({"llama__rope__scaling__factor": 4.0}, r"its positions are scaled \(linear\)"),
        ({"llama__rope__scale_linear": 4.0}, r"its positions are scaled \(linear\)"),
        (
            {
                "tensors": EMBEDDING,
                "llama__rope__scaling__type": "linear",
                "llama__rope__scaling__factor": 1.0,
            },
            "lacks model.layers.0",
        ),
        ({"llama__attention__sliding_window": 37}, "attend through a window of 37 rows .* is not read from GGUF"),
        (
            {"family": "phi3", "phi3__rope__dimension_count": 12},
            r"RoPE rotates 12 of a head's 16 dimensions \(rope.dimension_count\)",
        ),
        (
            {"family": "gemma2", "gemma2__attention__key_length": 16},  # Gemma 2 27B
            r"have 16 dimensions and logits scaled by a number \(query_pre_attn_scalar\) that is not read",
        ),
        (
            {"family": "gemma2", "gemma2__final_logit_softcapping": 5.0},
            r"has final_logit_softcapping 5, for which transformers takes 30\.0, a field that is not read",
        ),
        (
            GEMMA_3 | {"gemma3__attention__sliding_window": 64, "gemma3__attention__sliding_window_pattern": 1},
            r"layers with a window are others than transformers takes \(sliding_window_pattern\)",
        ),
        (GEMMA_3, "lacks the field gemma3.attention.sliding_window; convert"),
        (
            GEMMA_3 | {"gemma3__attention__sliding_window": 64},
            r"has rope.freq_base 10000, for which transformers takes 1e\+06",  # llama.cpp takes 10000
        ),
        (
            GEMMA_3
            | {"gemma3__attention__sliding_window": 64}
            | {"gemma3__rope__freq_base": 1e6, "gemma3__rope__freq_base_swa": 5e4},
            "has rope.freq_base_swa 50000, for which transformers takes 10000",
        ),
        ({"llama__rope__scaling__attn_factor": 1.5}, r"it has rope.scaling.attn_factor 1\.5, a field that is not read"),
        ({"llama__logit_scale": 0.25}, r"it has logit_scale 0\.25, a field that is not read"),
        ({"llama__attention__causal": False}, "it has attention.causal 0, a field that is not read"),
        ({"llama__attention__head_count_kv": [4, 2]}, "its layers have one attention.head_count_kv each"),
        (
            {"family": "qwen2moe", "qwen2moe__expert_weights_norm": True},
            "has expert_weights_norm 1, for which transformers takes False",
        ),
        ({"family": "qwen3moe", "qwen3moe__expert_count": 8}, "lacks the field qwen3moe.expert_used_count; convert"),
        ({"family": "qwen3moe", "qwen3moe__expert_gating_func": 2}, "it has expert_gating_func 2, a field"),
        ({"tokenizer__ggml__pre": "deepseek-coder"}, r"its text is split by the rules 'deepseek-coder'"),
        (
            {"family": "qwen2moe", "qwen2moe__expert_feed_forward_length": 36},
            "has expert_feed_forward_length 36, for which transformers takes 1408",
        ),
        ({"llama__attention__sliding_window": 512, "llama__rope__dimension_count": 16, "tensors": EMBEDDING}, "lacks"),
        (
            {"tensors": {"rope_factors_long.weight": EMBEDDING["token_embd.weight"]}},
            r"its positions are scaled \(rope_factors_long.weight\)",
        ),
        (
            {"tensors": EMBEDDING, "llama__rope__scaling__type": "none"},
            "lacks model.layers.0",
        ),
    ],
)
def test_gguf_fields_and_tensors_that_are_not_read_are_refused(
    how: dict[str, Any], match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=f"model.gguf could not be converted: .*{match}"):
        load_model(write_gguf(tmp_path / "model.gguf", **how))


@pytest.mark.parametrize(
    ("changed", "fields", "match"),
    [
        ({"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}, {}, r"beyond those of a llama .* \(16 numbers\)"),
        (
            {"blk.3.attn_norm.weight": np.ones(64, np.float32)},
            {"llama.block_count": 4},
            "lacks model.layers.3.mlp.down",
        ),
        ({"blk.0.attn_v.bias": np.ones(32, np.float32)}, {}, "has biases where a llama of transformers has none"),
        ({}, {"llama.block_count": 2}, r"has tensors beyond those of a llama of transformers .* is not read from GGUF"),
        ({"output.weight": np.ones((200, 64), np.float32)}, {}, r"lm_head.weight has shape \(200, 64\) where its conf"),
        ({"blk.0.attn_v.weight": np.ones((64, 64), np.float32)}, {}, r"v_proj.weight has shape \(64, 64\) where"),
    ],
)
def test_tensors_that_are_not_those_of_the_files_fields_are_refused(
    changed: dict[str, NDArray[np.float32]],
    fields: dict[str, Any],
    match: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """transformers would leave out tensors that it does not know, and the model would compute something else."""
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path))
    tensors, its = gguf_of(make_model("llama"))
    with pytest.raises(ModelError, match=f"model.gguf could not be converted: .*{match}"):
        load_model(write_gguf(tmp_path / "model.gguf", tensors | changed, **its | fields))
    assert not caplog.records


def test_a_file_with_fewer_numbers_than_its_model_is_refused(tmp_path: Path) -> None:
    """transformers takes zeros for experts' gates or ups that are not there."""
    tensors, its = gguf_of(model := make_model("llama"))
    tensors.pop("blk.0.ffn_gate.weight")
    with pytest.raises(ModelError, match="it lacks 6144 of its model's numbers; convert"):
        require_tensors_read(write_gguf(tmp_path / "model.gguf", tensors, **its), model)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path))
    tensors, its = gguf_of(model := make_model("llama", tie_word_embeddings=True))
    tensors.pop("output.weight")
    tensors |= {"blk.3.attn_q.weight": tensors["blk.0.attn_q.weight"], "blk.3.nextn.enorm.weight": np.ones(64, "f")}
    got = load_model(write_gguf(tmp_path / "model.gguf", tensors, **its, llama__nextn_predict_layers=1))
    assert all(torch.equal(got.model.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_a_gguf_file_with_llama_3_rope_factors_gives_the_same_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path))
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    model = make_model("llama", rope_parameters=rope, max_position_embeddings=131072)
    tensors, its = gguf_of(model)
    dim = model.config.head_dim
    plain = rope["rope_theta"] ** (-np.arange(0, dim, 2, np.float32) / dim)
    factors = {"rope_freqs.weight": plain / model.model.rotary_emb.inv_freq.numpy()}
    ids = torch.from_numpy(token_ids(200)).long()[None]
    got = load_model(write_gguf(tmp_path / "model.gguf", tensors | factors, **its))
    torch.testing.assert_close(got.model(ids).logits, model(ids).logits, rtol=0, atol=1e-4)
    factors = {"rope_freqs.weight": np.full(dim // 2, 32.0, np.float32)}
    with pytest.raises(ModelError, match=r"scaled \(rope_freqs.weight\) in a way that is not read"):
        load_model(write_gguf(tmp_path / "other.gguf", tensors | factors, **its))


@pytest.mark.skipif(transformers.__version__ < "5.24", reason="older versions do not read tokenizers of such files")
def test_a_gguf_file_of_lfm2_gives_the_same_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fields tell which layers are convolutions by their number of KV heads, 0."""
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path))
    model = make_model("lfm2", vocab_size=261, conv_bias=False, norm_eps=3e-3)
    tensors = dict[str, NDArray[np.float32]]()
    for name, tensor in model.state_dict().items():
        for ours, theirs in LFM2_NAMES.items():
            name = name.replace(ours, theirs)
        tensors[name] = tensor.squeeze(1).numpy() if "shortconv.conv" in name else tensor.numpy()
    del tensors["lm_head.weight"]  # the embedding
    its = {
        "lfm2.block_count": 4,
        "lfm2.feed_forward_length": len(tensors["blk.0.ffn_up.weight"]),
        "lfm2.attention.head_count_kv": [0, 2, 0, 2],
        "lfm2.attention.layer_norm_rms_epsilon": model.config.norm_eps,
        "lfm2.shortconv.l_cache": model.config.conv_L_cache,
        "lfm2.rope.freq_base": float(model.config.rope_parameters["rope_theta"]),
    }
    got = load_model(write_gguf(tmp_path / "model.gguf", tensors, "lfm2", **its))
    ids = torch.from_numpy(token_ids(50)).long()[None]
    torch.testing.assert_close(got.model(ids).logits, model(ids).logits, rtol=0, atol=1e-4)
