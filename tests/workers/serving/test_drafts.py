"""Drafts: the same answers in fewer steps."""

from pathlib import Path

import numpy as np
import pytest

from tests.tiny import loaded, token_ids
from tests.workers.serving.full_engine import FullEngine
from tests.workers.serving.requests import alone, make_request, make_scheduler, read, run
from tests.workers.serving.test_scheduler import ASKED
from workers.serving.drafts import MAX_DRAFT, MAX_ROWS, Drafts, Ngrams


def ngrams(*token_ids: int) -> Ngrams:
    return Ngrams(np.array(token_ids, np.int32))


def test_ngrams_finds_what_followed_the_last_occurrence() -> None:
    text = ngrams(1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 8, 1, 2, 3)
    assert text.after([1, 2, 3], 2) == [6, 7]
    assert text.after([1, 2, 3], 9) == [6, 7, 8, 1, 2, 3]
    assert text.after([2, 3, 4], 1) == [5]
    assert text.after([3, 2, 1], 9) == []


@pytest.mark.parametrize("num_tokens", range(5))
def test_short_texts_have_no_ngrams_that_a_token_follows(num_tokens) -> None:
    text = ngrams(*[7] * num_tokens)
    assert text.after([7, 7, 7], 9) == [7] * (num_tokens > 3)


def test_ngrams_tells_all_tokens_of_a_vocabulary_apart() -> None:
    large = 2**21 - 1
    text = ngrams(large, 0, large, 5, 0, large, 0, 6)
    assert text.after([large, 0, large], 1) == [5]
    assert text.after([0, large, 0], 1) == [6]
    assert text.after([large, large, large], 1) == []


def test_a_draft_continues_the_answer_then_the_first_part_of_the_prompt_that_can() -> None:
    drafts = Drafts([ngrams(1, 2, 3, 40, 41), ngrams(1, 2, 3, 50, 51, 4, 5, 6, 60)])
    assert drafts.propose([2, 3], 9) == []
    assert drafts.propose([1, 2, 3], 9) == [40, 41]
    assert drafts.propose([1, 2, 3], 1) == [40]
    assert drafts.propose([1, 2, 3], 0) == []
    assert drafts.propose([1, 2, 3, 4, 5, 6], 9) == [60]
    assert drafts.propose([1, 2, 3, 4, 5, 6, 1, 2, 3], 9) == [4, 5]
    assert Drafts([]).propose([7, 7, 7, 7, 7], 9) == [7, 7]
    assert drafts.propose([1, 2, 3, 4, 5, 6, 1, 2, 3, 9], 9) == []


def test_right_drafts_become_longer_and_wrong_ones_shorter() -> None:
    drafts = Drafts([ngrams(1, 1, 1, *range(2, 40))])
    lens = []
    for num_right in (2, 3, 4, 5, 6, 7, 7, 3, 0, 0):
        lens.append(len(drafts.propose([1, 1, 1], 99)))
        drafts.learn(lens[-1], num_right)
    assert lens == [2, 3, 4, 5, 6, MAX_DRAFT, MAX_DRAFT, MAX_DRAFT, MAX_DRAFT, 6]
    for _ in range(9):
        drafts.learn(5, 0)
    assert len(drafts.propose([1, 1, 1], 99)) == 1


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
    assert engine.num_steps == 1 + 2 + 7  # the question; two tokens alone; then 37 by drafts of 2, 3, ..., 7 tokens
    assert request.num_rows == 5 + 39


@pytest.mark.parametrize("stop", ["eos", "text"])
def test_an_answer_ends_within_a_draft_where_it_ends_without(built: Path, stop) -> None:
    question = token_ids(5).tolist()
    ids, text = alone(built, {"question": question, "max_new_tokens": 20})
    ends = {"stop_token_ids": (ids[13],)} if stop == "eos" else {"stop": (text[11:13],)}
    (request,), _ = answers(built, [{"question": question, "max_new_tokens": 20, **ends}])
    assert request.is_over and len(request.token_ids) < 20


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
