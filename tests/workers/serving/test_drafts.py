"""Drafts: the same answers in fewer steps."""

import json
from itertools import pairwise
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from tests.tiny import loaded, token_ids
from tests.workers.serving.full_engine import FullEngine
from tests.workers.serving.requests import alone, make_request, make_scheduler, read, run
from tests.workers.serving.test_scheduler import ASKED
from workers.serving.chat_template import ChatTemplate
from workers.serving.drafts import MAX_ROWS, Drafts, Ngrams, draft_lens
from workers.serving.grammar import Grammars
from workers.serving.messages import Ask
from workers.serving.step_times import REMEMBERED, StepTimes


def ngrams(*token_ids: int) -> Ngrams:
    return Ngrams(np.array(token_ids, np.int32))


def after(text: Ngrams, ngram: list[int], num_tokens: int, start: int = 0) -> list[int]:
    place = text.find(ngram, start)
    return [] if place is None else text.after(place, num_tokens)


def test_ngrams_finds_what_followed_the_next_occurrence_or_else_the_last() -> None:
    text = ngrams(1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 8, 1, 2, 3)
    assert after(text, [1, 2, 3], 2) == [4, 5]
    assert after(text, [1, 2, 3], 2, 1) == after(text, [1, 2, 3], 2, 5) == [6, 7]
    assert after(text, [1, 2, 3], 9, 6) == [6, 7, 8, 1, 2, 3]
    assert after(text, [2, 3, 4], 1) == after(text, [2, 3, 4], 1, 2) == [5]
    assert text.find([3, 2, 1]) is None


@pytest.mark.parametrize("num_tokens", range(5))
def test_short_texts_have_no_ngrams_that_a_token_follows(num_tokens) -> None:
    text = ngrams(*[7] * num_tokens)
    assert after(text, [7, 7, 7], 9) == [7] * (num_tokens > 3)


def test_ngrams_tells_all_tokens_of_a_vocabulary_apart() -> None:
    large = 2**21 - 1
    text = ngrams(large, 0, large, 5, 0, large, 0, 6)
    assert after(text, [large, 0, large], 1) == [5]
    assert after(text, [0, large, 0], 1) == [6]
    assert after(text, [large, large, large], 1) == []


def test_a_draft_continues_the_answer_then_the_first_part_of_the_prompt_that_can() -> None:
    drafts = Drafts([ngrams(1, 2, 3, 40, 41), ngrams(1, 2, 3, 50, 51, 4, 5, 6, 60)])
    assert drafts.propose([2, 3], 9) == []
    assert drafts.propose([1, 2, 3], 9) == [40, 41]
    assert drafts.propose([1, 2, 3], 1) == [40]
    assert drafts.propose([1, 2, 3], 0) == []
    assert drafts.propose([1, 2, 3, 4, 5, 6], 9) == [60]
    assert drafts.propose([1, 2, 3, 4, 5, 6, 1, 2, 3], 2) == [4, 5]
    assert Drafts([]).propose([7, 7, 7, 7, 7], 99) == [7] * 15
    assert Drafts([], 7).propose([7, 7, 7, 7, 7], 99) == [7] * 7
    assert drafts.propose([1, 2, 3, 4, 5, 6, 1, 2, 3, 9], 9) == []


def test_a_text_is_followed_from_where_it_was_last_found() -> None:
    text = ngrams(1, 2, 3, 40, 8, 9, 10, 1, 2, 3, 50, 11, 1, 2, 3, 60)
    drafts = Drafts([text])
    assert drafts.propose([8, 9, 10], 3) == [1, 2, 3]
    assert drafts.propose([8, 9, 10, 1, 2, 3], 2) == [50, 11]
    assert Drafts([text]).propose([8, 9, 10, 1, 2, 3], 1) == [40]  # also if another request has the same context


def test_what_the_client_predicts_comes_before_the_answer_itself() -> None:
    predicted = ngrams(1, 2, 3, 40, 1, 2, 3, 50, 60)
    drafts, answer = Drafts([ngrams(1, 2, 3, 70)], predicted=predicted), [1, 2, 3]
    assert drafts.propose(answer, 1) == [40]
    assert drafts.propose([1, 2, 3, 40, 1, 2, 3], 9) == [50, 60]
    assert drafts.propose([1, 2, 3, 40, 1, 2, 3, 40], 1) == [1]


def test_a_draft_ends_before_a_token_that_ends_the_answer() -> None:
    drafts = Drafts([ngrams(1, 2, 3, 4, 9, 5, 6)], stop_ids={9})
    assert drafts.propose([1, 2, 3], 7) == [4]
    assert drafts.propose([1, 2, 3, 4], 7) == []


def test_the_chance_follows_the_last_drafts_whether_or_not_they_were_run() -> None:
    drafts, answer, chances = Drafts([ngrams(*[1, 2, 3, 4, 5, 6] * 2)]), [1, 2, 3], [0.8]
    for n in range(12):
        draft = drafts.propose(answer, 3)
        assert len(draft) == 3
        answer += draft if n < 3 else [draft[0] + 90, 1, 2, 3]  # at first right, then wrong
        chances.append(drafts.chance)
    assert all(after >= before for before, after in pairwise(chances[:4])) and chances[4] > 0.9
    assert all(after < before for before, after in pairwise(chances[4:]))
    assert chances[-1] < 0.35


def test_text_that_a_grammar_fixes_comes_before_other_guesses_and_has_a_chance_of_its_own() -> None:
    drafts = Drafts([ngrams(1, 2, 3, 40)])
    assert drafts.propose([1, 2, 3], 9, [50, 51]) == [50, 51]
    assert drafts.propose([1, 2, 3], 1, [50, 51]) == [50]
    assert drafts.propose([1, 2, 3, 50, 1, 2, 3], 9) == [50, 1, 2, 3] * 2 + [50]
    assert drafts.chance == 0.8  # nothing is known of text
    drafts.propose([1, 2, 3, 50, 1, 2, 3, 7], 9, [8])
    assert drafts.chance > 0.8
    drafts.propose([1, 2, 3, 50, 1, 2, 3, 7, 8, 9], 9)
    assert drafts.chance < 0.5


def timed(**seconds: float) -> StepTimes:
    """Times of steps by their rows: r1=1.0, r2=1.5, ..."""
    times = StepTimes()
    for name, of in seconds.items():
        for _ in range(2):
            times.count_step()
            times.add(int(name[1:]), of)
    return times


def test_the_time_of_steps_that_were_not_made_is_estimated() -> None:
    times = timed(r1=1.0, r4=1.6)
    assert [round(times.estimate(rows), 9) for rows in (1, 2, 3, 4, 6)] == [1.0, 1.2, 1.4, 1.6, 2.0]
    assert timed(r4=2.0).estimate(1) == 2.0  # no more than that
    assert timed(r1=1.0).estimate(3) == pytest.approx(1.2)
    assert StepTimes().estimate(6) == 1.5
    assert timed(r11=2.0).estimate(21) == pytest.approx(3.0)
    times.add(2, 9.0)
    assert times.estimate(2) == pytest.approx(1.2)  # a single time may be a compilation's
    times.add(2, 1.1)
    assert times.estimate(2) == times.shortest(2) == 1.1


def test_old_times_are_forgotten() -> None:
    times = timed(r1=1.0)
    for _ in range(REMEMBERED):
        times.count_step()
    assert times.shortest(1) == 1.0
    for _ in range(REMEMBERED):
        times.count_step()
    assert times.shortest(1) is None


def test_drafts_are_as_long_as_their_rows_are_worth() -> None:
    free, dear, stairs = timed(r1=1.0, r8=1.0), timed(r1=1.0, r8=8.0), timed(r1=1.0, r2=1.6, r3=1.6, r4=1.6, r8=3.5)
    assert draft_lens([(0.9, 7)], 1, 16, free) == [7]
    assert draft_lens([(0.9, 7)], 1, 4, free) == [3]
    assert draft_lens([(0.9, 7)], 1, 1, free) == [0]
    assert draft_lens([(0.9, 7)], 1, 16, dear) == [0]
    assert draft_lens([(0.7, 7)], 1, 16, stairs) == [3]  # the first row alone would not be worth it
    assert draft_lens([(0.9, 0)], 1, 16, free) == [0]
    assert draft_lens([(0.9, 2), (0.5, 7), (0.0, 7)], 3, 7, timed(r3=1.0, r7=1.0)) == [2, 2, 0]
    assert draft_lens([(0.9, 7)] * 20, 20, 64, timed(r20=1.0, r64=1.0)) == [0] * 20


def answers(
    built: Path, asked: list[dict], draws: bool = False, max_rows: int = 16, wrong_every: int = 5
) -> tuple[list, FullEngine]:
    """Answer all together, with a text to draft from in which the right answers stand with some wrong tokens."""
    alone_ids = [alone(built, of)[0] for of in asked]
    scheduler, engine, _ = make_scheduler(built, FullEngine(loaded(), draws=draws, max_rows=max_rows))
    requests = [make_request(scheduler, **of) for of in asked]
    for request, ids in zip(requests, alone_ids, strict=True):
        text = [token_id + (n % wrong_every == wrong_every - 1) for n, token_id in enumerate(ids)]
        request.drafts = Drafts([ngrams(*text)])
    run(scheduler)
    assert [request.token_ids for request in requests] == alone_ids
    for request, of in zip(requests, asked, strict=True):
        assert read(request)[0] == alone(built, of)[1]
    assert not engine.request_slots
    return requests, engine


@pytest.mark.parametrize("draws", [False, True])
def test_requests_get_the_answers_that_they_get_without_drafts(built: Path, draws) -> None:
    answers(built, [asked | {"max_new_tokens": 24} for asked in ASKED], draws)


def test_a_request_takes_fewer_steps(built: Path) -> None:
    asked = {"question": token_ids(5).tolist(), "max_new_tokens": 40}
    (request,), engine = answers(built, [asked], wrong_every=100)
    assert engine.num_steps == 1 + 2 + 3  # the question; two tokens alone; then 37 by drafts of up to 15 tokens
    assert request.num_rows == 5 + 39


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.9, "top_p": 0.8}, {"top_logprobs": 2}, {"temperature": 0.7, "min_tokens": 12}]
)
def test_a_request_that_samples_takes_fewer_steps(built: Path, sampling, draws) -> None:
    asked = {"question": token_ids(5).tolist(), "max_new_tokens": 40, "seed": 3, **sampling}
    _, engine = answers(built, [asked], draws, wrong_every=100)
    assert engine.num_steps == 1 + 2 + 3


@pytest.mark.parametrize(("draws", "num_steps"), [(False, 1 + 2 + 3), (True, 40)])
def test_an_engine_that_samples_cannot_apply_penalties_to_guessed_tokens(built: Path, draws, num_steps) -> None:
    asked = {"question": token_ids(5).tolist(), "max_new_tokens": 40, "frequency_penalty": 0.5, "temperature": 0.9}
    _, engine = answers(built, [asked], draws, wrong_every=100)
    assert engine.num_steps == num_steps


FORM = {
    "type": "object",
    "properties": {"number_of_visitors": {"type": "integer", "maximum": 99}, "open": {"enum": ["today", "tomorrow"]}},
    "required": ["number_of_visitors", "open"],
}


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.5, "seed": 3}, {"top_logprobs": 2}])
def test_text_that_a_grammar_fixes_is_guessed(built: Path, sampling) -> None:
    answers, num_steps = [], []
    for drafts, draws in ((None, False), (Drafts([]), False), (Drafts([]), True)):
        scheduler, engine, _ = make_scheduler(built, FullEngine(loaded(), draws=draws))
        request = make_request(scheduler, token_ids(5).tolist(), max_new_tokens=90, **sampling)
        ask = Ask(request_id="1", context="", sampling=request.ask.sampling, schema=FORM)
        request.grammar, request.drafts = Grammars(loaded()).make_now(ask, ChatTemplate(loaded().tokenizer)), drafts
        run(scheduler)
        text, done = read(request)
        answers.append((text, done.reason, request.token_ids))
        num_steps.append(engine.num_steps)
    assert answers[1:] == answers[:1] * 2
    jsonschema.validate(json.loads(answers[0][0]), FORM)
    assert num_steps[1] == num_steps[2] < num_steps[0] / 3


@pytest.mark.parametrize("stop", ["eos", "text"])
def test_an_answer_ends_within_a_draft_where_it_ends_without(built: Path, stop) -> None:
    question = token_ids(5).tolist()
    ids, text = alone(built, {"question": question, "max_new_tokens": 20})
    ends = {"stop_token_ids": (ids[13],)} if stop == "eos" else {"stop": (text[11:13],)}
    (request,), _ = answers(built, [{"question": question, "max_new_tokens": 20, **ends}])
    assert request.is_over and len(request.token_ids) < 20


def test_a_question_is_read_beside_a_request_that_always_has_drafts(built: Path) -> None:
    ids, _ = alone(built, {"question": token_ids(5).tolist(), "max_new_tokens": 60})
    scheduler, _, _ = make_scheduler(built)
    drafting = make_request(scheduler, token_ids(5).tolist(), max_new_tokens=60)
    drafting.drafts = Drafts([ngrams(*ids)], 7)
    while len(drafting.token_ids) < 8:
        scheduler.turn()
    asking = make_request(scheduler, token_ids(9, seed=1).tolist(), max_new_tokens=1)
    for _ in range(6):
        scheduler.turn()
    assert asking.is_over and not drafting.is_over
    run(scheduler)
    assert drafting.token_ids == ids


def test_a_step_with_drafts_has_few_rows(built: Path, monkeypatch) -> None:
    sizes = []
    step = FullEngine.step

    def measured(self, rows, *args):
        sizes.append((len(rows), sum(row.is_draft for row in rows)))
        return step(self, rows, *args)

    monkeypatch.setattr(FullEngine, "step", measured)
    answers(built, [{"question": token_ids(3, seed=n).tolist(), "max_new_tokens": 30} for n in range(10)], max_rows=64)
    assert max(num_rows for num_rows, num_drafts in sizes if num_drafts) == MAX_ROWS
    assert all(num_rows - num_drafts <= 10 for num_rows, num_drafts in sizes if num_drafts)
