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

from csattn.build_options import BuildOptions
from csattn.errors import ConfigError, ContextError, ModelError
from csattn.models import load_model, loader
from csattn.models.families import FAMILIES
from csattn.models.loader import read_config, wrap_model
from tests.tiny import CHAT_TEMPLATE, byte_tokenizer, make_model, save


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
