"""Sampling: filters and penalties equal their definitions, and draws depend only on seed and position."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from csattn.cpu.jit import readonly
from workers.serving.draw_kernel import Scratch, draw_kernel
from workers.serving.draw_reference import draw_reference, kept_reference
from workers.serving.messages import Sampling
from workers.serving.sampling import TokenCounts, adjust_logits, draw, draw_spec, log_total, top_ids


def draw_at(logits: np.ndarray, sampling: Sampling, seed: int, position: int) -> int:
    return draw(logits, draw_spec(sampling, seed, position))


def how(temperature: float, top_p: float = 1.0, **more: Any) -> Sampling:
    return Sampling(max_new_tokens=1, temperature=temperature, top_p=top_p, **more)


def drawn(logits: np.ndarray, temperature: float, top_p: float, num: int, seed: int = 0) -> np.ndarray:
    tokens = [draw_at(logits, how(temperature, top_p), seed, position) for position in range(num)]
    return np.bincount(tokens, minlength=len(logits))


def test_temperature_0_takes_the_lowest_id_of_the_likeliest_tokens() -> None:
    assert draw_at(np.array([1, 5, 2, 5], np.float32), how(0.0), 0, 0) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("logits", [[0.0, np.nan, 1.0], [np.nan] * 3, [0.0, np.inf, 1.0], [-np.inf] * 3])
def test_logits_without_a_distribution_are_refused(logits, temperature) -> None:
    with pytest.raises(ValueError, match="the greatest is"):
        draw_at(np.array(logits, np.float32), how(temperature, 0.9), 0, 0)


def test_a_tiny_temperature_takes_the_likeliest_token(rng) -> None:
    logits = rng.standard_normal(100).astype(np.float32)
    assert {draw_at(logits, how(1e-300), 7, position) for position in range(20)} == {int(logits.argmax())}


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_top_p_draws_exactly_from_the_nucleus(top_p, temperature, rng) -> None:
    logits = np.round(rng.standard_normal(12), 1).astype(np.float32)
    logits[5] = logits[2]  # a tie
    kept = kept_reference(logits, how(temperature, top_p))
    shares = np.exp(logits.astype(np.float64) / temperature)
    shares /= shares[kept].sum()
    drawn_ids = set(np.flatnonzero(drawn(logits, temperature, top_p, 2000)))
    assert drawn_ids <= set(kept)
    assert drawn_ids >= {token_id for token_id in kept if 2000 * shares[token_id] > 20}


@pytest.mark.parametrize("top_p", [0.1, 0.5, 1.0])
def test_equal_tokens_enter_the_nucleus_in_id_order(top_p) -> None:
    counts = drawn(np.zeros(10, np.float32), 1.0, top_p, 2000)
    assert set(np.flatnonzero(counts)) == set(range(round(10 * top_p)))


@pytest.mark.parametrize("asked", [how(1.0, 0.0), how(1.0, min_p=1.5), how(1.0, 1e-300, top_k=3)], ids=str)
def test_filters_leave_at_least_the_likeliest_token(asked, rng) -> None:
    logits = rng.standard_normal(100).astype(np.float32)
    assert draw_at(logits, asked, 1, 2) == int(logits.argmax())


def test_drawn_frequencies_fit_the_distribution(rng) -> None:
    """Chi-square test with 7 degrees of freedom: 24.3 is exceeded once in a thousand."""
    logits, num = rng.standard_normal(8).astype(np.float32), 20_000
    shares = np.exp(logits.astype(np.float64) / 0.8)
    want = num * shares / shares.sum()
    assert (((drawn(logits, 0.8, 1.0, num) - want) ** 2) / want).sum() < 24.3


def test_top_p_holds_for_a_large_vocabulary(rng) -> None:
    """The distribution is so flat that thousands of tokens are kept."""
    logits = (0.1 * rng.standard_normal(20_000)).astype(np.float32)
    kept = kept_reference(logits, how(1.0, 0.6))
    assert len(kept) > 5000
    assert set(np.flatnonzero(drawn(logits, 1.0, 0.6, 300))) <= set(kept)


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 511, 513, 2000, 40_000])
@pytest.mark.parametrize(
    "asked",
    [
        how(1.0),
        how(0.2, 0.9),
        how(1.5, 0.999),
        how(1.0, top_k=1),
        how(0.7, 0.8, top_k=20),
        how(1.0, top_k=1000, min_p=0.01),
        how(2.0, 0.5, top_k=100_000, min_p=0.2),
        how(0.02),
    ],
    ids=str,
)
def test_the_drawn_token_equals_the_reference(vocab_size, asked, rng) -> None:
    logits = (2 * rng.standard_normal(vocab_size)).astype(np.float32)
    logits[::3] = np.round(logits[::3], 1)  # many are equal
    logits[rng.permutation(vocab_size)[: vocab_size // 2]] = -np.inf  # half of all tokens are forbidden
    seed = 5
    for position in range(40):
        at = np.random.Generator(np.random.Philox(key=seed, counter=position)).random()
        assert draw_at(logits, asked, seed, position) in draw_reference(logits, asked, at)


@pytest.mark.parametrize("at", [0.0, 0.25, np.nextafter(0.5, 0), 0.5, np.nextafter(1.0, 0)])
@pytest.mark.parametrize("place", [0, 511, 512, 1023, 1999])
def test_tokens_of_zero_weight_are_never_drawn(place, at) -> None:
    logits = np.full(2000, -np.inf, np.float32)
    logits[place] = 3.0
    rooms = Scratch().of(2000)
    for top_k, top_p in [(0, 1.0), (5, 1.0), (0, 0.5), (5, 0.5)]:
        for room in rooms:
            room.fill(3)  # left by an earlier draw
        how_it_is_drawn = np.float32(3), np.float32(0.5), np.float32(0), top_k, top_p, at
        assert draw_kernel(readonly(logits), *how_it_is_drawn, *rooms) == place


def test_draws_depend_only_on_seed_and_position(rng) -> None:
    logits = rng.standard_normal((4, 50)).astype(np.float32)
    forward = [[draw_at(row, how(1.0, 0.9), 11, position) for row in logits] for position in range(30)]
    backward = [
        [draw_at(row, how(1.0, 0.9), 11, position) for row in logits[::-1]][::-1] for position in range(29, -1, -1)
    ]
    assert forward == backward[::-1]
    assert forward != [[draw_at(row, how(1.0, 0.9), 12, position) for row in logits] for position in range(30)]
    assert draw_at(logits[0], how(1.0), 2**64 - 1, 0) in range(50)


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.integers(0, 50))
def test_top_ids_orders_by_value_then_id(values, num) -> None:
    want = sorted(range(len(values)), key=lambda i: (-values[i], i))[:num]
    assert top_ids(np.array(values, np.float64), num).tolist() == want


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 511, 513, 2000, 40_000])
def test_log_total_equals_logsumexp(vocab_size, rng) -> None:
    logits = (5 * rng.standard_normal(vocab_size)).astype(np.float32)
    assert log_total(logits) == pytest.approx(float(torch.from_numpy(logits).double().logsumexp(0)), abs=1e-5)


def test_log_probabilities_sum_to_one_and_survive_large_logits() -> None:
    logits = np.array([1e4, 1e4 - 1, -1e4], np.float32)
    logprobs = logits.astype(np.float64) - log_total(logits)
    assert np.exp(logprobs).sum() == pytest.approx(1.0)
    assert logprobs[0] - logprobs[1] == pytest.approx(1.0)


@pytest.mark.parametrize("top_k", [1, 3, 7, 12, 100])
def test_top_k_and_min_p_keep_only_the_likeliest_tokens(top_k, rng) -> None:
    logits = np.round(rng.standard_normal(12), 1).astype(np.float32)
    logits[5] = logits[2]  # a tie
    best = sorted(range(12), key=lambda i: (-logits[i], i))
    ids = {draw_at(logits, how(1.0, top_k=top_k), 3, position) for position in range(500)}
    assert ids <= set(best[:top_k]) and len(ids) >= min(top_k, 3)
    shares = np.exp(logits - logits.max())
    ids = {draw_at(logits, how(1.0, min_p=0.5), 3, position) for position in range(500)}
    assert ids <= set(np.flatnonzero(shares >= 0.5)) and int(logits.argmax()) in ids


def adjusted_by_definition(logits, asked, answer, in_prompt, allowed) -> list[float]:
    out = []
    for token_id, logit in enumerate(logits.tolist()):
        if token_id in answer or (in_prompt is not None and in_prompt[token_id]):
            logit = logit / asked.repetition_penalty if logit > 0 else logit * asked.repetition_penalty
        logit -= asked.frequency_penalty * answer.count(token_id)
        logit -= asked.presence_penalty * (token_id in answer)
        logit += dict(asked.logit_bias).get(token_id, 0.0)
        out.append(logit if allowed is None or allowed[token_id] else -np.inf)
    return out


@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.7])
@pytest.mark.parametrize("allowed", [None, [True, False, True, True, False]])
@pytest.mark.parametrize("answer", [[], [2], [4, 4, 0, 4]])
def test_penalties_bias_and_mask_adjust_logits_as_the_reference(penalty, allowed, answer) -> None:
    logits = np.array([2.0, -1.0, 0.5, 0.0, -3.0], np.float32)
    before = logits.copy()
    asked = how(
        1.0,
        repetition_penalty=penalty,
        frequency_penalty=0.25,
        presence_penalty=-0.5,
        logit_bias=((1, 5.0), (4, -2.5), (99, 7.0)),
    )
    in_prompt = np.array([False, True, False, False, False]) if penalty != 1.0 else None
    mask = None if allowed is None else np.array(allowed)
    allows = None if mask is None else lambda vocab_size: lambda: mask[:vocab_size]
    got = adjust_logits(logits, draw_spec(asked, 0, 0, answer, in_prompt, allowed=allows))
    np.testing.assert_allclose(got, adjusted_by_definition(logits, asked, answer, in_prompt, mask), rtol=1e-6)
    np.testing.assert_array_equal(logits, before)


class Answer(list[int]):
    """Counts how many of its tokens are read."""

    num_read = 0

    def __iter__(self) -> Iterator[int]:
        self.num_read += len(self)
        return super().__iter__()

    def __getitem__(self, which: Any) -> Any:
        found = super().__getitem__(which)
        self.num_read += len(found) if isinstance(which, slice) else 1
        return found


def test_penalty_counts_read_each_answer_token_once(rng) -> None:
    asked = how(1.0, repetition_penalty=1.3, frequency_penalty=0.25, presence_penalty=0.5, logit_bias=((1, 5.0),))
    logits, in_prompt, counted, answer = np.ones(200, np.float32), np.zeros(200, bool), TokenCounts(), Answer()
    for position, token_id in enumerate(rng.integers(0, 200, 300).tolist()):
        answer.append(token_id)
        how_to = draw_spec(asked, 0, position, answer, in_prompt, counted=counted)
        assert answer.num_read == len(answer)
    want = adjusted_by_definition(logits, asked, list(answer), in_prompt, None)
    np.testing.assert_allclose(adjust_logits(logits, how_to), want, rtol=1e-5)


def test_logits_are_unchanged_without_adjustments() -> None:
    logits = np.ones(3, np.float32)
    assert adjust_logits(logits, draw_spec(how(1.0), 0, 0, [1, 2])) is logits
