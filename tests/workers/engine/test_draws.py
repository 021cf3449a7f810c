"""Tokens drawn by a step agree with the definition."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.cuda_on_cpu.emulated import DEVICE
from workers.engine.gpu import draws
from workers.engine.gpu.draws import MAX_TOP, DrawsOnDevice
from workers.model.runner import StepOutput
from workers.serving.draw_reference import draw_reference
from workers.serving.messages import Sampling
from workers.serving.sampling import adjust_logits, draw_spec, likelihood_of
from workers.serving.step_engine import DrawSpec, Likelihood, StepRow

SEED = 5
ASKED = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.2, "top_p": 0.9},
    {"temperature": 1.5, "top_p": 0.999},
    {"top_k": 1},
    {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    {"top_k": 1000, "min_p": 0.01},
    {"temperature": 2.0, "top_p": 0.5, "top_k": 100_000, "min_p": 0.2},
    {"temperature": 0.02},
    {"temperature": 1e-300, "top_p": 1e-300},
    {"temperature": 1e-25, "top_k": 5},
    {"temperature": 1e-12, "top_k": 5, "top_p": 0.5},
    {"top_p": 0.0, "min_p": 1.5},
]


@pytest.fixture(autouse=True)
def emulated(emulator, monkeypatch) -> None:
    emulator.stand_in(monkeypatch, draws)


def make_sampling(**asked: Any) -> Sampling:
    return Sampling(**{"max_new_tokens": 1, "temperature": 1.0, **asked})


def draw_tokens(logits: np.ndarray, asked: list[DrawSpec | None]) -> tuple[list[int], list[Likelihood | None]]:
    """Draw tokens from a step's logits. A padding row of NaN follows the rows that are drawn for."""
    padded = np.concatenate([logits, np.full((1, logits.shape[1]), np.nan, np.float32)])
    there = torch.from_numpy(padded).to(DEVICE)
    next_ids = there.argmax(-1)
    next_ids[~there.amax(-1).isfinite()] = -1
    on_device = DrawsOnDevice(DEVICE, len(padded))
    rows = [StepRow(0, 7, draw=draw) for draw in asked]
    on_device.enqueue(rows, StepOutput(there, next_ids))
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    got = next_ids[: len(asked)].cpu().numpy()
    return got.tolist(), on_device.likelihoods(rows, got)


@pytest.mark.parametrize("vocab_size", [1, 31, 1023, 1025, 8191, 8193, 20_000])
def test_drawn_tokens_equal_the_reference(vocab_size, rng) -> None:
    logits = (2 * rng.standard_normal(vocab_size)).astype(np.float32)
    logits[::3] = np.round(logits[::3], 1)  # many ties
    logits[rng.permutation(vocab_size)[: vocab_size // 2]] = -np.inf
    samplings = [make_sampling(**asked) for asked in ASKED for _ in range(3)]
    draws_ = [draw_spec(sampling, SEED, position) for position, sampling in enumerate(samplings)]
    got, _ = draw_tokens(np.tile(logits, (len(draws_), 1)), draws_)
    for token_id, sampling, draw in zip(got, samplings, draws_, strict=True):
        if sampling.temperature < 1e-9 or sampling.top_p == 0:
            assert token_id == logits.argmax(), sampling
        else:
            assert token_id in draw_reference(logits, sampling, draw.at), (sampling, draw)


def test_all_token_masks_are_started_before_the_first_is_awaited() -> None:
    did = []

    def allowed(number: int, vocab_size: int):
        did.append(("begun", number))
        return lambda: did.append(("wanted", number)) or np.arange(vocab_size) == number

    draws_ = [draw_spec(make_sampling(), SEED, 0, allowed=partial(allowed, number)) for number in range(2)]
    assert draw_tokens(np.zeros((2, 40), np.float32), draws_)[0] == [0, 1]
    assert did == [("begun", 0), ("begun", 1), ("wanted", 0), ("wanted", 1)]


@pytest.mark.parametrize("scale", [0.0, 1e-6, 1e-3, 1e3])
def test_tokens_drawn_from_flat_and_steep_logits_equal_the_reference(scale, rng) -> None:
    logits = (scale * rng.standard_normal(3000)).astype(np.float32)
    samplings = [make_sampling(top_p=top_p, top_k=top_k) for top_p in (0.1, 0.9, 1.0) for top_k in (0, 7, 2000)]
    draws_ = [draw_spec(sampling, SEED, position) for position, sampling in enumerate(samplings)]
    got, _ = draw_tokens(np.tile(logits, (len(draws_), 1)), draws_)
    for token_id, sampling, draw in zip(got, samplings, draws_, strict=True):
        assert token_id in draw_reference(logits, sampling, draw.at), (sampling, draw)


@pytest.mark.parametrize("at", [0.0, 0.25, np.nextafter(0.5, 0), 0.5, np.nextafter(1.0, 0)])
def test_tokens_with_logit_minus_infinity_are_never_drawn(at) -> None:
    places, ways = [0, 511, 1024, 8192, 8999], [(0, 1.0), (5, 1.0), (0, 0.5), (5, 0.5), (1, 1.0)]
    logits = np.full((len(places) * len(ways), 9000), -np.inf, np.float32)
    logits[np.arange(len(logits)), np.repeat(places, len(ways))] = 3.0
    asked = [DrawSpec(temperature=0.5, top_p=p, top_k=k, min_p=0.0, at=at) for _ in places for k, p in ways]
    got, _ = draw_tokens(logits, asked)
    assert got == np.repeat(places, len(ways)).tolist()


def test_bias_penalties_and_masks_change_the_draw_but_not_the_likelihoods(rng) -> None:
    vocab_size = 2001
    logits = rng.standard_normal((10, vocab_size)).astype(np.float32)
    logits[:, ::5] = np.round(logits[:, ::5], 1)  # ties
    likely = [int(row.argmax()) for row in logits]
    told, some = [likely[1], likely[1], 5], rng.random(vocab_size) < 0.5
    one = np.arange(vocab_size) == 1999
    greedy = make_sampling(temperature=0.0)
    asked = [
        draw_spec(make_sampling(logit_bias=((3, 100.0), (1999, -2.0), (vocab_size, 100.0)), top_logprobs=0), SEED, 0),
        draw_spec(replace(greedy, frequency_penalty=1.0, presence_penalty=0.5, top_logprobs=MAX_TOP), SEED, 0, told),
        draw_spec(replace(greedy, top_logprobs=5), SEED, 0, ends={likely[2]}),
        draw_spec(greedy, SEED, 0, ends={likely[3], 5}),
        draw_spec(replace(greedy, logit_bias=((8, -100.0),)), SEED, 0),
        draw_spec(replace(greedy, top_logprobs=3), SEED, 0, allowed=lambda vocab_size: lambda: ~some[:vocab_size]),
        draw_spec(make_sampling(top_logprobs=0), SEED, 0, allowed=lambda vocab_size: lambda: one),
        draw_spec(replace(greedy, repetition_penalty=1.7, top_logprobs=1), SEED, 0, told, in_prompt=some),
        draw_spec(
            replace(greedy, repetition_penalty=0.5, logit_bias=((likely[8], 9.0),), top_logprobs=1),
            SEED,
            0,
            told,
            in_prompt=~some,
            allowed=lambda vocab_size: lambda: np.ones(vocab_size, bool),
        ),
        draw_spec(make_sampling(), SEED, 0, allowed=lambda vocab_size: lambda: np.zeros(vocab_size, bool)),
    ]
    got, likelihoods = draw_tokens(logits, asked)
    wanted = [int(adjust_logits(row, draw).argmax()) for row, draw in zip(logits, asked, strict=True)]
    assert got == [*wanted[:-1], -1] and got[0] == 3 and got[2] != likely[2] and got[6] == 1999
    for row, token_id, draw, of in zip(logits, got, asked, likelihoods, strict=True):
        if draw.num_top is None:
            assert of is None
        else:
            want = likelihood_of(row, token_id, draw.num_top)
            assert of is not None and of.top == want.top
            assert (of.logit, of.log_total) == pytest.approx((want.logit, want.log_total), abs=2e-6)


def test_rows_without_a_draw_get_the_argmax_and_rows_with_nan_or_inf_get_no_token(rng) -> None:
    logits = rng.standard_normal((4, 100)).astype(np.float32)
    logits[1, 5], logits[2, 6] = np.nan, np.inf
    draw = draw_spec(make_sampling(top_p=0.5, top_logprobs=2), SEED, 0)
    got, likelihoods = draw_tokens(logits, [None, draw, draw, draw])
    assert got[:3] == [int(logits[0].argmax()), -1, -1] and got[3] in draw_reference(
        logits[3], make_sampling(top_p=0.5), draw.at
    )
    assert [of is None for of in likelihoods] == [True, True, True, False]


def test_very_negative_logits_do_not_change_the_order_of_the_others(rng) -> None:
    logits = rng.standard_normal((2, 3000)).astype(np.float32)
    logits[0, 7], logits[1, 5:9] = -1e30, [-3e38, -1e20, -1e10, -100]
    draw = draw_spec(make_sampling(top_p=0.9, top_logprobs=MAX_TOP), SEED, 0)
    got, likelihoods = draw_tokens(logits, [draw, draw])
    for row, token_id, of in zip(logits, got, likelihoods, strict=True):
        assert token_id in draw_reference(row, make_sampling(top_p=0.9), draw.at)
        assert of is not None and of.top == likelihood_of(row, token_id, MAX_TOP).top
    steep = np.full((1, 40), -1e30, np.float32)
    steep[0, [30, 20, 10, 5]] = [0, -1e3, -1e6, -1e9]
    (_,), (of,) = draw_tokens(steep, [draw_spec(make_sampling(top_logprobs=5), SEED, 0)])
    assert of is not None and [token_id for token_id, _ in of.top] == [30, 20, 10, 5, 0]


def test_the_likelihood_of_a_penalized_token_is_reported_without_the_penalty() -> None:
    """With one row in the step, whose mask is the first data that is sent."""
    logits = np.array([[3.0, 9.0, -1.0]], np.float32)
    repeated = np.array([True, True, False])
    for penalty in (1.5, 0.5):
        draw = draw_spec(
            make_sampling(temperature=0.0, repetition_penalty=penalty, top_logprobs=1), SEED, 0, in_prompt=repeated
        )
        got, (of,) = draw_tokens(logits.copy(), [draw])
        assert got == [1] and of is not None and of.logit == pytest.approx(9.0, abs=1e-5)
    draw = draw_spec(
        make_sampling(temperature=0.0, repetition_penalty=8.0), SEED, 0, in_prompt=np.array([False, True, False])
    )
    assert draw_tokens(logits.copy(), [draw])[0] == [0]


def test_a_drawn_token_does_not_depend_on_other_rows_of_the_step(rng) -> None:
    logits = rng.standard_normal((6, 5000)).astype(np.float32)
    asked: list[DrawSpec | None] = [draw_spec(make_sampling(top_p=0.9, top_k=50 * i), SEED, i) for i in range(6)]
    together, _ = draw_tokens(logits, asked)
    assert together == [draw_tokens(logits[i : i + 1], asked[i : i + 1])[0][0] for i in range(6)]
    assert (
        together
        != draw_tokens(logits, [draw_spec(make_sampling(top_p=0.9, top_k=50 * i), SEED + 1, i) for i in range(6)])[0]
    )


def test_more_logit_changes_than_the_buffer_holds_are_all_applied() -> None:
    ids = np.arange(3000, dtype=np.int32)
    draw = DrawSpec(
        temperature=1.0, top_p=1.0, top_k=1, min_p=0.0, at=0.0, added_ids=ids, added=np.linspace(0, 1, 3000, dtype="f4")
    )
    assert draw_tokens(np.zeros((1, 3000), np.float32), [draw])[0] == [2999]
