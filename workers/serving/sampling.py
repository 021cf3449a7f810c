"""Sample the next token from a step's logits on the host, and compute its log-probability."""

import math
from collections.abc import Callable, Sequence, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.jit import readonly
from workers.serving.draw_kernel import Scratch, draw_kernel, weigh_all
from workers.serving.messages import Sampling
from workers.serving.step_engine import Allowed, DrawSpec, Likelihood

_SCRATCH = Scratch()
_LEAST_TOP_P = 1e-9  # keeps the most likely token alone
_COLDEST = 1e-30  # temperature at and below which only the most likely tokens have any weight


class TokenCounts:
    """Counts an answer's tokens incrementally, so that the work of a step does not grow with the answer."""

    def __init__(self) -> None:
        self._num_counted = 0  # tokens
        self._places: dict[int, int] = {}
        self._ids, self._counts = np.zeros(64, np.int64), np.zeros(64, np.int64)

    def count(self, token_ids: Sequence[int]) -> None:
        """Count the tokens that are new since the last call. token_ids: all of the answer so far."""
        for token_id in token_ids[self._num_counted :]:
            place = self._places.setdefault(token_id, len(self._places))
            if place == len(self._ids):
                self._ids, self._counts = (np.concatenate([x, np.zeros_like(x)]) for x in (self._ids, self._counts))
            self._ids[place] = token_id
            self._counts[place] += 1
        self._num_counted = len(token_ids)

    @property
    def ids(self) -> NDArray[np.int64]:
        """The distinct tokens, in the order of their first occurrence: [num_ids]."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> NDArray[np.int64]:
        """How often each of `ids` has occurred: [num_ids]."""
        return self._counts[: len(self._places)]

    def place_of(self, token_id: int) -> int | None:
        """The token's place in `ids`; None if it has not occurred."""
        return self._places.get(token_id)


def draw_spec(
    sampling: Sampling,
    seed: int,
    position: int,  # of the token in the answer
    token_ids: Sequence[int] = (),  # of the answer so far
    in_prompt: NDArray[np.bool_] | None = None,  # [vocab_size]: context or question has the token; None: no penalty
    ends: Set[int] = frozenset(),  # tokens that may not come now
    allowed: Callable[[int], Allowed] | None = None,  # as in `DrawSpec`
    counted: TokenCounts | None = None,  # this answer's, kept from step to step
) -> DrawSpec:
    """Return how to sample the token at a position of the answer.

    Temperature 0 takes the argmax. Otherwise candidates are the top_k most likely tokens with at least min_p of the
    greatest probability; of these, the fewest most likely whose probabilities reach top_p of the candidates' sum.
    """
    repeated, counts = None, TokenCounts() if counted is None else counted
    is_penalised = in_prompt is not None and sampling.repetition_penalty != 1.0
    if is_penalised or sampling.frequency_penalty or sampling.presence_penalty:
        counts.count(token_ids)
    if in_prompt is not None and is_penalised:
        repeated = in_prompt.copy()
        repeated[counts.ids] = True
    added_ids, added = _additions(sampling, counts, ends)
    is_greedy = sampling.temperature == 0
    return DrawSpec(
        temperature=max(sampling.temperature, _COLDEST),
        top_p=max(sampling.top_p, _LEAST_TOP_P),
        top_k=1 if is_greedy else sampling.top_k,
        min_p=min(sampling.min_p, 1.0),
        at=0.0 if is_greedy else np.random.Generator(np.random.Philox(key=seed, counter=position)).random(),
        repeated=repeated,
        penalty=sampling.repetition_penalty,
        added_ids=added_ids,
        added=added,
        allowed=allowed,
        num_top=sampling.top_logprobs,
    )


def _additions(sampling: Sampling, counts: TokenCounts, ends: Set[int]) -> "tuple[NDArray[Any], NDArray[Any]]":
    """Sum up what penalties and biases add to logits: distinct token ids, and values. -inf forbids a token."""
    added = dict.fromkeys(ends, -math.inf)
    for token_id, bias in sampling.logit_bias:
        added[token_id] = added.get(token_id, 0.0) + bias
    if not (sampling.frequency_penalty or sampling.presence_penalty):
        return np.fromiter(added, np.int32), np.fromiter(added.values(), np.float32)
    values = -(sampling.frequency_penalty * counts.counts + sampling.presence_penalty)
    others = {}
    for token_id, value in added.items():
        if (place := counts.place_of(token_id)) is None:
            others[token_id] = value
        else:
            values[place] += value
    ids = np.concatenate([counts.ids, np.fromiter(others, np.int64)])
    return ids.astype(np.int32), np.concatenate([values, np.fromiter(others.values(), np.float64)]).astype(np.float32)


def adjust_logits(
    logits: NDArray[np.float32],  # [vocab_size], not modified
    spec: DrawSpec,
) -> NDArray[np.float32]:
    """Apply the penalty, the additions, and -inf to tokens that may not be drawn, in that order: [vocab_size].

    Returns `logits` itself if there is nothing to change. Additions to ids beyond the vocabulary have no effect.
    """
    out = logits
    if spec.repeated is not None:
        ids, penalty = np.flatnonzero(spec.repeated), np.float32(spec.penalty)
        some, out = logits[ids], logits.copy()
        out[ids] = np.where(some > 0, some / penalty, some * penalty)
    if len(spec.added_ids):
        out, in_vocab = out.copy(), spec.added_ids < len(out)
        out[spec.added_ids[in_vocab]] += spec.added[in_vocab]
    return out if spec.allowed is None else np.where(spec.allowed(len(out))(), out, np.float32(-np.inf))


def allowed_without(
    allowed: NDArray[np.bool_],  # [vocab_size]
    token_ids: Set[int],
) -> NDArray[np.bool_]:
    """Return `allowed` without these tokens, or unchanged if no other token is allowed."""
    ids = [token_id for token_id in token_ids if token_id < len(allowed)]
    others = allowed.copy()
    others[ids] = False
    return others if others.any() else allowed


def draw(
    logits: NDArray[np.float32],  # [vocab_size], the result of `adjust_logits`
    spec: DrawSpec,
) -> int:
    """Sample a token. The same logits, seed and position give the same token, whatever else is in the batch.

    Of equally likely tokens, those with lower ids are preferred. Raises ValueError if the greatest logit is NaN or
    infinite.
    """
    greatest = float(logits.max())  # NaN, if there is one
    if not np.isfinite(greatest):
        raise ValueError(f"the greatest is {greatest}")
    if spec.top_k == 1:
        return int(logits.argmax())
    token_id = draw_kernel(
        readonly(logits),
        np.float32(greatest),
        np.float32(spec.temperature),
        np.float32(spec.min_p),
        spec.top_k,
        spec.top_p,
        spec.at,
        *_SCRATCH.of(len(logits)),
    )
    return int(token_id)


def prepare_draws() -> None:
    """Compile the sampling kernels before a token waits for them."""
    logits = np.zeros(2, np.float32)
    draw(logits, draw_spec(Sampling(max_new_tokens=1, temperature=1.0), seed=0, position=0))
    log_total(logits)


def log_total(logits: NDArray[np.float32]) -> float:
    """Log-sum-exp of logits [vocab_size]: a logit less this is its log-probability at temperature 1."""
    greatest = logits.max()
    return float(greatest) + math.log(weigh_all(readonly(logits), greatest))


def likelihood_of(logits: NDArray[np.float32], token_id: int, num_top: int) -> Likelihood:
    """Likelihood of a token, with the num_top most likely ones. logits: [vocab_size]."""
    top = tuple((other_id, float(logits[other_id])) for other_id in top_ids(logits, num_top).tolist())
    return Likelihood(float(logits[token_id]), log_total(logits), top)


def top_ids(values: NDArray[np.float32], num: int) -> NDArray[np.int64]:
    """Return the ids of the num greatest values [vocab_size], by (value descending, id ascending): [at most num]."""
    num = min(num, len(values))
    if num <= 0:
        return np.zeros(0, np.int64)
    least = np.partition(values, -num)[-num]
    above, ties = np.flatnonzero(values > least), np.flatnonzero(values == least)
    chosen = np.concatenate([above, ties[: num - len(above)]])
    return np.asarray(chosen[np.argsort(-values[chosen], kind="stable")])
