"""A text becomes a prefix that questions share: in the model's chat template, or unchanged."""

import hashlib
from typing import ClassVar

import numpy as np
import pytest
from tokenizers import processors

from csattn.errors import ArtifactMismatchError, ModelError
from csattn.models.prompt import choose_wrapping, context_ids, question_ids
from tests.tiny import CHAT_TEMPLATE, byte_tokenizer

USER_ONLY = (
    "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('no') }}{% endif %}"
    "<{{ m.content }}>{% endfor %}"
)
QUESTION_FIRST = "{{ messages[-1].content[-1] }}{% for m in messages %}<{{ m.content }}>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "wrapping"), [(None, "none"), (USER_ONLY, "user")], ids=["no template", "no system role"]
)
def test_the_chosen_wrapping_is_one_that_the_chat_template_accepts(template: str | None, wrapping: str) -> None:
    tokenizer = byte_tokenizer(template)
    assert choose_wrapping(tokenizer) == wrapping
    prefix = context_ids(tokenizer, "a long text", wrapping)
    rest = question_ids(tokenizer, prefix, "why?", wrapping)
    assert "a long text" in tokenizer.decode(prefix)
    assert "why?" in tokenizer.decode(rest)
    assert tokenizer.decode(np.concatenate([prefix, rest])).count("why?") == 1


def test_without_chat_the_text_is_unchanged() -> None:
    tokenizer = byte_tokenizer()
    assert choose_wrapping(tokenizer) == "system"
    assert choose_wrapping(tokenizer, chat=False) == "none"
    assert tokenizer.decode(context_ids(tokenizer, " as it is ", "none")) == " as it is "


def test_an_eos_token_that_the_tokenizer_appends_is_removed_from_a_context() -> None:
    tokenizer = byte_tokenizer(None)
    tokenizer.eos_token = "a"
    end = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A a", special_tokens=[("a", end)]
    )
    assert tokenizer("bcd").input_ids[-1] == end
    assert tokenizer.decode(context_ids(tokenizer, "bcd", "none")) == "bcd"
    assert context_ids(tokenizer, "bca", "none")[-1] == end


def test_a_question_without_chat_gets_no_special_tokens() -> None:
    tokenizer = byte_tokenizer(None)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="a $A", special_tokens=[("a", tokenizer("a").input_ids[0])]
    )
    prefix = context_ids(tokenizer, "bcd", "none")
    assert tokenizer.decode(prefix) == "abcd"
    assert tokenizer.decode(question_ids(tokenizer, prefix, "efg", "none")) == "efg"


@pytest.mark.parametrize(
    ("template", "match"),
    [
        (QUESTION_FIRST, "does not write the unchanged context exactly once before the question"),
        (
            "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ messages[-1]['role'] }}"
            "{% for m in messages %}{{ m['content'] }}{% endfor %}",
            "does not write the unchanged context exactly once before the question",
        ),
        ("{{ raise_exception('never') }}", r"cannot be used \(never\)"),
    ],
)
def test_a_chat_template_that_cannot_hold_a_context_is_refused(template: str, match: str) -> None:
    with pytest.raises(ModelError, match=f"template {match}.*--no-chat"):
        choose_wrapping(byte_tokenizer(template))


def test_a_chat_template_that_requires_a_question_takes_the_context_as_system_message() -> None:
    """Qwen 3.5's template raises an error without a question."""
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


def test_an_empty_question_without_chat_is_refused() -> None:
    with pytest.raises(ModelError, match="empty"):
        question_ids(byte_tokenizer(None), np.array([1], dtype=np.int32), "", "none")
