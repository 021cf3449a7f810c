"""The text model is loaded from the checkpoint of a model that also takes images."""

import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from csattn.errors import ModelError
from csattn.models import load_model
from csattn.models.loader import read_config
from csattn.models.text_part import NOT_TEXT
from csattn.models.weight_sizes import weight_bytes
from tests.tiny import byte_tokenizer, tiny_config

_IS_LINEAR = re.compile(r"((_attn|mlp|expert)\.([qkvo]|gate|up|down)_proj|in_proj_qkv|out_proj)\.weight$")
_SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_PATCHES = {"patch_size": 14, "image_size": 28}
_OF_QWEN = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}


@dataclass(frozen=True)
class Kind:
    """The sizes of a tiny model that sees images."""

    text: str  # its text model's family
    tower: dict[str, Any]
    changes: dict[str, Any] = field(default_factory=dict)  # of the text model's config


KINDS = {
    "gemma3": Kind("gemma3_text", {**_SMALL, **_PATCHES}, {"final_logit_softcapping": None}),
    "gemma4": Kind("gemma4_text", {**_SMALL, "head_dim": 8, "num_key_value_heads": 2}, {"pad_token_id": 0}),
    "kimi_k25": Kind("deepseek_v3", {**_SMALL, **_PATCHES}),
    "llama4": Kind("llama4_text", {**_SMALL, **_PATCHES}),
    "llava_next": Kind("llama", {"model_type": "clip_vision_model", **_SMALL, **_PATCHES}),
    "mistral3": Kind("mistral", {"model_type": "pixtral", **_SMALL, **_PATCHES}),
    "mistral3, latents": Kind("mistral4", {"model_type": "pixtral", **_SMALL, **_PATCHES}),
    "qwen3_5": Kind("qwen3_5_text", _OF_QWEN),
    "qwen3_5_moe": Kind("qwen3_5_moe_text", _OF_QWEN),
    "smolvlm": Kind("llama", {**_SMALL, **_PATCHES}),
}


def save(directory: Path, kind: str) -> Any:
    """Save a model of a kind as `transformers` does. Returns it, in float32."""
    of = KINDS[kind]
    text, tower = tiny_config(of.text, **of.changes).to_dict(), of.tower
    if kind == "gemma3":
        tower = {"model_type": "siglip_vision_model", **tower}
    config = type(AutoConfig.for_model(kind.partition(",")[0]))(text_config=text, vision_config=tower)
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(config).float().eval()
    whole.save_pretrained(directory)
    if kind == "kimi_k25":  # transformers calls the text model's layers blocks, published files do not
        file = directory / "model.safetensors"
        named = {re.sub(r"^(language_model.*)\.blocks\.", r"\1.layers.", x): t for x, t in load_file(file).items()}
        save_file(named, file, {"format": "pt"})
    byte_tokenizer().save_pretrained(directory)
    return whole


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_model_gives_the_logits_of_the_whole_image_model(kind: str, tmp_path: Path) -> None:
    whole, ids = save(tmp_path, kind), torch.arange(5, 45)[None]
    if kind == "llama4":
        whole = whole.language_model  # in transformers 5.24.0 the whole model reads what this one does not return
    loaded = load_model(str(tmp_path))
    assert loaded.model.config.model_type == read_config(str(tmp_path)).model_type == KINDS[kind].text
    with torch.inference_mode():
        want, got = whole(input_ids=ids).logits, loaded.model(input_ids=ids).logits
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_an_unexpected_text_tensor_in_an_image_models_checkpoint_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "gemma3")
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"language_model.model.layers.7.more": torch.zeros(1)}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"has model\.layers\.7\.more, which a model with its config does not have"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_weights_of_an_image_models_text_part_are_read_and_kept(kind: str, tmp_path: Path) -> None:
    """All weights equal those of the decoded checkpoint; the text model's linear layers keep their quantized form."""
    whole = save(plain := tmp_path / "plain", kind)
    state = load_file(plain / "model.safetensors")
    linears = [n for n in state if _IS_LINEAR.search(n) and not NOT_TEXT.match(n)]
    coded = dict(state)
    for name in linears:
        scales = torch.linspace(0.01, 0.02, -(-len(state[name]) // 8))[:, None]  # one for 8 whole rows each
        scale = scales.repeat_interleave(8, 0)[: len(state[name])]
        numbers = (state[name] / scale).to(torch.float8_e4m3fn)
        coded |= {name: numbers, name.replace("weight", "weight_scale_inv"): scales}
        state[name] = numbers.float() * scale
    save_file(state, plain / "model.safetensors", {"format": "pt"})
    shutil.copytree(plain, few := tmp_path / "few")
    save_file(coded, few / "model.safetensors", {"format": "pt"})
    whole.config.quantization_config = {"quant_method": "fp8", "weight_block_size": [8, 1024]}
    whole.config.eos_token_id = [7, 9]
    whole.config.save_pretrained(few)
    (few / "generation_config.json").unlink(missing_ok=True)
    got, want = load_model(str(few), "bfloat16"), load_model(str(plain), "bfloat16")
    assert linears and got.fingerprint == want.fingerprint
    assert got.stop_ids >= {7, 9}
    for name, tensor in want.model.state_dict().items():
        assert torch.equal(got.model.state_dict()[name], tensor), name
    kept = [name for name, module in got.model.named_modules() if hasattr(module, "quantized")]
    assert len(kept) == len([name for name in linears if "in_proj" not in name or "qkv" in name])


def test_modules_to_not_convert_are_named_as_in_the_whole_image_model(tmp_path: Path) -> None:
    whole = save(tmp_path, "qwen3_5")
    sizes = []
    for left_out in ([], ["model.language_model.layers.1.self_attn.q_proj", "model.visual"]):
        whole.config.quantization_config = {"quant_method": "fbgemm_fp8", "modules_to_not_convert": left_out}
        whole.config.save_pretrained(tmp_path)
        sizes.append(weight_bytes(read_config(str(tmp_path)), 2).on_gpu)
    assert sizes[0] != sizes[1]


@pytest.mark.parametrize(
    ("template", "is_used"),
    [
        ("{{ messages[0].content }}", True),
        ("{% for part in messages[0].content if part.type == 'text' %}{{ part.text }}{% endfor %}", False),
        ("{{ raise_exception('no') }}", False),
    ],
)
def test_a_chat_template_of_the_processor_is_the_models_if_it_writes_texts(template, is_used, tmp_path: Path) -> None:
    save(tmp_path, "mistral3")
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert load_model(tmp_path).tokenizer.chat_template == (template if is_used else None)


def test_whether_embeddings_are_tied_may_be_in_the_text_models_config_only(tmp_path: Path) -> None:
    config = AutoConfig.for_model("qwen2_audio", text_config=tiny_config("qwen2").to_dict())
    assert not hasattr(config, "tie_word_embeddings")
    config.save_pretrained(tmp_path)
    assert read_config(str(tmp_path)).tie_word_embeddings == config.text_config.tie_word_embeddings
