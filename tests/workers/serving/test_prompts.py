"""Messages become the token ids that the chat template puts after a context, or are refused with the reason."""

import errno
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from csattn.artifact import open_artifact
from csattn.models.prompt import context_ids, conversation_ids, question_ids
from tests.tiny import byte_tokenizer, loaded
from tests.workers.serving.artifacts import text_of
from workers.serving import prompts
from workers.serving.context_file import ContextFile
from workers.serving.messages import Ask, BadRequestError, ContextTooLongError, Sampling, Turn
from workers.serving.prompts import prompt_ids, room_for

TOKENIZER = loaded().tokenizer
# this template has no system role, and trims messages
STRICT = (
    "{% for message in messages %}{% if message['role'] not in ['user', 'assistant'] %}"
    "{{ raise_exception('only user and assistant') }}{% endif %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('take turns') }}{% endif %}"
    "<{{ message['role'] }}>{{ message['content'] | trim }}{% endfor %}<assistant>"
)


def ask(*turns: tuple[str, str], prompt: str | None = None, max_new_tokens: int = 5) -> Ask:
    said = tuple(Turn(role, content) for role, content in turns)  # type: ignore[arg-type]
    return Ask(
        request_id="1", context="heron", turns=said, prompt=prompt, sampling=Sampling(max_new_tokens=max_new_tokens)
    )


@pytest.fixture
def artifact(built: Path):
    with open_artifact(built / str(ContextFile(built).read()["heron"].artifact_id)) as opened:
        yield opened


@pytest.fixture
def bare(built: Path):
    with open_artifact(built / str(ContextFile(built).read()["bare"].artifact_id)) as opened:
        yield opened


def whole_ids(messages: list[dict[str, str]]) -> list[int]:
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return TOKENIZER(text, add_special_tokens=False).input_ids  # type: ignore[no-any-return]


def test_one_user_message_has_the_token_ids_of_the_command_line(artifact, bare) -> None:
    for opened, wrapping in ((artifact, "system"), (bare, "none")):
        want = question_ids(TOKENIZER, opened.token_ids, "who is it?", wrapping).tolist()
        assert prompt_ids(TOKENIZER, opened, ask(("user", "who is it?"))) == want


@pytest.mark.parametrize(
    "turns",
    [
        [("user", "who?")],
        [("user", "who?"), ("assistant", "a heron"), ("user", "really?")],
        [("system", "be brief"), ("user", "who?")],
        [("user", "⟨context⟩"), ("assistant", "⟨context⟩ é"), ("system", "now"), ("user", "")],
    ],
)
def test_conversation_token_ids_equal_the_templates_text(artifact, turns) -> None:
    messages = [{"role": "system", "content": text_of("heron")}]
    messages += [{"role": role, "content": content} for role, content in turns]
    assert artifact.token_ids.tolist() + prompt_ids(TOKENIZER, artifact, ask(*turns)) == whole_ids(messages)


def test_a_completion_prompt_continues_the_context_unwrapped(artifact, bare) -> None:
    for opened in (artifact, bare):
        assert prompt_ids(TOKENIZER, opened, ask(prompt=" and so")) == TOKENIZER(" and so").input_ids


def user_wrapped(built: Path):
    """A stand-in for an artifact whose context is in the first user message: only token ids and notes matter."""
    tokenizer = byte_tokenizer(STRICT)

    class Manifest:
        build_notes = {"wrapping": "user"}  # noqa: RUF012

    class Opened:
        manifest = Manifest()
        token_ids = context_ids(tokenizer, text_of("heron"), "user")

    return tokenizer, Opened()


def test_without_a_system_role_system_turns_follow_the_context(built: Path) -> None:
    tokenizer, opened = user_wrapped(built)
    ids = prompt_ids(tokenizer, opened, ask(("system", "be brief"), ("user", "who?")))
    assert tokenizer.decode(ids) == "be brief\nwho?<assistant>"
    ids = prompt_ids(tokenizer, opened, ask(("user", "a"), ("assistant", "b"), ("user", "c")))
    assert tokenizer.decode(ids) == "a<assistant>b<user>c<assistant>"


def test_messages_that_the_template_refuses_are_refused_with_its_reason(built: Path) -> None:
    tokenizer, opened = user_wrapped(built)
    with pytest.raises(BadRequestError, match="take turns") as refused:
        prompt_ids(tokenizer, opened, ask(("user", "a"), ("user", "b")))
    assert refused.value.param == "messages"
    with pytest.raises(BadRequestError, match="only user and assistant"):
        prompt_ids(tokenizer, opened, ask(("user", "a"), ("system", "b"), ("user", "c")))


def test_messages_in_a_row_are_joined_if_the_template_refuses_them_so() -> None:
    """Codex sends two system messages and two of the user's; templates of Mistral want turns."""
    strict = byte_tokenizer(
        "{% if messages[0]['role'] == 'system' %}<system>{{ messages[0]['content'] }}{% set messages = messages[1:] %}"
        "{% endif %}" + STRICT
    )
    first = (("system", "a"), ("system", "b"), ("user", "c"), ("user", "d"))
    then = (*first, ("assistant", "e"), ("system", "f"), ("user", "g"))
    began = strict.decode(prompts.whole_ids(strict, ask(*first)))
    assert began == "<system>a\n\nb<user>c\n\nd<assistant>"
    assert strict.decode(prompts.whole_ids(strict, ask(*then))) == f"{began}e<user>f\n\ng<assistant>"
    messages = [{"role": role, "content": content} for role, content in then]
    assert prompts.whole_ids(TOKENIZER, ask(*then)) == whole_ids(messages), "other templates get them as they are"
    with pytest.raises(BadRequestError, match="take turns"):
        prompts.whole_ids(strict, ask(("assistant", "a"), ("user", "b")))


def test_a_system_error_in_the_template_is_not_a_bad_request(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer()

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(tokenizer, "apply_chat_template", fail)
    with pytest.raises(OSError, match="Too many open files"):
        prompts.whole_ids(tokenizer, ask(("user", "who is it?")))


def test_a_context_without_a_template_takes_only_one_user_message(bare) -> None:
    with pytest.raises(BadRequestError, match="single user message, got 2"):
        prompt_ids(TOKENIZER, bare, ask(("system", "a"), ("user", "b")))


def test_a_message_without_tokens_is_refused() -> None:
    """A request without tokens would make the step fail for all requests."""
    tokenizer = byte_tokenizer("{% for message in messages %}{{ message['content'] }}{% endfor %}")

    class Manifest:
        build_notes = {"wrapping": "system"}  # noqa: RUF012

    class Opened:
        manifest = Manifest()
        token_ids = context_ids(tokenizer, text_of("heron"), "system")

    with pytest.raises(BadRequestError, match="the prompt has no tokens; send some text") as refused:
        prompt_ids(tokenizer, Opened(), ask(("user", "")))
    assert refused.value.param == "messages"


def test_a_prompt_does_not_end_with_an_end_token_that_the_tokenizer_adds() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = "a"
    assert tokenizer.decode(prompts.whole_ids(tokenizer, ask(prompt="ca"))) == "ca", "an end of the prompt's own"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="b $A a", special_tokens=[(text, tokenizer.convert_tokens_to_ids(text)) for text in "ab"]
    )
    assert tokenizer.decode(prompts.whole_ids(tokenizer, ask(prompt="cd"))) == "bcd"


def test_a_template_that_puts_questions_first_is_refused(artifact) -> None:
    tokenizer = byte_tokenizer("{% for message in messages[::-1] %}[{{ message['content'] }}]{% endfor %}")
    with pytest.raises(BadRequestError, match="after the context"):
        prompt_ids(tokenizer, artifact, ask(("user", "a")))


def test_the_answers_room_is_what_positions_and_rows_leave() -> None:
    asked = ask(("user", "x"), max_new_tokens=100)
    assert room_for(asked, 900, 24, 1024, 200) == 100
    assert room_for(asked, 950, 24, 1024, 200) == 50
    assert room_for(asked, 0, 24, 1024, 30) == 7
    for sizes, words in (
        (
            (1000, 24, 1024, 200),
            ".* context and question have 1000 and 24 tokens, .* context length is 1024 tokens, .*; ask",
        ),
        (
            (900, 31, 1024, 30),
            "^the question is too long: it has 31 tokens, .* room for 31 of question and answer together; ask",
        ),
        (
            (0, 31, 1024, 30),
            "^the prompt is too long: it has 31 tokens, .* room for 31 of prompt and answer together; shorten it",
        ),
        (
            (0, 1024, 1024, 30),
            "^the prompt is too long: it has 1024 tokens, .* maximum context length is 1024 tokens, .*; shorten",
        ),
    ):
        with pytest.raises(ContextTooLongError, match=words) as refused:
            room_for(asked, *sizes)
        assert refused.value.param == "messages"
    for other, field in ((ask(prompt="x"), "prompt"), (replace(asked, turns_field="input"), "input")):
        with pytest.raises(ContextTooLongError) as refused:
            room_for(other, 0, 31, 1024, 30)
        assert refused.value.param == field


@given(st.text(max_size=30), st.text(max_size=30))
def test_tokenising_only_after_the_last_special_token_changes_no_ids(text, question) -> None:
    """Texts may contain special tokens, and beginnings of them."""
    tokenizer = byte_tokenizer(
        "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>\n{% endfor %}"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>", "<|user|>"]})
    seen = []

    class Watched:
        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def __call__(self, text, **options):
            seen.append(len(text))
            return tokenizer(text, **options)

    prefix = context_ids(tokenizer, f"{text}<|end|><|us" + "er|>" * (len(text) % 2), "system")
    said = [{"role": "user", "content": question}]
    got = conversation_ids(Watched(), prefix, said, "system").tolist()
    whole = tokenizer.decode(prefix) + f"<|user|>{question}<|end|>\n"
    assert prefix.tolist() + got == tokenizer(whole, add_special_tokens=False).input_ids
    assert seen == [len(f"<|end|>\n<|user|>{question}<|end|>\n")]
