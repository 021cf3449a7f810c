"""Continuous batching, turn by turn: the right tokens, fair steps, and every way in which a request can end."""

from functools import partial
from pathlib import Path

import pytest

from csattn.artifact import open_artifact
from tests.tiny import loaded, token_ids
from tests.workers.serving.artifacts import SECRETS
from tests.workers.serving.full_engine import FullEngine
from tests.workers.serving.requests import alone, make_request, make_scheduler, read, run
from tests.workers.serving.soundness import check
from tests.workers.serving.test_preparation import path_of
from workers.serving import scheduler as scheduling
from workers.serving.messages import Done, Piece
from workers.serving.plan import QuestionRows, divide_rows, plan_step
from workers.serving.request import Request

ASKED = [
    {"question": token_ids(n, seed=n).tolist(), "context_id": n % 3, "max_new_tokens": 3 + n, "seed": n, **more}
    for n, more in enumerate(
        [{}, {"temperature": 0.9}, {"selector": "window"}, {"top_logprobs": 3}, {"temperature": 1.2, "top_p": 0.7}] * 3
        + [{"temperature": 0.8, "frequency_penalty": 0.5, "logit_bias": ((7, 2.0), (255, -1.0)), "min_tokens": 3}],
        start=1,
    )
]


@pytest.mark.parametrize(
    ("engine_draws", "many_tokens"),
    [(False, 0), (False, scheduling.MANY_TOKENS), (True, 0)],
    ids=["drawn side by side", "one by one", "by the engine"],
)
def test_sixteen_batched_requests_are_each_answered_as_if_alone(
    built: Path, engine_draws, many_tokens, monkeypatch
) -> None:
    monkeypatch.setattr(scheduling, "MANY_TOKENS", many_tokens)
    scheduler, engine, _ = make_scheduler(built, FullEngine(loaded(), draws=engine_draws))
    if engine_draws:
        monkeypatch.setattr(Request, "choose", None)  # no request needs logits
    requests = [make_request(scheduler, **asked) for asked in ASKED]
    run(scheduler)
    monkeypatch.undo()
    together = engine.num_steps
    for request, asked in zip(requests, ASKED, strict=True):
        text, last = read(request)
        assert (request.token_ids, text) == alone(built, asked)
        assert last == Done(
            reason="length", context_tokens=350, question_tokens=len(asked["question"]),
            new_tokens=asked["max_new_tokens"], cached_tokens=350,
        )  # fmt: skip
    assert together < sum(asked["max_new_tokens"] for asked in ASKED) / 3
    assert not engine.request_slots
    assert scheduler.flow.num_in_flight == 0


def test_each_context_gives_another_answer(built: Path) -> None:
    scheduler, _, _ = make_scheduler(built)
    texts = []
    for context_id in range(3):
        request = make_request(scheduler, "who?", context_id, max_new_tokens=12)
        run(scheduler)
        texts.append(read(request)[0])
    assert len(set(texts)) == 3


def test_a_long_question_does_not_stall_decoding_or_short_questions(built: Path) -> None:
    scheduler, _, _ = make_scheduler(built)
    decoding = [make_request(scheduler, max_new_tokens=60) for _ in range(4)]
    scheduler.turn()
    assert all(request.first_token_at for request in decoding)
    long = make_request(scheduler, token_ids(150).tolist(), max_new_tokens=1)
    short = make_request(scheduler, token_ids(3).tolist(), max_new_tokens=1)
    before = [len(request.token_ids) for request in decoding]
    turns = 0
    while not long.is_over:
        scheduler.turn()
        turns += 1
        assert [len(request.token_ids) for request in decoding] == [n + turns for n in before]
        assert short.is_over or turns == 1, "a short question does not wait for a long one"
    assert turns == pytest.approx(150 / 12, abs=3), "where steps take no time at all, it soon has all rows there are"


def test_requests_are_admitted_in_order_of_arrival(built: Path) -> None:
    scheduler, engine, _ = make_scheduler(built, FullEngine(loaded(), max_requests=2))
    requests = [make_request(scheduler, max_new_tokens=2 + i) for i in range(6)]
    ended = []
    while any(not request.is_over for request in requests):
        scheduler.turn()
        check(scheduler)
        ended += [i for i, request in enumerate(requests) if request.is_over and i not in ended]
        assert len(engine.request_slots) <= 2
    assert ended == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("room", [0, 1, 2, 3, 7, 100])
@pytest.mark.parametrize("wants", [[], [5], [1, 50, 2], [3, 3, 3, 3]])
def test_divide_rows_fills_the_room_fairly(room, wants) -> None:
    parts = divide_rows(room, wants)
    assert sum(parts) == min(room, sum(wants))
    assert all(part <= want for part, want in zip(parts, wants, strict=True))
    hungry = [part for part, want in zip(parts, wants, strict=True) if part < want]
    assert not hungry or max(parts) - min(hungry) <= 1


@pytest.mark.parametrize(
    ("steps", "room"),
    [
        ([(4, 0, 40), (4, 8, 60)], 10),
        ([(4, 0, 40), (4, 8, 80)], 10),
        ([(4, 0, 40), (4, 8, 81)], 6),
        ([(4, 0, 40), (4, 7, 60)], 8),  # the limit was not used up
        ([(4, 0, 40), (4, 8, 81), (4, 6, 81), (4, 5, 81), (4, 4, 60)], 4),
        ([(4, 0, 40), (4, 8, 81), *[(4, 6, 60)] * 16], 6),  # no growth for 16 short steps
        ([(4, 0, 40), (4, 8, 81), *[(4, 6, 60)] * 17], 7),
        ([(4, 0, 40), *[(4, 64, 60)] * 6], 27),
        ([(4, 0, 40), *[(4, 8, 90)] * 9], 4),
        ([(4, 0, 40), *[(4, 64, 60)] * 6, (4, 1, 90)], 21),  # shrinks, whatever took so long
        ([(4, 0, 40), *[(4, 16, 90)] * 9], 4),  # 16 questions have a row each, whatever the limit
        ([(4, 0, 40), (4, 8, 90), (4, 6, 90), (4, 5, 90), (4, 4, 90), (4, 1, 90)], 4),  # never below 4
        ([(3, 0, 40), (4, 8, 90)], 8),  # the time of four decoding rows alone is not known
        ([(6, 0, 40), (4, 8, 81)], 6),  # they take no longer than six
        ([(6, 0, 40), (4, 0, 50), (4, 8, 81)], 6),
        ([(6, 0, 50), (4, 0, 40), (4, 8, 81)], 6),
        ([(4, 0, 40), *[(4, 0, 90)] * 9, (4, 8, 81)], 6),  # other load on the machine
        ([(4, 0, 40), *[(4, 0, 90)] * 600, (4, 8, 80)], 10),  # until it has lasted for all remembered steps
        ([(4, 0, 0), (4, 8, 0)], 10),
    ],
)
def test_the_question_row_limit_follows_step_times(steps, room) -> None:
    rows = QuestionRows()
    for num_decoding, num_asking, ms in steps:
        rows.add(num_decoding, num_asking, ms / 1e3)
    assert rows.limit == room


def test_the_decoding_only_step_time_expires() -> None:
    rows = QuestionRows()
    rows.add(4, 0, 0.040)
    num_steps = 0
    while rows.knows(4):
        rows.add(4, 1, 0.090)
        num_steps += 1
    assert 256 <= num_steps <= 512


def test_a_question_fills_steps_up_to_the_allowed_time_among_decoding_requests(built: Path) -> None:
    """A step takes 20 ms and 5 ms a row. Alone, the question gets all rows."""
    scheduler, _, _ = make_scheduler(built, FullEngine(loaded(), max_rows=64, max_requests=16))
    rows, sizes = QuestionRows(), list[int]()
    decoding = [make_request(scheduler, max_new_tokens=30) for _ in range(4)]
    for request in decoding:
        request.num_fed = len(request.question_ids)
    asking = make_request(scheduler, [1] * 300, max_new_tokens=30)
    assert plan_step([asking], 64, rows) == [(asking, 64)]
    for number in range(1000):
        plan = plan_step([*decoding, asking], 64, rows)
        sizes.append(sum(num_rows for _, num_rows in plan))
        slow = 3 if 500 <= number < 510 else 1  # other load on the machine
        rows.add(4, sizes[-1] - 4, slow * (0.020 + 0.005 * sizes[-1]))
        assert [num_rows for _, num_rows in plan[:4]] == [1] * 4
    assert sizes.count(4) <= 4 and set(sizes[10:500] + sizes[540:]) <= {4, 12, 14}, "twelve take 80 ms"
    assert sizes[10:500].count(14) < 30 and min(sizes[500:510]) == 8


def test_steps_continue_while_a_context_is_loaded(built: Path) -> None:
    """Loading or removing another context waits; requests that come meanwhile are begun and finished."""

    class Slow(FullEngine):
        def add_context(self, context_id, artifact, meanwhile=lambda: None):
            for part in range(6):
                parts.append((part, list(ended)))
                meanwhile()
            super().add_context(context_id, artifact)

    parts, ended = list[tuple[int, list[str]]](), list[str]()
    scheduler, engine, _ = make_scheduler(built, Slow(loaded()))
    alone_said = alone(built, {"max_new_tokens": 30})[1]
    scheduler.unload(2)
    parts.clear()
    first = make_request(scheduler, max_new_tokens=30)
    scheduler.turn()
    with open_artifact(path_of(built, SECRETS[2])) as artifact:
        load = scheduler.inbox.call(partial(scheduler.load, 2, artifact))
        unload = scheduler.inbox.call(lambda: (ended.append("unloaded"), scheduler.unload(1)))
        short, before = make_request(scheduler, max_new_tokens=2), len(first.token_ids)
        cancelled = make_request(scheduler, max_new_tokens=20)
        scheduler.inbox.cancel(cancelled)
        scheduler.turn()
    assert load.done() and not load.exception() and unload.done() and 2 in engine.contexts and 1 not in engine.contexts
    assert [part for part, _ in parts] == list(range(6)) and not any(done for _, done in parts) and ended
    assert len(first.token_ids) == before + 7, "a step for each part, and the turn's own"
    assert short.is_over and cancelled.is_over
    run(scheduler)
    assert read(first)[0] == alone_said


def test_a_stop_string_ends_the_answer_before_it(built: Path) -> None:
    text = alone(built, {"max_new_tokens": 40})[1]
    stop = text[10:13]
    scheduler, _, _ = make_scheduler(built)
    request = make_request(scheduler, max_new_tokens=40, stop=(stop,))
    run(scheduler)
    got, last = read(request)
    assert got == text[: text.index(stop)]
    assert isinstance(last, Done) and last.reason == "stop" and last.new_tokens < 40


def test_the_end_token_ends_the_answer_and_is_not_in_its_text(built: Path) -> None:
    ids, text = alone(built, {"max_new_tokens": 20})
    scheduler, _, _ = make_scheduler(built)
    scheduler._stop_ids = {ids[6]}
    request = make_request(scheduler, max_new_tokens=20)
    run(scheduler)
    got, last = read(request)
    first = ids.index(ids[6])
    assert text.startswith(got.rstrip("\ufffd"))
    assert isinstance(last, Done) and (last.reason, last.new_tokens) == ("stop", first + 1)


def test_logprobs_cover_every_token_in_order(built: Path) -> None:
    scheduler, _, _ = make_scheduler(built)
    request = make_request(scheduler, max_new_tokens=8, top_logprobs=2)
    run(scheduler)
    pieces = []
    while isinstance(event := request.outlet.take(), Piece):
        pieces.append(event)
    scores = [score for piece in pieces for score in piece.scores]
    assert [score.token_id for score in scores] == request.token_ids
    for score in scores:
        assert len(score.top) == 2
        assert score.top[0][2] == score.logprob >= score.top[1][2]
        assert score.top[0][1] == score.text.encode(errors="surrogateescape")


def test_cancelling_frees_the_slot_within_a_step(built: Path) -> None:
    scheduler, _, _ = make_scheduler(built, FullEngine(loaded(), max_requests=1))
    running, queued, last = (make_request(scheduler, max_new_tokens=50) for _ in range(3))
    scheduler.turn()
    scheduler.inbox.cancel(queued)
    scheduler.inbox.cancel(running)
    scheduler.turn()
    assert running.is_over and queued.is_over
    assert last.request_slot == 0 and len(last.token_ids) == 1
    scheduler.inbox.cancel(running)  # again: a reader always cancels when it leaves
    assert run(scheduler)
    assert read(queued) == ("", None)
