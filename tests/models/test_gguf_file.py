"""GGUF files are converted to the model that they describe, or refused."""

import errno
import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFWriter, TokenType
from numpy.typing import NDArray
from safetensors import SafetensorError
from transformers import LlamaForCausalLM

from csattn.errors import ModelError
from csattn.models import gguf_file, load_model
from csattn.models.gguf_checks import require_tensors_read
from csattn.models.gguf_tokenizer import end_ids
from csattn.models.loader import is_to_be_converted, read_config
from tests.tiny import byte_tokenizer, make_model, token_ids

GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


GEMMA_3 = {"family": "gemma3", "gemma3__block_count": 6, "gemma3__attention__key_length": 256}
EMBEDDING = {"token_embd.weight": np.ones((256, 64), np.float32)}


def write_gguf(
    path: Path,
    tensors: Mapping[str, NDArray[np.float32]] = MappingProxyType({}),
    family: str = "llama",
    more_tokens: tuple[str, ...] = (),
    merges: tuple[str, ...] = ("a b", "c d"),  # transformers 5.17 makes no tokenizer of a single merge
    **fields: Any,
) -> Path:
    sizes = {"context_length": 512, "embedding_length": 64, "block_count": 1, "feed_forward_length": 96}
    sizes |= {"attention.head_count": 4, "attention.head_count_kv": 4, "vocab_size": 256}
    sizes |= {"attention.layer_norm_rms_epsilon": 1e-5}
    writer = GGUFWriter(path, family)
    tokens = [
        *byte_tokenizer().convert_ids_to_tokens(range(256)),
        "ab",
        "cd",
        "<|endoftext|>",
        "<|im_end|>",
        "<|fim|>",
        *more_tokens,
    ]
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token.startswith("<|") else TokenType.NORMAL for token in tokens])
    writer.add_token_merges(merges)
    kinds = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, bool: writer.add_bool}
    its = {f"{family}.{name}": size for name, size in sizes.items()} | {"tokenizer.ggml.model": "gpt2"}
    for name, value in (its | {name.replace("__", "."): value for name, value in fields.items()}).items():
        kinds.get(type(value), writer.add_array)(name, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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


@pytest.mark.parametrize("name", ["MODEL.GGUF", "Modèl [1].v2.gguf"])
def test_a_gguf_file_may_have_any_name_that_ends_so(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path))
    tensors, its = gguf_of(make_model("llama"))
    assert load_model(write_gguf(tmp_path / name, tensors, **its)).name == str(tmp_path / name)


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


def test_a_gguf_file_is_converted_per_dtype_but_not_to_read_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path))
    tensors, its = gguf_of(make_model("llama"))
    file, made = str(write_gguf(tmp_path / "model.gguf", tensors, **its)), tmp_path / "models"
    assert read_config(file).num_hidden_layers == its["llama.block_count"] and not made.exists()
    few = load_model(file, "bfloat16").model.state_dict()
    assert len(list(made.iterdir())) == 1 and read_config(file, "bfloat16").dtype == torch.bfloat16
    assert is_to_be_converted(file, "float32") and not is_to_be_converted(file, "bfloat16")
    whole = load_model(file).model.state_dict()
    assert all(torch.equal(few[name], tensor.bfloat16()) for name, tensor in whole.items())
    load_model(file, "float16")
    assert len(list(made.iterdir())) == 2, "what is there in float32 serves for all"


def test_a_conversion_opens_the_gguf_file_and_maps_its_names_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path))
    tensors, its = gguf_of(make_model("llama"))
    file, made = write_gguf(tmp_path / "model.gguf", tensors, **its), []

    class Reader(gguf.GGUFReader):
        def __init__(self, path: Any) -> None:
            made.append(path)
            super().__init__(path)

    names = Mock(wraps=gguf.get_tensor_name_map)
    monkeypatch.setattr(gguf, "GGUFReader", Reader)
    monkeypatch.setattr(gguf, "get_tensor_name_map", names)
    load_model(file)
    assert made == [str(file)] and gguf.GGUFReader is Reader
    assert names.call_count == 1 and gguf.get_tensor_name_map is names


@pytest.mark.parametrize("lost", ["config.json", "tokenizer.json", "model.safetensors", "half of model.safetensors"])
def test_a_conversion_that_lost_a_file_is_made_again(
    lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs that clean caches remove single files."""
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path))
    tensors, its = gguf_of(make_model("llama"))
    file = str(write_gguf(tmp_path / "model.gguf", tensors, **its))
    want = load_model(file).fingerprint
    [made] = (tmp_path / "models").iterdir()
    (part := made / lost.split()[-1]).write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    if part.name == lost:
        part.unlink()
    assert is_to_be_converted(file, "float32") and load_model(file).fingerprint == want
    assert list((tmp_path / "models").iterdir()) == [made]


def test_a_gguf_models_stop_ids_are_all_tokens_that_end_a_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path))
    tensors, its = gguf_of(make_model("llama", vocab_size=261))
    file = write_gguf(tmp_path / "model.gguf", tensors, **its, tokenizer__ggml__eos_token_id=259)
    got = load_model(str(file))
    assert got.stop_ids == {258, 259} and got.model.generation_config.eos_token_id == [258, 259]
    got.tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    assert end_ids(got.tokenizer) == {258, 259, 261}, "as Phi's turns end"
    got.tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>", "<|return|>"]})
    assert end_ids(got.tokenizer) == {258, 259, 262}, "as gpt-oss's end, of several messages"
    directory = load_model(next((tmp_path / "models").iterdir()).rename(tmp_path / "directory.gguf"))
    assert directory.stop_ids == {259}, "a directory has what its author wrote"


@pytest.mark.parametrize(
    ("how", "want"),
    [
        ({"pre": "llama-bpe"}, [258, 256]),
        ({"pre": "tekken"}, [258, 256]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [256]),
        ({"pre": "qwen2"}, [64, 65]),
        ({"pre": "smollm"}, [64, 65]),
    ],
)
def test_words_that_are_tokens_stay_whole_after_bos_as_the_rules_of_llama_3_say(
    how: dict[str, Any], want: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path))
    tensors, its = gguf_of(make_model("llama", vocab_size=261))
    its |= {f"tokenizer.ggml.{name}": value for name, value in ({"bos_token_id": 258} | how).items()}
    loaded = load_model(write_gguf(tmp_path / "model.gguf", tensors, merges=("c d", "c d"), **its))
    assert loaded.tokenizer("ab").input_ids == want
    assert loaded.tokenizer("ab", add_special_tokens=False).input_ids == [i for i in want if i != 258]


def test_special_tokens_with_any_letters_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in DeepSeek's models of Qwen and Llama."""
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path))
    tensors, its = gguf_of(make_model("llama", vocab_size=265))
    more = ("<|begin▁of▁sentence｜>", "<|User｜>", "<| |>", "<|Ġ|>")  # the last two are the same in letters of bytes
    its |= {"tokenizer.ggml.bos_token_id": 261, "tokenizer.ggml.add_bos_token": True}
    tokenizer = load_model(write_gguf(tmp_path / "model.gguf", tensors, more_tokens=more, **its)).tokenizer
    ids = tokenizer(f"{more[1]}ab<|im_end|>").input_ids
    assert ids == [261, 262, 256, 259] and len(tokenizer) == 265
    assert tokenizer(more[2] + more[3], add_special_tokens=False).input_ids == [263, 264]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab" and tokenizer.decode(ids[:2]) == "".join(more[:2])


@pytest.mark.parametrize("prefix", [True, False])
def test_words_have_a_space_before_them_if_the_file_says_so(
    prefix: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path))
    tensors, its = gguf_of(make_model("llama", vocab_size=262))
    its |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.add_space_prefix": prefix}
    tokenizer = load_model(write_gguf(tmp_path / "model.gguf", tensors, more_tokens=("▁",), **its)).tokenizer
    ids = tokenizer("ab ab", add_special_tokens=False).input_ids
    assert ids == [*[261] * prefix, 256, 261, 256] and tokenizer.decode(ids) == "ab ab"


@pytest.mark.parametrize("name", ["eot", "eom"])
def test_tokens_that_a_file_says_end_a_turn_end_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path))
    tensors, its = gguf_of(make_model("llama", vocab_size=261))
    file = write_gguf(tmp_path / "model.gguf", tensors, **its, **{f"tokenizer.ggml.{name}_token_id": 260})
    assert load_model(file).stop_ids == {258, 259, 260}, "and not Llama's default, 2"


def test_gguf_files_of_equal_name_and_mtime_are_distinguished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files in two folders, and two in turn at the same path. Each caller gets its own copy of a config."""
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path))
    for folder, theta, more in (("a", 1e4, "x"), ("b", 5e5, "x"), ("b", 2e4, "x" * 99)):
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        file = write_gguf(Path("model.gguf"), EMBEDDING, llama__rope__freq_base=theta, x__y=more)
        os.utime(file, (1e9, 1e9))
        config = read_config("model.gguf")
        assert config.rope_parameters["rope_theta"] == theta
        config.rope_parameters["rope_theta"] = 3.0
        assert read_config("model.gguf").rope_parameters["rope_theta"] == theta


def test_a_file_replaced_by_one_of_the_same_size_and_time_is_converted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path / "cache"))
    sizes, loaded = set(), []
    for seed in (0, 1):
        tensors, its = gguf_of(make_model("llama", seed))
        file = write_gguf(tmp_path / "model.gguf", tensors, **its | {"llama.rope.freq_base": 1e4 + seed})
        os.utime(file, (1e9, 1e9))
        sizes.add(file.stat().st_size)
        loaded.append(load_model(file))
    assert len(sizes) == 1 and loaded[0].fingerprint != loaded[1].fingerprint
    assert [one.model.config.rope_parameters["rope_theta"] for one in loaded] == [1e4, 10001.0]
    assert len(list((tmp_path / "cache" / "models").iterdir())) == 1


def test_files_of_a_killed_conversion_are_removed_after_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path))
    for name, when in (("old", 1e9), ("new", time.time())):
        (left := tmp_path / "models" / f".converting-{name}").mkdir(parents=True)
        os.utime(left, (when, when))
    with pytest.raises(ModelError):
        load_model(write_gguf(tmp_path / "model.gguf"))
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".converting-new"]


def test_a_conversion_is_flushed_to_disk_before_it_is_renamed_into_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path))
    tensors, its = gguf_of(make_model("llama"))
    file, flushed, flush = write_gguf(tmp_path / "model.gguf", tensors, **its), list[Path](), os.fsync

    def note(descriptor: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    load_model(file)
    [made] = (tmp_path / "models").iterdir()
    scratch = flushed[0].parent
    assert scratch.name.startswith(".converting-")
    assert {*flushed} == {tmp_path / "models", scratch, *(scratch / path.name for path in made.iterdir())}
    assert flushed[-2:] == [scratch, tmp_path / "models"]


def gguf_of(model: Any) -> tuple[dict[str, NDArray[np.float32]], dict[str, Any]]:
    """Return a Llama model's tensors and fields, as `write_gguf` takes them."""
    config, tensors = model.config, dict[str, NDArray[np.float32]]()
    its = {
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.block_count": config.num_hidden_layers,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.freq_base": config.rope_parameters["rope_theta"],
        "llama.vocab_size": config.vocab_size,
    }
    dim = config.head_dim
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:  # GGUF has the two rows of a RoPE pair next to each other
            pairs = array.reshape(-1, 2, dim // 2, array.shape[1])
            array = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)
        for ours, theirs in GGUF_NAMES.items():
            name = name.replace(ours, theirs)
        tensors[name] = array
    return tensors, its


def test_a_conversion_in_an_older_format_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(gguf_file, "_convert", lambda gguf, dtype, target: None)
    file, its = write_gguf(tmp_path / "model.gguf"), tmp_path / "models"
    of = f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}"
    (its / f"model-{hashlib.sha256(of.encode()).hexdigest()[:12]}" / "part").mkdir(parents=True)
    (its / "model-of-another").mkdir()
    with pytest.raises(ModelError):
        load_model(file)
    assert [path.name for path in its.iterdir() if path.name != "model-of-another"] == [
        f"model-{hashlib.sha256(f'2 {of}'.encode()).hexdigest()[:12]}"
    ]


def test_an_unwritable_cache_is_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").touch()
    (tmp_path / "file").touch()
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot be written .* set CSATTN_CACHE to"):
        load_model(str(tmp_path / "model.gguf"))


_FULL = r"No space left .*; free some space in .* CSATTN_CACHE"


@pytest.mark.parametrize(
    ("free_bytes", "error", "match"),
    [
        (1 << 10, OSError("not reached"), r"0\.00 GiB, and .* CSATTN_CACHE"),
        (None, SafetensorError("I/O error: No space left on device (os error 28)"), _FULL),
        (None, OSError(errno.ENOSPC, "No space left on device"), _FULL),  # of the config
    ],
)
def test_a_conversion_without_disk_space_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int | None, error: Exception, match: str
) -> None:
    def save_pretrained(*_: object) -> None:
        raise error

    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(gguf_file, "available_bytes", lambda path: free_bytes)
    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", save_pretrained)
    tensors, its = gguf_of(make_model("llama"))
    with pytest.raises(ModelError, match=match):
        load_model(write_gguf(tmp_path / "model.gguf", tensors, **its))
    assert list((tmp_path / "models").iterdir()) == []
