"""Tokenizers of GGUF files split text, and end turns, as the files say."""

from pathlib import Path
from typing import Any

import pytest

from csattn.models import load_model
from csattn.models.gguf_tokenizer import end_ids
from tests.models.gguf_files import gguf_of, write_gguf
from tests.tiny import make_model


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
