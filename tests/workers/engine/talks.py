"""Helpers that run requests on an engine: one alone, or many together with their tokens split over steps at random."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from csattn.config import SearchConfig
from csattn.selector_names import SelectorName
from workers.engine.cpu.engine import CpuEngine
from workers.serving.step_engine import Reading, StepEngine, StepRow

RESTS = (None, None, "sketch", "moments", "none")  # over an artifact with a sketch
SELECTORS = ("csattn", "exact", "full", "window")


@dataclass
class Talk:
    """A request that a test runs: it is fed its question, then its own greedy tokens."""

    context_id: int
    config: SearchConfig
    selector: str
    question: list[int]
    num_new: int
    fed: int = 0
    tokens: list[int] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)  # after the question, and after each token

    @property
    def done(self) -> bool:
        return len(self.tokens) == self.num_new

    def next_rows(self, at_most: int) -> list[int]:
        """Return the token ids to feed next."""
        left = self.question[self.fed :]
        return left[:at_most] if left else self.tokens[-1:]

    def take(self, num_rows: int, next_ids: np.ndarray, logits: np.ndarray) -> None:
        self.fed += num_rows
        if self.fed >= len(self.question):
            self.tokens.append(int(next_ids[-1]))
            self.logits.append(logits[-1].copy())


def alone(engine: CpuEngine, talk: Talk) -> Talk:
    """Run the same request alone, with its question in steps as large as possible."""
    again = Talk(talk.context_id, talk.config, talk.selector, talk.question, talk.num_new)
    engine.open(0, again.context_id, again.config, again.selector)
    while not again.done:
        rows = again.next_rows(engine.max_rows)
        result = engine.step([StepRow(0, token_id) for token_id in rows], want_logits=True)
        again.take(len(rows), result.next_ids, result.logits)
    engine.close_request(0)
    return again


def reading_of(engine: StepEngine, talk: Talk) -> Reading:
    """Return what a talk that has been run reads when its tokens are fed one by one."""
    engine.open(0, talk.context_id, talk.config, talk.selector)  # type: ignore[arg-type]
    for token_id in [*talk.question, *talk.tokens[:-1]]:
        engine.step([StepRow(0, token_id)])
    reading = engine.reading(0)
    engine.close_request(0)
    return reading


def with_drafts(engine: StepEngine, talk: Talk, rng: np.random.Generator) -> tuple[Talk, Reading]:
    """Run a talk that has been run before again, alone, with drafts of its tokens of which some are wrong.

    Also returns what it has read: a row that is dropped does not count.
    """
    again = Talk(talk.context_id, talk.config, talk.selector, talk.question, talk.num_new)
    engine.open(0, again.context_id, again.config, again.selector)  # type: ignore[arg-type]
    while not again.done:
        fed, draft = again.next_rows(engine.max_rows), list[int]()
        if again.tokens:
            right = talk.tokens[len(again.tokens) : -1][: rng.integers(min(8, engine.max_rows))]
            draft = [token_id if rng.random() < 0.8 else (token_id + 1) % 256 for token_id in right]
        rows = [
            *(StepRow(0, token_id) for token_id in fed),
            *(StepRow(0, token_id, is_draft=True) for token_id in draft),
        ]
        result = engine.step(rows, want_logits=True)
        again.take(len(fed), result.next_ids[: len(fed)], result.logits[: len(fed)])
        num_right = 0
        while num_right < len(draft) and draft[num_right] == again.tokens[-1]:
            num_right += 1
            row = slice(len(fed) + num_right - 1, len(fed) + num_right)
            again.take(1, result.next_ids[row], result.logits[row])
        engine.drop_rows(0, len(draft) - num_right)
    reading = engine.reading(0)
    engine.close_request(0)
    return again, reading


def assert_same(got: Talk, want: Talk) -> None:
    assert got.tokens == want.tokens
    np.testing.assert_array_equal(np.stack(got.logits), np.stack(want.logits))


def random_talks(
    rng: np.random.Generator,
    num_talks: int,
    selectors: tuple[str, ...] = SELECTORS,
    rests: tuple[str | None, ...] = RESTS,
) -> list[Talk]:
    talks = []
    for number in range(num_talks):
        selector = str(rng.choice(selectors)) if rng.random() < 0.5 else "csattn"
        config = SearchConfig(
            keep=float(rng.choice([0.02, 0.05, 1.0], p=[0.3, 0.6, 0.1])),
            window_len=int(rng.choice([16, 64])),
            lookahead=int(rng.integers(2)),
            search_period=int(rng.choice([1, 1, 3])),
            rest=rng.choice(rests) if selector in ("csattn", "exact") else None,
        )
        question = rng.integers(0, 256, rng.integers(1, 30)).tolist()
        talks.append(Talk(number % 2, config, selector, question, int(rng.integers(1, 8))))
    return talks


def run_together(engine: CpuEngine, talks: list[Talk], rng: np.random.Generator) -> None:
    """Run all requests, opening them as slots become free. Questions are split at random, rows of a step shuffled."""
    waiting, running = list(talks), {}
    while waiting or running:
        for request_slot in range(engine.max_requests):
            if request_slot not in running and waiting and rng.random() < 0.7:
                running[request_slot] = waiting.pop(0)
                engine.open(
                    request_slot,
                    running[request_slot].context_id,
                    running[request_slot].config,
                    running[request_slot].selector,
                )
        batch: list[tuple[int, int]] = []
        for request_slot in rng.permutation(list(running)):
            room = engine.max_rows - len(batch)
            if room and rng.random() < 0.8:
                batch += [
                    (int(request_slot), token)
                    for token in running[request_slot].next_rows(int(rng.integers(1, room + 1)))
                ]
        if not batch:
            continue
        # requests are interleaved, but the tokens of each stay in order
        order = np.argsort(rng.random(len(batch)))
        places = {request_slot: iter([token for s, token in batch if s == request_slot]) for request_slot in running}
        rows = [StepRow(batch[i][0], next(places[batch[i][0]])) for i in order]
        watch = None
        if engine.num_layers and rng.random() < 0.3:
            watch = int(rng.integers(len(rows))), int(rng.integers(engine.num_layers))
        result = engine.step(rows, want_logits=True, watch=watch)
        assert (result.fidelity is None) == (watch is None)
        for request_slot in {row.request_slot for row in rows}:
            mine = [i for i, row in enumerate(rows) if row.request_slot == request_slot]
            running[request_slot].take(len(mine), result.next_ids[mine], result.logits[mine])
            if running[request_slot].done:
                del running[request_slot]
                engine.close_request(request_slot)


def next_ids_beside_nan(
    engine: StepEngine, embedding: Tensor, config: SearchConfig, selector: SelectorName = "csattn"
) -> list[int]:
    """Return the next ids of two new requests of context 0: one fed token 5, one token 7, whose embedding is NaN."""
    kept = embedding[7].clone()
    embedding[7] = torch.nan
    try:
        engine.open(0, 0, config, selector)
        engine.open(1, 0, config, selector)
        next_ids: list[int] = engine.step([StepRow(0, 5), StepRow(1, 7)]).next_ids.tolist()
    finally:
        embedding[7] = kept
    return next_ids
