"""`csattn stream` as a user runs it."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import byte_tokenizer, save
from tests.workers.test_cli import in_process, result_of
from workers.words import printable


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("stream") / "model")


@pytest.mark.parametrize(("policy", "kept"), [("window", "--sink-len"), ("h2o", "--heavy-len")])
def test_stream_continues_a_text_beyond_its_window(capsys, model, policy, kept) -> None:
    asked = "stream", "--prompt", "the tide is high", "--model", model, "--policy", policy, kept, 4
    asked += "--window-len", 12, "--max-new-tokens", 50
    done, result = in_process(*asked, capsys=capsys), result_of(in_process(*asked, "--json", capsys=capsys))
    assert (result["policy"], result["prompt_len"], result["num_new_tokens"]) == (policy, 16, 50)
    assert (result["ended"], result["max_rows"]) == ("max_new_tokens", 16)
    assert done.stdout == f"{printable(result['text'])}\n"
    assert printable(result["text"]) != result["text"], "a model of bytes gives orders to terminals, too"
    assert "50 tokens after 16" in done.stderr


def test_a_short_stream_equals_generate(capsys, model) -> None:
    """No row has been evicted, so the policies and full attention agree; the prompt may come from standard input."""
    said = []
    for policy in ("window", "h2o"):
        done = in_process(
            "stream", "--prompt", "-", "--model", model, "--policy", policy, "--window-len", 60,
            "--max-new-tokens", 12, capsys=capsys, stdin=b"the tide",
        )  # fmt: skip
        said.append(done.stdout)
    tokenizer = byte_tokenizer()
    ids = torch.tensor([tokenizer("the tide").input_ids])
    plain = AutoModelForCausalLM.from_pretrained(model)
    whole = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert said == 2 * [printable(tokenizer.decode(whole[0, 8:])) + "\n"]


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (["--prompt", "x", "--policy", "lru"], 1, "unknown policy 'lru'"),
        (["--prompt", "x", "--policy", "h2o", "--sink-len", "4"], 1, "--sink-len has no meaning for --policy h2o"),
        (["--prompt", "x", "--heavy-len", "4"], 1, "--heavy-len has no meaning for --policy window"),
        (["--prompt", "x", "--window-len", "0"], 1, "window_len must be at least 1, got 0"),
        (["--prompt", "x", "--window-len", "4000"], 1, "the model has 1024"),
        (["--prompt", ""], 1, "--prompt holds no text"),
        (["--prompt", "-"], 1, "holds no text"),
        (["--prompt", "x", "--max-new-tokens", "0"], 2, "max-new-tokens"),
        ([], 2, "--prompt"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_exits_with_a_code_and_the_reason(capsys, model, arguments, exit_code, words) -> None:
    done = in_process("stream", *arguments, "--model", model, "--json", capsys=capsys, stdin=b" \n")
    assert done.returncode == exit_code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert words in json.loads(done.stdout)["error"]["message"]
