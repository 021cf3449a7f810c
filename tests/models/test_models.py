"""Which models are loaded, and which are refused with which error."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bench.accuracy.attending.rotation import rotate_for
from csattn.build_options import BuildOptions
from csattn.errors import ConfigError, ContextError, ModelError
from csattn.models import load_model, loader
from csattn.models.description import describe
from csattn.models.families import FAMILIES
from csattn.models.loader import read_config, wrap_model
from csattn.models.positions import stretch_positions
from csattn.models.query import queries_before_rope
from csattn.models.rope import model_frequencies
from index_build.capture import prefill
from tests.tiny import ALL_FAMILIES, CHAT_TEMPLATE, byte_tokenizer, make_model, save, tiny_config, token_ids


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


def test_a_saved_model_loads_with_the_same_fingerprint(tmp_path: Path) -> None:
    first, second = load_model(str(save(tmp_path / "a"))), load_model(str(save(tmp_path / "b", seed=1)))
    again = load_model(str(tmp_path / "a"))
    assert first.fingerprint == again.fingerprint != second.fingerprint
    assert first.tokenizer_hash == again.tokenizer_hash
    assert first.geometry == again.geometry
    assert load_model(str(tmp_path / "a"), "bfloat16").fingerprint != first.fingerprint


def test_loading_hides_progress_bars_and_restores_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading shows no progress bars, and then restores the process's setting."""
    shows, had_bars = transformers.utils.logging, transformers.utils.logging.is_progress_bar_enabled()
    resolve, meanwhile = loader.source_of, []
    monkeypatch.setattr(
        loader, "source_of", lambda *of: meanwhile.append(shows.is_progress_bar_enabled()) or resolve(*of)
    )
    try:
        for turn in (shows.enable_progress_bar, shows.disable_progress_bar):
            turn()
            load_model(save(tmp_path))
            assert shows.is_progress_bar_enabled() == (turn is shows.enable_progress_bar)
    finally:
        (shows.enable_progress_bar if had_bars else shows.disable_progress_bar)()
    assert meanwhile == [False, False]


def test_a_chat_template_or_token_added_after_loading_changes_the_tokenizer_hash(tmp_path: Path) -> None:
    model = load_model(str(save(tmp_path)))
    before = model.tokenizer_hash
    model.tokenizer.chat_template = "<turn>" + CHAT_TEMPLATE
    with_template = model.tokenizer_hash
    model.tokenizer.add_tokens(["<turn>"])
    assert len({before, with_template, model.tokenizer_hash}) == 3
    assert load_model(str(tmp_path)).tokenizer_hash == before


def test_clean_up_tokenization_spaces_is_turned_off(tmp_path: Path) -> None:
    """transformers ignores this setting as well, but would warn at the first answer."""
    settings = save(tmp_path) / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "clean_up_tokenization_spaces": True}))
    assert not load_model(str(tmp_path)).tokenizer.clean_up_tokenization_spaces


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("/no/such/dir", "no model at"),
        ("./missing.gguf", "no model at"),
        ("nonsense", "no model at"),
        ("n" * 300, "no model at"),
        ("{tmp}", "no config.json"),
        ("{tmp}/notes.txt", "not a .gguf"),
        ("{tmp}/bad.gguf", "could not be"),
        ("{tmp}/short.gguf", "could not be converted"),
        ("{tmp}/broken", "could not be loaded"),
    ],
)
def test_a_missing_or_invalid_model_path_is_refused_with_a_one_line_reason(
    tmp_path: Path, name: str, match: str
) -> None:
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    (tmp_path / "short.gguf").write_bytes(b"GGUF")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=match) as raised:
        load_model(name.format(tmp=tmp_path))
    assert "\n" not in str(raised.value)


def test_a_family_that_this_transformers_lacks_is_refused_with_the_reason(tmp_path, monkeypatch) -> None:
    save(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "newest"}')
    monkeypatch.setitem(FAMILIES, "newest", FAMILIES["llama"])
    with pytest.raises(ModelError, match=f"'newest' is not in transformers {transformers.__version__}; install"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "match"),
    [
        ("tokenizer.json", "[]", "its tokenizer could not be read: .*; put tokenizer.json and"),
        ("tokenizer_config.json", "[]", "its tokenizer could not be read"),
        ("generation_config.json", "[]", "could not be loaded"),
        ("generation_config.json", "{", "generation_config.json' is not a valid JSON file"),
        (
            "adapter_config.json",
            "{}",
            "has an adapter .*; merge it into its model.*; or delete adapter_config",
        ),
        ("config.json", "[]", "could not be loaded"),
        ("config.json", {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}, "family 'own' is not supported"),
        ("config.json", {"num_attention_heads": 0}, "could not be loaded"),
        ("config.json", {"head_dim": -1}, "could not be loaded"),
        (
            "config.json",
            {"rms_norm_eps": 0},
            "field 'rms_norm_eps': TypeError: Field 'rms_norm_eps' expected",
        ),
    ],
)
def test_a_damaged_model_is_refused_with_a_one_line_reason(
    tmp_path: Path, file: str, text: str | dict[str, object], match: str
) -> None:
    """On damaged files libraries raise errors of any class."""
    path = save(tmp_path) / file
    path.write_text(text if isinstance(text, str) else json.dumps(json.loads(path.read_text()) | text))
    with pytest.raises(ModelError, match=match) as raised:
        load_model(str(tmp_path))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("part", [slice(0), slice(95)])
def test_experts_that_do_not_fit_together_are_refused(part: slice, tmp_path: Path) -> None:
    """transformers refers to a report, which is hidden here."""
    state = load_file(file := save(tmp_path, "mixtral") / "model.safetensors")
    one = state.pop("model.layers.1.block_sparse_moe.experts.2.w1.weight")[part]
    save_file(state | ({"model.layers.1.block_sparse_moe.experts.2.w1.weight": one} if len(one) else {}), file)
    with pytest.raises(ModelError, match="tensors of the checkpoint do not fit together"):
        load_model(tmp_path)


def test_a_model_with_an_adapter_in_its_layers_is_refused() -> None:
    """peft wraps a linear layer in a module with a `base_layer`."""
    model = make_model()
    attention = model.model.layers[1].self_attn
    attention.q_proj = torch.nn.ModuleDict({"base_layer": attention.q_proj})
    with pytest.raises(ModelError, match=r"tuned has an adapter in its layers, .*; merge it into its model"):
        wrap_model(model, byte_tokenizer(), "tuned")


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_custom_code_of_a_checkpoint_is_refused_without_a_prompt(
    tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asks_user = save(tmp_path) / file, Mock(return_value="y")
    its = {"auto_map": {"AutoConfig": "own.Own", "AutoTokenizer": ["own.Own", None]}}
    its["tokenizer_class" if file == "tokenizer_config.json" else "model_type"] = "Own"
    path.write_text(json.dumps(json.loads(path.read_text()) | its))
    monkeypatch.setattr("builtins.input", asks_user)
    with pytest.raises(ModelError):
        load_model(str(tmp_path))
    asks_user.assert_not_called()


def test_custom_code_of_a_checkpoint_of_a_known_family_is_not_run(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "own.py").write_text("raise SystemExit('the checkpoint ran its code')")
    for file, its in (
        ("config.json", {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["own.Own", None]}),
    ):
        path = tmp_path / file
        path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": its}))
    assert load_model(str(tmp_path)).geometry == wrap_model(make_model(), byte_tokenizer(), "tiny").geometry


@pytest.mark.parametrize(
    ("generated", "tokenized", "stops"),
    [(7, "a", {7, 64}), ([7, 9], None, {7, 9}), (None, "a", {64}), ([None, 300, -1], None, set())],
)
def test_stop_ids_come_from_the_generation_config_and_the_tokenizer(generated, tokenized, stops) -> None:
    model, tokenizer = make_model(), byte_tokenizer()
    model.generation_config.eos_token_id, tokenizer.eos_token = generated, tokenized
    assert wrap_model(model, tokenizer, "tiny").stop_ids == stops


def test_a_loaded_models_generation_config_has_the_stop_ids(tmp_path: Path) -> None:
    settings = save(tmp_path) / "generation_config.json"
    settings.write_text(json.dumps({"eos_token_id": [9, 300]}))
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = "a"
    tokenizer.save_pretrained(tmp_path)
    assert load_model(tmp_path).model.generation_config.eos_token_id == [9, 64]


def test_a_tokenizer_without_an_eos_token_is_accepted() -> None:
    model, plain = make_model(), SimpleNamespace(get_vocab=dict, chat_template=None)
    model.generation_config.eos_token_id = 7
    assert wrap_model(model, plain, "tiny").stop_ids == {7}


def test_only_errors_of_libraries_are_reported_as_faults_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """csattn's own errors pass unchanged; those of libraries are reported as faults of the files."""
    path = str(save(tmp_path))
    for error, match in (
        (AssertionError("padding_idx"), "could not be loaded as a causal language model: padding_idx"),
        (ContextError("something else"), r"^something else"),
    ):
        monkeypatch.setattr(loader, "place", Mock(side_effect=error))
        with pytest.raises(ContextError if isinstance(error, ContextError) else ModelError, match=match):
            load_model(path, may_offload=True)


@pytest.mark.parametrize("name", ["", "  ", 5, b"model"])
def test_an_empty_or_non_string_model_name_is_refused(name: Any) -> None:
    for load in (load_model, read_config, lambda name: BuildOptions(model=name)):
        with pytest.raises(ConfigError, match=f"a .gguf file or a hub id, got {name!r}; give one, or leave it out"):
            load(name)


def test_a_model_loaded_by_relative_path_is_named_by_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    assert load_model("model").name == str(tmp_path / "model")


def test_a_directory_named_like_the_demo_model_does_not_rename_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "model")
    (tmp_path / loader.DEMO_MODEL).mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loader, "source_of", lambda name, dtype: "model")
    assert load_model().name == loader.DEMO_MODEL


@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation"])
def test_the_attention_that_a_config_asks_for_is_transformers_own(field: str, tmp_path: Path) -> None:
    """csattn attends on its own. A package may be missing here, and a hub id's code would be fetched and run."""
    config = save(tmp_path) / "config.json"
    plain = json.loads(config.read_text())
    for asked in ("flash_attention_2", "kernels-community/flash-attn3", "flex_attention", "eager"):
        config.write_text(json.dumps(plain | {field: asked}))
        got = load_model(tmp_path).model.config._attn_implementation
        assert got == ("eager" if asked == "eager" else "sdpa")


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_a_dtype_in_a_config_that_torch_does_not_have_is_refused(field: str, tmp_path: Path) -> None:
    path = save(tmp_path) / "config.json"
    config = json.loads(path.read_text())
    del config["dtype"]
    path.write_text(json.dumps(config | {field: "auto"}))
    for use in (load_model, read_config):
        with pytest.raises(
            ModelError, match=f"config.json has {field} 'auto', which is no dtype; write one of float32"
        ):
            use(str(tmp_path))


def test_use_cache_false_in_a_config_is_turned_on(tmp_path: Path) -> None:
    save(tmp_path, use_cache=False)
    (tmp_path / "generation_config.json").unlink()
    assert load_model(tmp_path).model.generation_config.use_cache


def test_a_cache_implementation_in_the_generation_config_is_dropped(tmp_path: Path) -> None:
    """With another default, transformers would refuse the cache that holds a session's request."""
    settings = save(tmp_path) / "generation_config.json"
    settings.write_text(json.dumps({"cache_implementation": "static"}))
    assert load_model(tmp_path).model.generation_config.cache_implementation is None


def test_a_model_may_be_given_as_a_path_object(tmp_path: Path) -> None:
    assert load_model(save(tmp_path / "model")).name == str(tmp_path / "model")


@pytest.mark.parametrize(
    ("device", "sentence"), [("cuda", "no CUDA device, .*; leave out the device"), ("gpu", "'gpu'")]
)
def test_an_unavailable_or_unknown_device_is_refused_before_loading(
    monkeypatch: pytest.MonkeyPatch, device: str, sentence: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=sentence):
        load_model("/no/such/dir", device=device)


def test_a_cuda_index_beyond_the_last_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="this machine has no cuda:2; the last of its CUDA devices is cuda:1"):
        load_model("/no/such/dir", device="cuda:2")
    for there in ("cuda", "cuda:1"):
        with pytest.raises(ModelError, match="there is no model"):
            load_model("/no/such/dir", device=there)


@pytest.mark.parametrize("name", ["smollm2-135m", "SmolLM2-135M"])
def test_the_name_by_which_a_service_calls_the_installed_model_is_refused_with_its_own(name: str) -> None:
    with pytest.raises(ModelError, match=f"no model at {name}; the installed model is smollm2-135m-instruct, or leave"):
        load_model(name)


def test_the_home_directory_of_an_unknown_user_is_refused_with_the_reason() -> None:
    for load in (load_model, read_config):
        with pytest.raises(ModelError, match="there is no model at ~nosuchuser9/x"):
            load("~nosuchuser9/x")


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="float8"):
        load_model("x/y", "float8")


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
