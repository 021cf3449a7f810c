"""Drawing tokens: the definition of top_p, frequencies, and the same draw whatever else is drawn."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.serving.messages import Sampling
from workers.serving.sampling import adjusted, draw, likeliest, log_probabilities


def how(temperature: float, top_p: float = 1.0, **more: Any) -> Sampling:
    return Sampling(max_new_tokens=1, temperature=temperature, top_p=top_p, **more)


def nucleus_by_definition(logits: np.ndarray, temperature: float, top_p: float) -> list[int]:
    """The fewest of the likeliest tokens that have top_p together; of equal ones the lowest id first."""
    shares = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    shares /= shares.sum()
    kept, total = [], 0.0
    for token_id in sorted(range(len(logits)), key=lambda i: (-shares[i], i)):
        kept.append(token_id)
        total += shares[token_id]
        if total >= top_p:
            break
    return kept


def drawn(logits: np.ndarray, temperature: float, top_p: float, num: int, seed: int = 0) -> np.ndarray:
    tokens = [draw(logits, how(temperature, top_p), seed, position) for position in range(num)]
    return np.bincount(tokens, minlength=len(logits))


def test_temperature_0_takes_the_lowest_of_the_likeliest() -> None:
    assert draw(np.array([1, 5, 2, 5], np.float32), how(0.0), 0, 0) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("logits", [[0.0, np.nan, 1.0], [np.nan] * 3, [0.0, np.inf, 1.0], [-np.inf] * 3])
def test_nothing_is_drawn_from_what_is_no_distribution(logits, temperature) -> None:
    with pytest.raises(ValueError, match="the greatest is"):
        draw(np.array(logits, np.float32), how(temperature, 0.9), 0, 0)


def test_hardly_any_temperature_takes_the_likeliest(rng) -> None:
    logits = rng.standard_normal(100).astype(np.float32)
    assert {draw(logits, how(1e-300), 7, position) for position in range(20)} == {int(logits.argmax())}


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_exactly_the_nucleus_is_drawn_from(top_p, temperature, rng) -> None:
    logits = np.round(rng.standard_normal(12), 1).astype(np.float32)
    logits[5] = logits[2]  # a tie
    kept = nucleus_by_definition(logits, temperature, top_p)
    shares = np.exp(logits.astype(np.float64) / temperature)
    shares /= shares[kept].sum()
    drawn_ids = set(np.flatnonzero(drawn(logits, temperature, top_p, 2000)))
    assert drawn_ids <= set(kept)
    assert drawn_ids >= {token_id for token_id in kept if 2000 * shares[token_id] > 20}


@pytest.mark.parametrize("top_p", [0.1, 0.5, 1.0])
def test_all_equal_tokens_enter_by_their_ids(top_p) -> None:
    counts = drawn(np.zeros(10, np.float32), 1.0, top_p, 2000)
    assert set(np.flatnonzero(counts)) == set(range(round(10 * top_p)))


def test_frequencies_are_the_shares(rng) -> None:
    """Chi-square with 7 degrees of freedom: 24.3 is passed once in a thousand."""
    logits, num = rng.standard_normal(8).astype(np.float32), 20_000
    shares = np.exp(logits.astype(np.float64) / 0.8)
    want = num * shares / shares.sum()
    assert (((drawn(logits, 0.8, 1.0, num) - want) ** 2) / want).sum() < 24.3


def test_a_large_vocabulary_is_drawn_from_like_a_small_one(rng) -> None:
    """Flat enough for the first look at the likeliest tokens not to be enough."""
    logits = (0.1 * rng.standard_normal(20_000)).astype(np.float32)
    kept = nucleus_by_definition(logits, 1.0, 0.6)
    assert len(kept) > 5000
    assert set(np.flatnonzero(drawn(logits, 1.0, 0.6, 300))) <= set(kept)


def test_seed_and_position_alone_decide(rng) -> None:
    logits = rng.standard_normal((4, 50)).astype(np.float32)
    forward = [[draw(row, how(1.0, 0.9), 11, position) for row in logits] for position in range(30)]
    backward = [
        [draw(row, how(1.0, 0.9), 11, position) for row in logits[::-1]][::-1] for position in range(29, -1, -1)
    ]
    assert forward == backward[::-1]
    assert forward != [[draw(row, how(1.0, 0.9), 12, position) for row in logits] for position in range(30)]
    assert draw(logits[0], how(1.0), 2**64 - 1, 0) in range(50)


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.integers(0, 50))
def test_likeliest_orders_by_value_then_id(values, num) -> None:
    want = sorted(range(len(values)), key=lambda i: (-values[i], i))[:num]
    assert likeliest(np.array(values, np.float64), num).tolist() == want


def test_log_probabilities_sum_to_one_and_survive_large_logits() -> None:
    logprobs = log_probabilities(np.array([1e4, 1e4 - 1, -1e4], np.float32))
    assert np.exp(logprobs).sum() == pytest.approx(1.0)
    assert logprobs[0] - logprobs[1] == pytest.approx(1.0)


@pytest.mark.parametrize("top_k", [1, 3, 7, 12, 100])
def test_top_k_and_min_p_leave_the_likeliest(top_k, rng) -> None:
    logits = np.round(rng.standard_normal(12), 1).astype(np.float32)
    logits[5] = logits[2]  # a tie
    best = sorted(range(12), key=lambda i: (-logits[i], i))
    ids = {draw(logits, how(1.0, top_k=top_k), 3, position) for position in range(500)}
    assert ids <= set(best[:top_k]) and len(ids) >= min(top_k, 3)
    shares = np.exp(logits - logits.max())
    ids = {draw(logits, how(1.0, min_p=0.5), 3, position) for position in range(500)}
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
def test_logits_are_adjusted_by_the_definition(penalty, allowed, answer) -> None:
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
    got = adjusted(logits, asked, answer, in_prompt, mask)
    np.testing.assert_allclose(got, adjusted_by_definition(logits, asked, answer, in_prompt, mask), rtol=1e-6)
    np.testing.assert_array_equal(logits, before)


def test_nothing_asked_for_changes_nothing() -> None:
    logits = np.ones(3, np.float32)
    assert adjusted(logits, how(1.0), [1, 2], None, None) is logits
