"""Models: what is refused and how, what tells one from another, and how text becomes a shared prefix."""

import hashlib
import json
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transformers
from tokenizers import processors

from bench.accuracy.attending.rotation import rotate_for
from csattn.build_options import BuildOptions
from csattn.errors import ArtifactMismatchError, ConfigError, ContextError, ModelError
from csattn.models import load_model, loader
from csattn.models.families import FAMILIES, describe, stretch_positions
from csattn.models.loader import _step, read_config, wrap_model
from csattn.models.prompt import choose_wrapping, context_ids, question_ids
from csattn.models.query import queries_before_rope
from csattn.models.rope import model_frequencies
from index_build.capture import prefill
from tests.tiny import ALL_FAMILIES, CHAT_TEMPLATE, byte_tokenizer, loaded, make_model, save, tiny_config, token_ids


@pytest.mark.parametrize(
    ("family", "changes", "match"),
    [
        ("mistral", {"sliding_window": 128}, "every layer of this model attends through a sliding window"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 128}, "every layer of this model"),
        ("ministral", {"layer_types": 3 * ["sliding_attention"]}, "every layer of this model"),
        (
            "qwen2",
            {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
            "linear attention of a kind that",
        ),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        ("llama", {"model_type": "deepseek_v4"}, "'deepseek_v4' is not supported: its layers attend to rows made of"),
        ("llama", {"model_type": "olmo"}, "'olmo' is not supported: its norms have no weights"),
        ("gemma4_text", {"num_kv_shared_layers": 3}, "no full_attention layer before them has any"),
        (
            "gemma4_text",
            {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 200},
            "embeddings of some tokens alone",
        ),
        ("gemma4_text", {"per_layer_config": {1: {"head_dim": 24}}}, "that see as far have different heads"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "clamped in a way of their own"),
        ("olmoe", {"clip_qkv": 8.0}, "clips queries"),
        ("cohere", {"use_qk_norm": True}, "by weights of its own"),
        ("ernie4_5_moe", {"moe_norm_min": 0.9}, r"by no less than 0\.9 \(moe_norm_min\), .* is 1e-06 at most"),
        ("ernie4_5_moe", {"moe_norm_min": float("nan")}, "by no less than nan"),
        ("deepseek_v3", {"n_group": 5}, "3 of 12 experts, of 2 of 5 groups"),
        ("dots1", {"n_group": 12}, "of 2 of 12 groups"),
        ("glm4_moe", {"topk_group": 0}, "of 0 of 4 groups"),
        ("solar_open", {"topk_group": 1, "num_experts_per_tok": 4}, "4 of 12 experts, of 1 of 4 groups"),
        ("qwen3_next", {"hidden_act": "gelu_pytorch_tanh"}, "linear attention has the activation 'gelu_pytorch_tanh'"),
        ("llama", {"model_type": "t5"}, "'t5' is not supported; csattn reproduces arcee"),
        ("llama", {"hidden_act": "gelu"}, "activation 'gelu', which csattn does not compute"),
        ("hyperclovax", {"use_post_norm": False}, "no norms behind attention and MLP"),
        ("phi3", {"sliding_window": 64}, "every layer"),
        ("gemma", {"use_bidirectional_attention": True}, "later tokens"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "later tokens"),
    ],
)
def test_attention_that_would_come_out_wrong_is_refused(family, changes, match) -> None:
    config = tiny_config(family, **{name: value for name, value in changes.items() if name != "model_type"})
    if "model_type" in changes:
        config.model_type = changes["model_type"]
    with pytest.raises(ModelError, match=match):
        describe(config)


def test_a_window_that_is_as_long_as_all_positions_is_none() -> None:
    """As Ministral 8B's, and Phi-3's of 128K."""
    for family, window in (("mistral", 1024), ("mixtral", 4096), ("phi3", 262144)):
        assert len(describe(tiny_config(family, sliding_window=window)).indexed_layers) == 3


def test_numbers_that_streams_are_multiplied_by_are_of_a_models_identity(tmp_path: Path) -> None:
    first = load_model(str(save(tmp_path, "gemma4_text")))
    assert first.fingerprint == load_model(str(tmp_path)).fingerprint
    first.model.model.layers[1].layer_scalar += 0.1
    assert wrap_model(first.model, first.tokenizer, "other").fingerprint != first.fingerprint


def test_a_saved_model_loads_with_its_identity(tmp_path: Path) -> None:
    first, second = load_model(str(save(tmp_path / "a"))), load_model(str(save(tmp_path / "b", seed=1)))
    again = load_model(str(tmp_path / "a"))
    assert first.fingerprint == again.fingerprint != second.fingerprint
    assert first.tokenizer_hash == again.tokenizer_hash
    assert first.geometry == again.geometry
    assert load_model(str(tmp_path / "a"), "bfloat16").fingerprint != first.fingerprint


def test_bars_of_other_loads_are_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a `load_model` transformers showed none in this process any more."""
    shows, had_bars = transformers.utils.logging, transformers.utils.logging.is_progress_bar_enabled()
    resolve, meanwhile = loader._resolve, []
    monkeypatch.setattr(
        loader, "_resolve", lambda *of: meanwhile.append(shows.is_progress_bar_enabled()) or resolve(*of)
    )
    try:
        for turn in (shows.enable_progress_bar, shows.disable_progress_bar):
            turn()
            load_model(save(tmp_path))
            assert shows.is_progress_bar_enabled() == (turn is shows.enable_progress_bar)
    finally:
        (shows.enable_progress_bar if had_bars else shows.disable_progress_bar)()
    assert meanwhile == [False, False]


def test_a_chat_template_or_a_token_that_comes_after_loading_counts(tmp_path: Path) -> None:
    model = load_model(str(save(tmp_path)))
    before = model.tokenizer_hash
    model.tokenizer.chat_template = "<turn>" + CHAT_TEMPLATE
    with_template = model.tokenizer_hash
    model.tokenizer.add_tokens(["<turn>"])
    assert len({before, with_template, model.tokenizer_hash}) == 3
    assert load_model(str(tmp_path)).tokenizer_hash == before


def test_a_tokenizer_that_says_to_strip_spaces_does_not(tmp_path: Path) -> None:
    """transformers would not either, and warn at the first answer."""
    told = save(tmp_path) / "tokenizer_config.json"
    told.write_text(json.dumps({**json.loads(told.read_text()), "clean_up_tokenization_spaces": True}))
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
def test_a_model_that_is_not_there_is_named_in_one_sentence(tmp_path: Path, name: str, match: str) -> None:
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    (tmp_path / "short.gguf").write_bytes(b"GGUF")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=match) as raised:
        load_model(name.format(tmp=tmp_path))
    assert "\n" not in str(raised.value)


def test_a_family_that_an_older_transformers_lacks_is_told_of(tmp_path, monkeypatch) -> None:
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
def test_a_damaged_model_is_told_of_in_one_sentence(
    tmp_path: Path, file: str, text: str | dict[str, object], match: str
) -> None:
    """Libraries raise anything over it."""
    path = save(tmp_path) / file
    path.write_text(text if isinstance(text, str) else json.dumps(json.loads(path.read_text()) | text))
    with pytest.raises(ModelError, match=match) as raised:
        load_model(str(tmp_path))
    assert "\n" not in str(raised.value)


def test_a_model_with_an_adapter_in_its_layers_is_refused() -> None:
    """As peft puts it around them."""
    model = make_model()
    attention = model.model.layers[1].self_attn
    attention.q_proj = torch.nn.ModuleDict({"base_layer": attention.q_proj})
    with pytest.raises(ModelError, match=r"tuned has an adapter in its layers, .*; merge it into its model"):
        wrap_model(model, byte_tokenizer(), "tuned")


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_of_a_checkpoint_is_not_asked_for(tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked = save(tmp_path) / file, Mock(return_value="y")
    its = {"auto_map": {"AutoConfig": "own.Own", "AutoTokenizer": ["own.Own", None]}}
    its["tokenizer_class" if file == "tokenizer_config.json" else "model_type"] = "Own"
    path.write_text(json.dumps(json.loads(path.read_text()) | its))
    monkeypatch.setattr("builtins.input", asked)
    with pytest.raises(ModelError):
        load_model(str(tmp_path))
    asked.assert_not_called()


@pytest.mark.parametrize(
    ("generated", "tokenized", "stops"),
    [(7, "a", {7, 64}), ([7, 9], None, {7, 9}), (None, "a", {64}), ([None, 300, -1], None, set())],
)
def test_a_turn_ends_by_the_generation_config_and_by_the_tokenizer(generated, tokenized, stops) -> None:
    model, tokenizer = make_model(), byte_tokenizer()
    model.generation_config.eos_token_id, tokenizer.eos_token = generated, tokenized
    assert wrap_model(model, tokenizer, "tiny").stop_ids == stops


def test_what_generates_from_python_ends_there_too(tmp_path: Path) -> None:
    told = save(tmp_path) / "generation_config.json"
    told.write_text(json.dumps({"eos_token_id": [9, 300]}))
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = "a"
    tokenizer.save_pretrained(tmp_path)
    assert load_model(tmp_path).model.generation_config.eos_token_id == [9, 64]


def test_a_tokenizer_may_know_no_end() -> None:
    model, plain = make_model(), SimpleNamespace(get_vocab=dict, chat_template=None)
    model.generation_config.eos_token_id = 7
    assert wrap_model(model, plain, "tiny").stop_ids == {7}


def test_what_is_refused_is_no_fault_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes as it is; what libraries raise over a file is told as the file's fault."""
    path = str(save(tmp_path))
    for error, match in (
        (AssertionError("padding_idx"), "could not be loaded as a causal language model: padding_idx"),
        (ContextError("something else"), r"^something else"),
    ):
        monkeypatch.setattr(loader, "place", Mock(side_effect=error))
        with pytest.raises(ContextError if isinstance(error, ContextError) else ModelError, match=match):
            load_model(path, may_lend=True)


@pytest.mark.parametrize("name", ["", "  ", 5, b"model"])
def test_a_name_that_is_none_is_not_the_demo_model(name: Any) -> None:
    for load in (load_model, read_config, lambda name: BuildOptions(model=name)):
        with pytest.raises(ConfigError, match=f"a .gguf file or a hub id, got {name!r}; give one, or leave it out"):
            load(name)


def test_an_artifact_of_a_model_in_a_directory_is_asked_from_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    assert load_model("model").name == str(tmp_path / "model")


def test_the_demo_model_is_no_directory_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "model")
    (tmp_path / loader.DEMO_MODEL).mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loader, "_resolve", lambda name, dtype: "model")
    assert load_model().name == loader.DEMO_MODEL


def test_a_cache_that_training_left_off_is_on(tmp_path: Path) -> None:
    save(tmp_path, use_cache=False)
    (tmp_path / "generation_config.json").unlink()
    assert load_model(tmp_path).model.generation_config.use_cache


def test_no_other_cache_is_a_models_default(tmp_path: Path) -> None:
    """transformers would not take a session's request beside it."""
    told = save(tmp_path) / "generation_config.json"
    told.write_text(json.dumps({"cache_implementation": "static"}))
    assert load_model(tmp_path).model.generation_config.cache_implementation is None


def test_a_model_may_be_named_by_its_path(tmp_path: Path) -> None:
    assert load_model(save(tmp_path / "model")).name == str(tmp_path / "model")


@pytest.mark.parametrize(
    ("device", "sentence"), [("cuda", "no CUDA device, .*; leave out the device"), ("gpu", "'gpu'")]
)
def test_a_device_that_is_not_there_is_refused_before_a_load(
    monkeypatch: pytest.MonkeyPatch, device: str, sentence: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=sentence):
        load_model("/no/such/dir", device=device)


def test_of_some_devices_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="this machine has no cuda:2; the last of its CUDA devices is cuda:1"):
        load_model("/no/such/dir", device="cuda:2")
    for there in ("cuda", "cuda:1"):
        with pytest.raises(ModelError, match="there is no model"):
            load_model("/no/such/dir", device=there)


def test_a_home_that_nobody_has_is_a_sentence() -> None:
    for load in (load_model, read_config):
        with pytest.raises(ModelError, match="there is no model at ~nosuchuser9/x"):
            load("~nosuchuser9/x")


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="float8"):
        load_model("x/y", "float8")


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"hidden_act": "relu"}),
        ("llama", {"rms_norm_eps": 1e-2}),
        ("llama", {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}),
        ("smollm3", {"no_rope_layers": [1, 1, 0]}),
    ],
)
def test_what_weights_do_not_tell_changes_the_fingerprint(family, changes) -> None:
    """A config.json that is corrected makes another model, also where each tensor is as it was."""
    before, after = make_model(family), make_model(family, **changes)
    after.load_state_dict(before.state_dict())
    assert wrap_model(after, byte_tokenizer(), "x").fingerprint != wrap_model(before, byte_tokenizer(), "x").fingerprint


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_moe"])
def test_how_many_positions_there_are_does_not_change_the_fingerprint(family: str) -> None:
    """KV does not depend on it."""
    before, after = make_model(family), make_model(family, max_position_embeddings=2048)
    after.load_state_dict(before.state_dict())
    assert wrap_model(after, byte_tokenizer(), "x").fingerprint == wrap_model(before, byte_tokenizer(), "x").fingerprint


def test_a_change_of_one_tensor_changes_the_fingerprint() -> None:
    model = make_model()
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight += 1e-3
    assert wrap_model(model, byte_tokenizer(), "x").fingerprint != loaded().fingerprint


@pytest.mark.parametrize("shape", [(64, 512), (576, 576), (192, 576), (320, 960), (4096, 14336), (8, 128, 96)])
def test_a_fingerprint_looks_at_every_input_and_few_values(shape: tuple[int, ...]) -> None:
    at = np.arange(0, prod(shape), _step(shape))
    assert len({*(at % shape[-1])}) == shape[-1] and len(at) < 1.2 * max(4096, shape[-1])


def test_a_bias_by_which_experts_are_chosen_changes_the_fingerprint() -> None:
    """A buffer of most families: it is no parameter."""
    model = make_model("minimax_m2")
    model.model.layers[1].mlp.e_score_correction_bias += 0.1
    assert wrap_model(model, byte_tokenizer(), "x").fingerprint != loaded("minimax_m2").fingerprint


def test_fields_of_other_families_are_not_heeded() -> None:
    """A config may carry any field; what a family's model does not look at changes nothing."""
    stray = {"query_pre_attn_scalar": 7, "residual_multiplier": 0.1, "no_rope_layers": [0, 0, 0], "logits_scaling": 9.0}
    config = tiny_config("llama")
    before = describe(config)
    for name, value in stray.items():
        setattr(config, name, value)
    assert describe(config) == before


def test_a_layer_without_rope_is_described_as_such() -> None:
    def ropes(family: str, **changes: object) -> list[int | None]:
        return [layer.attention.rope for layer in describe(tiny_config(family, **changes)).layers]

    assert ropes("smollm3") == [0, None, 0]
    assert ropes("exaone4") == ropes("cohere2") == [0, None, 0]  # of those, others are local
    assert ropes("exaone4", sliding_window=None, layer_types=3 * ["full_attention"]) == [0, 0, 0]
    assert ropes("gemma3_text") == [0, 1, 1]  # as they are named in its config


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_queries_of_a_layers_own_input_are_the_captured_ones(family: str) -> None:
    model, ids = make_model(family), torch.from_numpy(token_ids(40)).long()
    for capture, _ in prefill(model, ids):
        if capture.state is not None or not capture.q.shape[1]:
            continue  # a layer without queries, or of latents
        layer = model.model.layers[capture.layer_idx]
        with torch.no_grad():
            q = queries_before_rope(layer, capture.hidden_in)
            q = rotate_for(model.model, capture.layer_idx, q, torch.arange(40))
        torch.testing.assert_close(q, capture.q, rtol=1e-4, atol=1e-4)


USER_ONLY = (
    "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('no') }}{% endif %}"
    "<{{ m.content }}>{% endfor %}"
)
QUESTION_FIRST = "{{ messages[-1].content[-1] }}{% for m in messages %}<{{ m.content }}>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "wrapping"), [(None, "none"), (USER_ONLY, "user")], ids=["no template", "no system role"]
)
def test_the_wrapping_follows_the_template(template: str | None, wrapping: str) -> None:
    tokenizer = byte_tokenizer(template)
    assert choose_wrapping(tokenizer) == wrapping
    prefix = context_ids(tokenizer, "a long text", wrapping)
    rest = question_ids(tokenizer, prefix, "why?", wrapping)
    assert "a long text" in tokenizer.decode(prefix)
    assert "why?" in tokenizer.decode(rest)
    assert tokenizer.decode(np.concatenate([prefix, rest])).count("why?") == 1


def test_no_chat_leaves_the_text_alone() -> None:
    tokenizer = byte_tokenizer()
    assert choose_wrapping(tokenizer) == "system"
    assert choose_wrapping(tokenizer, chat=False) == "none"
    assert tokenizer.decode(context_ids(tokenizer, " as it is ", "none")) == " as it is "


def test_an_end_that_the_tokenizer_adds_is_no_part_of_a_context() -> None:
    tokenizer = byte_tokenizer(None)
    tokenizer.eos_token = "a"
    end = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A a", special_tokens=[("a", end)]
    )
    assert tokenizer("bcd").input_ids[-1] == end
    assert tokenizer.decode(context_ids(tokenizer, "bcd", "none")) == "bcd"
    assert context_ids(tokenizer, "bca", "none")[-1] == end


@pytest.mark.parametrize(
    ("template", "match"),
    [
        (QUESTION_FIRST, "does not write the context as it is, once, before the question"),
        (
            "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ messages[-1]['role'] }}"
            "{% for m in messages %}{{ m['content'] }}{% endfor %}",
            "does not write the context as it is, once, before the question",
        ),
        ("{{ raise_exception('never') }}", r"cannot be used \(never\)"),
    ],
)
def test_a_template_that_no_context_can_stand_in_is_refused(template: str, match: str) -> None:
    with pytest.raises(ModelError, match=f"template {match}.*--no-chat"):
        choose_wrapping(byte_tokenizer(template))


def test_a_template_that_wants_a_question_has_the_context_as_its_system_message() -> None:
    """As Qwen 3.5's."""
    wanted = "{% if messages[-1].role == 'system' %}{{ raise_exception('No user query found') }}{% endif %}"
    tokenizer, plain = byte_tokenizer(wanted + CHAT_TEMPLATE), byte_tokenizer()
    assert choose_wrapping(tokenizer) == "system"
    prefix = context_ids(tokenizer, "a long text", "system")
    assert prefix.tolist() == context_ids(plain, "a long text", "system").tolist()
    rest = question_ids(tokenizer, prefix, "why?", "system")
    assert rest.tolist() == question_ids(plain, prefix, "why?", "system").tolist()


def test_a_question_that_changes_the_contexts_tokens_is_refused() -> None:
    class Merging:
        """A tokenizer whose tokens depend on what follows."""

        chat_template = "x"
        added_tokens_decoder: ClassVar[dict[int, object]] = {}

        def apply_chat_template(self, messages, **options):
            return "".join(f"[{m['content']}]" for m in messages)

        def __call__(self, text, add_special_tokens=True):
            digest = hashlib.sha256(text.encode()).digest()
            return type("Encoding", (), {"input_ids": list(digest)})

        def decode(self, ids):
            return "[context]"

    with pytest.raises(ArtifactMismatchError, match="change the tokens"):
        question_ids(Merging(), np.array([1, 2, 3], dtype=np.int32), "why?", "system")


def test_an_empty_continuation_is_refused() -> None:
    with pytest.raises(ModelError, match="empty"):
        question_ids(byte_tokenizer(None), np.array([1], dtype=np.int32), "", "none")


def test_positions_can_be_stretched(tmp_path) -> None:
    source = str(save(tmp_path / "a"))
    plain, stretched = load_model(source), load_model(source, stretch=4)
    assert stretched.geometry.max_positions == 4 * plain.geometry.max_positions
    assert stretched.fingerprint != plain.fingerprint == load_model(source, stretch=1).fingerprint
    frequencies, factor = model_frequencies(stretched.model.model.rotary_emb)
    before, _ = model_frequencies(plain.model.model.rotary_emb)
    # the fastest pair turns as before, the slowest a quarter as fast, and logits are sharpened a little
    torch.testing.assert_close(frequencies[0], before[0])
    torch.testing.assert_close(frequencies[-1], before[-1] / 4)
    assert factor > 1
    for factor in (0.5, float("inf")):
        with pytest.raises(ModelError, match="stretched by a factor of 1 to 1024, got"):
            load_model(source, stretch=factor)


def test_positions_that_yarn_was_added_for_are_the_models() -> None:
    """As Qwen 2.5's and 3's cards say: the field stays as it is."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
    for most, positions in ((640, 2048), (2048, 2048), (4096, 4096)):
        config = tiny_config("qwen3", rope_parameters=yarn, max_position_embeddings=most)
        assert describe(config).max_positions == positions


def test_stretched_positions_are_not_stretched_again() -> None:
    config = tiny_config("llama", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(ModelError, match="scaled by 'linear' already"):
        stretch_positions(config, 2.0)
