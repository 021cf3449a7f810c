"""Tools, reasoning, schemas and echoes on the decoding side: prompts and answers."""

import asyncio
import json
import weakref
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import processors

from csattn.artifact import open_artifact
from csattn.config import SearchConfig
from csattn.models import LoadedModel
from csattn.models.loader import wrap_model
from csattn.models.prompt import choose_wrapping
from tests.chat_models import chat_model
from tests.tiny import byte_tokenizer, loaded, make_model
from tests.workers.serving import prompting
from tests.workers.serving.artifacts import build, text_of
from tests.workers.serving.full_engine import FullEngine
from tests.workers.serving.test_local import answer, ask, running, settings_of, until
from workers.serving.chat_template import HERMES, LLAMA, MISTRAL, ChatTemplate, messages_of, tool_specs
from workers.serving.contexts import name_artifact
from workers.serving.local import LocalBackend
from workers.serving.messages import (
    Ask,
    BadRequestError,
    Done,
    Piece,
    ServingError,
    TokenizeAsk,
    Tokens,
    Tool,
    ToolCall,
    Turn,
)
from workers.serving.prompts import prompt_ids, tokenize
from workers.serving.request import Request
from workers.serving.step_engine import StepResult, StepRow

INT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
ADD = Tool("add", INT, "Adds.")
CALL = '{"name": "add", "arguments": {"a": 7}}'
TALK = (
    Turn("user", "Add."),
    Turn("assistant", "", (ToolCall("123456789", "add", {"a": 1}),)),
    Turn("tool", "2", call_id="123456789"),
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a context of each tiny chat model, named after its kind."""
    store = tmp_path_factory.mktemp("tools")
    for kind in ("hermes", "thinking", "may_think", "mistral", "llama"):
        name_artifact(store, kind, build(store, text_of("heron"), model=chat_model(kind)), "float32")
    return store


def context_tokens(store: Path, kind: str) -> list[int]:
    model = chat_model(kind)
    with open_artifact(store / build(store, text_of("heron"), model=model)) as artifact:
        return artifact.token_ids.tolist()  # type: ignore[no-any-return]


def whole(model: LoadedModel, turns: list[Turn], **more: Any) -> list[int]:
    text = model.tokenizer.apply_chat_template(messages_of(turns), tokenize=False, add_generation_prompt=True, **more)
    ids: list[int] = model.tokenizer(text, add_special_tokens=False).input_ids
    return ids


@pytest.mark.parametrize("turns", [TALK[:1], TALK, (Turn("system", "Be short."), *TALK)])
@pytest.mark.parametrize("kind", ["hermes", "mistral", "llama"])
def test_tools_are_written_as_the_template_writes_them(store: Path, kind: str, turns: tuple[Turn, ...]) -> None:
    """If the template puts tools after the context's message, the ids are those of the whole conversation."""
    model = chat_model(kind)
    with open_artifact(store / build(store, text_of("heron"), model=model)) as artifact:
        got = prompt_ids(model.tokenizer, artifact, ask(kind, turns=turns, tools=(ADD,)))
        plain = prompt_ids(model.tokenizer, artifact, ask(kind, turns=turns))
        context = artifact.token_ids.tolist()
    as_a_whole = whole(model, [Turn("system", text_of("heron")), *turns], tools=tool_specs([ADD]))
    if kind == "mistral":
        assert context + got == as_a_whole
    else:
        assert as_a_whole[: len(context)] != context
        assert got == whole(model, list(turns), tools=tool_specs([ADD]))
    assert context + plain == whole(model, [Turn("system", text_of("heron")), *turns])
    assert "Adds." in model.tokenizer.decode(got) and "Adds." not in model.tokenizer.decode(plain)


@pytest.mark.parametrize("kind", ["hermes", "mistral", "llama"])
def test_a_truncated_calls_arguments_are_written_unchanged(kind: str) -> None:
    turns = (TALK[0], Turn("assistant", "", (ToolCall("123456789", "add", '{"a": 1'),)), *TALK[2:])
    tokenizer = chat_model(kind).tokenizer
    written = tokenize(tokenizer, ChatTemplate(tokenizer), TokenizeAsk(turns=turns), 99)
    assert r'"{\"a\": 1"' in tokenizer.decode(written.ids)


def test_messages_of_reads_calls_once_for_any_number_of_tool_results() -> None:
    class Calls(tuple):
        num_looks = 0

        def __iter__(self) -> Any:
            Calls.num_looks += 1
            return super().__iter__()

    called = [Turn("assistant", "", Calls([ToolCall(f"c{n}", f"f{n}", {})])) for n in range(20)]
    told = messages_of([*called, *(Turn("tool", "2", call_id=f"c{n}") for n in range(21))])
    assert [message["name"] for message in told[20:]] == [*(f"f{n}" for n in range(20)), ""]
    assert Calls.num_looks <= 2 * len(called)


def test_the_call_format_is_recognised_from_the_template() -> None:
    for kind, template in (("hermes", HERMES), ("may_think", HERMES), ("mistral", MISTRAL), ("llama", LLAMA)):
        assert ChatTemplate(chat_model(kind).tokenizer).calls is template
    plain = ChatTemplate(byte_tokenizer())
    assert (plain.has_tools, plain.calls, plain.thinks, plain.hidden) == (False, None, False, {})
    assert [ChatTemplate(chat_model(kind).tokenizer).is_thinking for kind in ("thinking", "may_think")] == [True, False]
    mistral = chat_model("mistral").tokenizer
    assert ChatTemplate(mistral).hidden == {mistral.get_vocab()["[TOOL_CALLS]"]: "[TOOL_CALLS]"}
    both = byte_tokenizer()
    both.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }} <tool_call>"}
    assert ChatTemplate(both).calls is HERMES
    assert ChatTemplate(byte_tokenizer(None)).has_tools is False


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "has no tools"),
        ("{{ messages }}", "has no tools"),
        ("{{ tools }} <tool_call><function=f>", "form that this service does not parse"),
        ("{{ tools }} call them!", "form that this service does not parse"),
    ],
)
def test_tools_without_a_supported_call_format_are_refused(text: str | None, words: str) -> None:
    template = ChatTemplate(byte_tokenizer(text))
    for asked in (ask(tools=(ADD,)), ask(turns=TALK)):
        with pytest.raises(BadRequestError, match=words):
            template.require(asked)
    template.require(ask())


def test_tools_are_refused_for_a_context_without_a_template(built: Path) -> None:
    async def main() -> None:
        model = chat_model("hermes")
        bare = build(built, text_of("bare"), chat=False, model=model)
        name_artifact(built, "bare-with-tools", bare, "float32")
        async with backend_of(model, built) as backend:
            with pytest.raises(BadRequestError, match="without a chat template"):
                await answer(backend, ask("bare-with-tools", tools=(ADD,)))

    asyncio.run(main())


class SayingEngine(FullEngine):
    """Answers any question with the given tokens, one by one, once the question has been fed."""

    def __init__(self, loaded: LoadedModel, ids: list[int], question_len: int) -> None:
        super().__init__(loaded, tail_capacity=2000)
        self._ids, self._before = ids, question_len

    def step(self, rows: Any, want_logits: bool = False, watch: Any = None) -> StepResult:
        result = super().step(rows, True, watch)
        assert result.logits is not None
        for row, asked in enumerate(rows):
            at = self.request_slots[asked.request_slot].num_rows - self._before
            if row + 1 == len(rows) and 0 <= at < len(self._ids):
                result.logits[row] = 0.0
                result.logits[row, self._ids[at]] = 50.0
        return StepResult(result.logits.argmax(-1), result.logits, result.fidelity)

    def takes_drafts(self, *request: object) -> bool:
        return False  # it has the next token of a step's last row only


def backend_of(model: LoadedModel, store: Path, engine: FullEngine | None = None) -> LocalBackend:
    return LocalBackend(engine or FullEngine(model, tail_capacity=2000), model, settings_of(store))


async def events_of(backend: LocalBackend, asked: Ask) -> tuple[list[Piece], Done]:
    pieces = []
    async with aclosing(backend.generate(asked)) as events:
        async for event in events:
            if isinstance(event, Done):
                return pieces, replace(event, cached_tokens=0)  # the text does not depend on it
            pieces.append(event)
    raise AssertionError("events end with Done")


def saying(store: Path, kind: str, text: str, **more: Any) -> tuple[list[Piece], Done]:
    """Return the events of an answer in which the model generates this text."""

    async def main() -> tuple[list[Piece], Done]:
        model = chat_model(kind)
        asked = ask(kind, max_new_tokens=400, **more)
        with open_artifact(store / build(store, text_of("heron"), model=model)) as artifact:
            question = prompt_ids(model.tokenizer, artifact, asked)
        ids = [*model.tokenizer(text).input_ids, *model.stop_ids]
        async with backend_of(model, store, SayingEngine(model, ids, len(question))) as backend:
            return await events_of(backend, asked)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("kind", "text", "want"),
    [
        ("hermes", f"Well.\n<tool_call>\n{CALL}\n</tool_call>", ("Well.\n", "", "tool_calls")),
        ("mistral", f"[TOOL_CALLS][{CALL}]", ("", "", "tool_calls")),
        ("llama", CALL.replace("arguments", "parameters"), ("", "", "tool_calls")),
        ("llama", f"<|python_tag|>{CALL}", ("", "", "tool_calls")),
        ("may_think", f"<think>\nAdd.</think>\n\n<tool_call>{CALL}</tool_call>", ("", "Add.", "tool_calls")),
        ("thinking", "Add.</think>\n\nNo.", ("No.", "Add.", "stop")),
        ("hermes", "No.", ("No.", "", "stop")),
    ],
)
def test_an_answer_is_split_into_text_reasoning_and_calls(store: Path, kind: str, text: str, want: Any) -> None:
    pieces, done = saying(store, kind, text, tools=(ADD,))
    said = "".join(piece.text for piece in pieces)
    assert (said, "".join(piece.reasoning for piece in pieces), done.reason) == want
    calls = [part for piece in pieces for part in piece.calls]
    assert bool(calls) == (done.reason == "tool_calls")
    if calls:
        assert [part.name for part in calls if part.name] == ["add"]
        assert json.loads("".join(part.arguments for part in calls)) == {"a": 7}


def test_without_parallel_calls_only_one_call_is_returned(store: Path) -> None:
    pieces, done = saying(store, "hermes", f"<tool_call>{CALL}</tool_call>" * 2, tools=(ADD,), parallel_calls=False)
    assert told(pieces) == 'add{"a": 7}' and done.reason == "tool_calls"


@pytest.mark.parametrize(
    ("end", "more", "want"),
    [
        ('{"a": "STOP"}}', {"stop": ("STOP",)}, "stop"),
        ('{"a": "', {}, "stop"),  # the model's own end
        ('{"a": 7}', {}, "tool_calls"),
        ('{"a": 7}}</tool_call>', {"stop": ("</tool",)}, "tool_calls"),
    ],
)
def test_an_answer_that_ends_within_a_calls_arguments_is_no_call_to_run(
    store: Path, end: str, more: dict[str, Any], want: str
) -> None:
    text = f'<tool_call>{CALL}</tool_call><tool_call>{{"name": "add", "arguments": {end}'
    assert saying(store, "hermes", text, tools=(ADD,), **more)[1].reason == want


def test_an_echo_scores_the_end_token_too(store: Path) -> None:
    """An evaluation leaves out the last score, which is the answer's and not the prompt's."""
    pieces, done = saying(store, "hermes", "", prompt="abc", echo=True, top_logprobs=1)
    scores = [score for piece in pieces for score in piece.scores]
    assert [score.text for score in scores] == ["a", "b", "c", "<|im_end|>"] and done.new_tokens == 1


def test_without_tools_a_call_look_alike_stays_text(store: Path) -> None:
    pieces, done = saying(store, "hermes", f"<tool_call>{CALL}</tool_call>")
    assert "".join(piece.text for piece in pieces) == f"<tool_call>{CALL}</tool_call>" and done.reason == "stop"


def test_reasoning_and_calls_keep_one_logprob_per_token(store: Path) -> None:
    text = f"<think>Hm.</think>A <tool_call>{CALL}</tool_call>"
    pieces, done = saying(store, "may_think", text, tools=(ADD,), top_logprobs=1)
    scores = [score for piece in pieces for score in piece.scores]
    assert len(scores) == done.new_tokens - 1  # all but the end token
    assert "".join(score.text for score in scores) == text


@pytest.mark.parametrize("kind", ["hermes", "mistral", "llama"])
def test_a_required_tool_is_called_alone_and_in_a_batch(store: Path, kind: str) -> None:
    """The model has random weights and is greedy or sampled; the answer is the same alone and in a batch."""

    async def main() -> None:
        model = chat_model(kind)
        bias = tuple((token_id, 8.0) for token_id in model.tokenizer("}0").input_ids)
        asks = [
            ask(
                kind, f"Go {n}!", 300, tools=(ADD,), must_call=("add",), parallel_calls=False,
                temperature=n % 2, seed=n, logit_bias=bias,
            )
            for n in range(4)
        ]  # fmt: skip
        async with backend_of(model, store) as backend:
            alone = [await events_of(backend, asked) for asked in asks]
            together = await asyncio.gather(*(events_of(backend, asked) for asked in asks))
        for (pieces, done), (others, other_done) in zip(alone, together, strict=True):
            assert told(pieces) == told(others) and done == other_done
            assert done.reason == "tool_calls" and not "".join(piece.text for piece in pieces)
            assert isinstance(json.loads("".join(part.arguments for piece in pieces for part in piece.calls))["a"], int)

    asyncio.run(main())


def told(pieces: list[Piece]) -> str:
    return "".join(part.name + part.arguments for piece in pieces for part in piece.calls)


def test_a_grammar_is_freed_with_its_request(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for finished and for cancelled requests."""
    grammars: list[weakref.ref[Any]] = []
    real: Callable[..., Request] = LocalBackend._request  # type: ignore[assignment]

    def seen(self: LocalBackend, ask: Ask, template: Any, config: Any, begun: Any, grammar: Any, at: float) -> Request:
        grammars.append(weakref.ref(grammar))
        return real(self, ask, template, config, begun, grammar, at)

    monkeypatch.setattr(LocalBackend, "_request", seen)

    async def main() -> None:
        model = chat_model("hermes")
        async with backend_of(model, store) as backend:
            await events_of(backend, ask("hermes", schema={"type": "object"}, max_new_tokens=3))
            events = backend.generate(ask("hermes", schema={"type": "array", "items": True}, max_new_tokens=500))
            await anext(events)
            await events.aclose()
            await until(lambda: len(grammars) == 2 and not any(grammar() for grammar in grammars))

    asyncio.run(main())


def test_invalid_requests_are_refused_before_any_step(store: Path) -> None:
    async def main() -> None:
        model = chat_model("hermes")
        engine = FullEngine(model)
        async with backend_of(model, store, engine) as backend:
            for asked, words in (
                (ask("hermes", schema={"uniqueItems": True}), "uniqueItems"),
                (ask("hermes", prompt=(1, 100_000)), "token id 100000"),
                (ask("hermes", logit_bias=((100_000, 1.0),)), "token id 100000"),
                (ask("hermes", stop_token_ids=(5, 100_000)), "stop_token_ids has the token id 100000"),
            ):
                with pytest.raises(BadRequestError, match=words):
                    await answer(backend, asked)
        async with backend_of(loaded(), store) as backend:
            with pytest.raises(BadRequestError, match="has no tools"):
                await answer(backend, ask("hermes", tools=(ADD,)))
        assert engine.num_steps == 0 and not engine.contexts

    asyncio.run(main())


@pytest.mark.parametrize("max_new_tokens", [0, 1, 4])
@pytest.mark.parametrize("prompt", ["and so é", None])
def test_echo_scores_equal_full_attention_logprobs(built: Path, prompt: str | None, max_new_tokens: int) -> None:
    """Each token's logprob is that of full attention to all before it; the first has none."""
    ids = tuple(loaded().tokenizer("and so é").input_ids)

    async def main() -> None:
        asked = ask(prompt=prompt or ids, echo=True, top_logprobs=2, max_new_tokens=max_new_tokens, keep=1.0)
        async with running(built) as backend:
            pieces, done = await events_of(backend, asked)
            [again] = [piece for piece in (await events_of(backend, asked))[0] if piece.text.startswith("and so é")]
            _, plain = await answer(backend, ask(prompt=ids, max_new_tokens=max(1, max_new_tokens)))
        assert pieces[0] == again and pieces[0].text == "and so é" and done.new_tokens == max_new_tokens
        assert done.reason == "length" and done.question_tokens == plain.question_tokens == len(ids)
        scores = pieces[0].scores
        assert [score.token_id for score in scores] == list(ids) and scores[0].logprob is None
        engine = FullEngine(loaded())
        with open_artifact(built / build(built, text_of("heron"))) as artifact:
            engine.add_context(0, artifact)
        engine.open(0, 0, SearchConfig(), "full")
        logits = engine.step([StepRow(0, token_id) for token_id in ids], True).logits
        assert logits is not None
        for row, score in zip(logits.astype(np.float64), scores[1:], strict=False):
            logprobs = row - row.max() - np.log(np.exp(row - row.max()).sum())
            assert score.logprob == pytest.approx(logprobs[score.token_id], abs=1e-6)
            assert [logprob for _, _, logprob in score.top] == pytest.approx(np.sort(logprobs)[:-3:-1], abs=1e-6)
        assert len([score for piece in pieces[1:] for score in piece.scores]) == max_new_tokens

    asyncio.run(main())


def test_an_echo_omits_the_text_of_an_added_special_token(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    model = wrap_model(make_model(vocab_size=len(tokenizer)), tokenizer, "tiny-bos")
    written = tuple(tokenizer("<s>ab", add_special_tokens=False).input_ids)

    async def main() -> None:
        async with prompting.make_backend(tmp_path, model) as backend:
            for prompt, echo in (("ab", "ab"), (written, "<s>ab")):
                asked = prompting.ask(prompt=prompt, echo=True, top_logprobs=0, new=0)
                [piece], _ = await events_of(backend, asked)
                assert [score.text for score in piece.scores] == ["<s>", "a", "b"]
                assert piece.text == echo == "".join(score.text for score in piece.scores if score.is_visible)

    asyncio.run(main())


def test_repetition_penalty_counts_context_question_and_answer(built: Path) -> None:
    """A tiny penalty favours tokens of all three; a large one avoids them."""
    context = set(loaded().tokenizer(text_of("heron")).input_ids)

    async def main() -> None:
        async with running(built) as backend:

            async def answered(question: tuple[int, ...], **more: Any) -> list[int]:
                pieces, _ = await events_of(backend, ask(prompt=question, max_new_tokens=20, top_logprobs=0, **more))
                return [score.token_id for piece in pieces for score in piece.scores]

            free = await answered((64,))
            assert not context & {*free} and len({*free}) < 20
            assert (await answered((64,), repetition_penalty=1e-9))[0] in context
            assert {*free} & {*await answered(tuple(free), repetition_penalty=1e-9)}
            assert len({*await answered((64,), repetition_penalty=1e9)}) == 20

    asyncio.run(main())


def test_tokenize_of_texts_and_conversations() -> None:
    model = chat_model("hermes")
    template = ChatTemplate(model.tokenizer)
    got = tokenize(model.tokenizer, template, TokenizeAsk(text="aé"), 99)
    assert got == Tokens(ids=tuple(model.tokenizer("aé").input_ids), texts=("a", "Ã", "©"), max_positions=99)
    asked = TokenizeAsk(turns=TALK, tools=(ADD,))
    assert list(tokenize(model.tokenizer, template, asked, 99).ids) == whole(model, list(TALK), tools=tool_specs([ADD]))
    silent = TokenizeAsk(turns=TALK[:1], add_generation_prompt=False)
    assert (
        list(tokenize(model.tokenizer, template, silent, 99).ids)
        == whole(model, [TALK[0]])[: -len("<|im_start|>assistant\n")]
    )
    with pytest.raises(ServingError, match="no chat template"):
        tokenize(byte_tokenizer(None), ChatTemplate(byte_tokenizer(None)), TokenizeAsk(turns=TALK[:1]), 99)
    assert choose_wrapping(model.tokenizer) == "system"
