"""Contexts and questions with tokenizers that put a space before words, as those of older Llamas and Mistrals do."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from csattn.config import preset
from csattn.errors import ArtifactMismatchError, ContextError, ModelError
from csattn.models.prompt import (
    MIN_CONTEXT_LEN,
    choose_wrapping,
    context_ids,
    conversation_ids,
    num_special,
    question_ids,
    require_indexable,
)
from tests.tiny import loaded

MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
)
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set said = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set said = '' %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if m['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + (said if loop.first else '') + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}\n{% endif %}"
)
TEXT = "A lamp , lit .\n\n  It burns  <s> twice</s> at  night."


def spaced_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer like theirs, which puts a space before each piece of text between special tokens."""
    words = ["<unk>", "<s>", "</s>", "\u2581", *(chr(code) for code in range(33, 127))]
    vocab = {word: i for i, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = template
    return fast


@pytest.mark.parametrize(
    ("template", "wrapping"), [(MISTRAL, "user"), (LLAMA_2, "system"), (ZEPHYR, "system")], ids=["1", "2", "3"]
)
@pytest.mark.parametrize("text", [TEXT, "A lamp.", "It ends with <s>", "and with </s> again"])
def test_context_and_question_tokens_equal_those_of_the_whole_conversation(template, wrapping, text) -> None:
    tokenizer = spaced_tokenizer(template)
    assert choose_wrapping(tokenizer) == wrapping
    prefix = context_ids(tokenizer, text, wrapping)
    for question in ("who lit it?", " who ?", ""):
        if wrapping == "user":
            messages = [{"role": "user", "content": f"{text}\n{question}"}]
        else:
            messages = [{"role": "system", "content": text}, {"role": "user", "content": question}]
        conversation = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        whole = tokenizer(conversation, add_special_tokens=False).input_ids
        assert prefix.tolist() + question_ids(tokenizer, prefix, question, wrapping).tolist() == whole


def test_special_tokens_in_a_text_are_counted() -> None:
    tokenizer = spaced_tokenizer(ZEPHYR)
    assert num_special(tokenizer, TEXT) == 2 and num_special(tokenizer, "A lamp < s>.") == 0
    tokenizer.add_special_tokens({"additional_special_tokens": ["<s>|", "a.c"]})
    assert num_special(tokenizer, "<s>| abc a.c <s>") == 3, "the longest of those that begin alike, letter by letter"
    ids = context_ids(tokenizer, "<s>| abc a.c <s>", "none").tolist()
    assert sum(i in tokenizer.all_special_ids and i != tokenizer.unk_token_id for i in ids) == 3


def test_special_tokens_with_a_common_prefix_are_counted() -> None:
    tokenizer = spaced_tokenizer(ZEPHYR)
    reserved = [f"<|r_{number}|>" for number in range(30)]
    tokenizer.add_special_tokens({"additional_special_tokens": [*reserved, "<|r_1", "<|r"]})
    assert num_special(tokenizer, "".join(reserved)) == 30
    assert num_special(tokenizer, "<|r_12|>, <|r_12, <|r_2, <|, <|r_") == 4


def test_a_conversation_that_begins_with_an_answer_is_refused_for_user_wrapping() -> None:
    tokenizer = spaced_tokenizer(MISTRAL)
    prefix, ending = context_ids(tokenizer, TEXT, "user"), {"continue_final_message": True}
    with pytest.raises(ArtifactMismatchError, match="these messages have none"):
        conversation_ids(tokenizer, prefix, [{"role": "assistant", "content": "It"}], "user", None, ending)
    turns = [{"role": "assistant", "content": "Ask me."}, {"role": "user", "content": "Who?"}]
    with pytest.raises(ArtifactMismatchError, match="these messages have none before the assistant's; send one"):
        conversation_ids(tokenizer, prefix, turns, "user")


def test_a_context_that_tokenises_differently_before_a_question_is_refused() -> None:
    """Here the decoder changes L to l, so the decoded context is another text."""
    tokenizer = spaced_tokenizer(ZEPHYR.replace("eos_token", "''"))
    tokenizer.backend_tokenizer.decoder = decoders.Replace("L", "l")
    assert len(context_ids(tokenizer, "a Lamp", "none"))
    with pytest.raises(ModelError, match="splits this context differently when a question follows it"):
        context_ids(tokenizer, "a Lamp", "system")


def test_contexts_are_indexable_from_the_least_length_to_one_below_the_models_positions() -> None:
    model, config = loaded(), preset("default")
    most, vocab_size = model.geometry.max_positions, model.geometry.vocab_size
    for context_len in (MIN_CONTEXT_LEN, most - 1):
        require_indexable(np.full(context_len, vocab_size - 1, np.int32), config, model)
    for context_len, token_id, words in (
        (MIN_CONTEXT_LEN - 1, 0, "an index needs at least 256"),
        (most, 0, f"the context has {most} tokens"),
        (MIN_CONTEXT_LEN, vocab_size, f"has the token id {vocab_size}"),
    ):
        with pytest.raises(ContextError, match=words):
            require_indexable(np.full(context_len, token_id, np.int32), config, model)
