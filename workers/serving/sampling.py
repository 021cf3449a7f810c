"""Draw the next token from a step's logits, and say how likely it was."""

import math
from collections import Counter
from collections.abc import Sequence, Set

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.jit import readonly
from workers.serving.draw_kernel import Scratch, draw_kernel, weigh_all
from workers.serving.messages import Sampling
from workers.serving.step_engine import Draw, Likelihood

_SCRATCH = Scratch()
_LEAST_TOP_P = 1e-9  # the likeliest token alone
_COLDEST = 1e-30  # temperature: below, only the likeliest have any weight all the same


def how_to_draw(
    sampling: Sampling,
    seed: int,
    position: int,  # of the token in the answer
) -> Draw:
    """The likeliest token where temperature is 0; else one of the top_k likeliest that have min_p of the likeliest
    one's share, of which those are kept that together have a share of top_p."""
    if sampling.temperature == 0:
        return Draw(temperature=1.0, top_p=1.0, top_k=1, min_p=0.0, at=0.0)
    return Draw(
        temperature=max(sampling.temperature, _COLDEST),
        top_p=max(sampling.top_p, _LEAST_TOP_P),
        top_k=sampling.top_k,
        min_p=min(sampling.min_p, 1.0),
        at=np.random.Generator(np.random.Philox(key=seed, counter=position)).random(),
    )


def additions(
    sampling: Sampling,
    token_ids: Sequence[int],  # of the answer so far
    ends: Set[int],  # tokens that may not come now
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """What frequency and presence penalty and bias add to logits: token ids, each once, and values. -inf: forbidden."""
    added = dict.fromkeys(ends, -math.inf)
    for token_id, bias in sampling.logit_bias:
        added[token_id] = added.get(token_id, 0.0) + bias
    if sampling.frequency_penalty or sampling.presence_penalty:
        for token_id, count in Counter(token_ids).items():
            off = sampling.frequency_penalty * count + sampling.presence_penalty
            added[token_id] = added.get(token_id, 0.0) - off
    return np.fromiter(added, np.int32), np.fromiter(added.values(), np.float32)


def adjusted(
    logits: NDArray[np.float32],  # [vocab_size]
    sampling: Sampling,
    token_ids: Sequence[int],  # of the answer so far
    in_prompt: NDArray[np.bool_] | None,  # [vocab_size]: context or question has the token; None: nobody asks
    allowed: NDArray[np.bool_] | None,  # [vocab_size]: by the grammar; None: all
) -> NDArray[np.float32]:
    """The logits after repetition penalty and then what is added; -inf where forbidden.

    The logits themselves where nothing is asked for; they are never changed. A bias for an id beyond the vocabulary
    has no effect.
    """
    out = logits
    if in_prompt is not None and sampling.repetition_penalty != 1.0:
        repeated = in_prompt.copy()
        repeated[np.asarray(token_ids, np.int64)] = True
        factor = np.float32(sampling.repetition_penalty)
        out = np.where(repeated, np.where(out > 0, out / factor, out * factor), out)
    ids, added = additions(sampling, token_ids, frozenset())
    if len(ids):
        out = out.copy()
        is_there = ids < len(out)
        out[ids[is_there]] += added[is_there]
    return out if allowed is None else np.where(allowed, out, np.float32(-np.inf))


def allowed_without(
    allowed: NDArray[np.bool_] | None,  # [vocab_size]; None: all
    token_ids: Set[int],
    vocab_size: int,
) -> NDArray[np.bool_] | None:
    """What is allowed but these tokens; as it was where nothing else is."""
    ids = [token_id for token_id in token_ids if token_id < vocab_size]
    if not ids:
        return allowed
    others = np.ones(vocab_size, np.bool_) if allowed is None else allowed.copy()
    others[ids] = False
    return others if others.any() else allowed


def draw(
    logits: NDArray[np.float32],  # [vocab_size], with what `how` adds
    how: Draw,
) -> int:
    """The same logits, seed and position give the same token, whatever else is decoded beside it.

    Among equally likely tokens the lowest id counts as the likelier one. Raises ValueError where NaN or infinity is the
    greatest logit.
    """
    greatest = float(logits.max())  # NaN, if there is one
    if not np.isfinite(greatest):
        raise ValueError(f"the greatest is {greatest}")
    if how.top_k == 1:
        return int(logits.argmax())
    token_id = draw_kernel(
        readonly(logits),
        np.float32(greatest),
        np.float32(how.temperature),
        np.float32(how.min_p),
        how.top_k,
        how.top_p,
        how.at,
        *_SCRATCH.of(len(logits)),
    )
    return int(token_id)


def prepare_draws() -> None:
    """Have what draws compiled before the first token waits for it."""
    logits = np.zeros(2, np.float32)
    draw(logits, how_to_draw(Sampling(max_new_tokens=1, temperature=1.0), seed=0, position=0))
    log_total(logits)


def log_total(logits: NDArray[np.float32]) -> float:
    """What to take off a logit for its log-probability, before temperature. logits: [vocab_size]."""
    greatest = logits.max()
    return float(greatest) + math.log(weigh_all(readonly(logits), greatest))


def likelihood(logits: NDArray[np.float32], token_id: int, num_top: int) -> Likelihood:
    """logits: [vocab_size]."""
    top = tuple((other_id, float(logits[other_id])) for other_id in likeliest(logits, num_top).tolist())
    return Likelihood(float(logits[token_id]), log_total(logits), top)


def likeliest(values: NDArray[np.float32], num: int) -> NDArray[np.int64]:
    """Ids of the num greatest, by (value descending, id ascending). values: [vocab_size] -> [at most num]."""
    num = min(num, len(values))
    if num <= 0:
        return np.zeros(0, np.int64)
    least = np.partition(values, -num)[-num]
    above, ties = np.flatnonzero(values > least), np.flatnonzero(values == least)
    chosen = np.concatenate([above, ties[: num - len(above)]])
    return np.asarray(chosen[np.argsort(-values[chosen], kind="stable")])
