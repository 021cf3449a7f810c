"""Attention of the predicted tokens to a context: some rows are read exactly, the rest are approximated."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from bench.accuracy.attending.context import ContextLayer, Step, heads_apart, step_apart

_ELEMENTS, _ELEMENTS_ON_GPU = 1 << 25, 1 << 28  # logits that are held at a time


class Codes:
    """A method's data about a layer's context rows, on the model's device."""

    bytes_per_key: float  # per key and KV head, packed, including the scales whose number grows with the context
    fixed_bytes: int  # of a layer, on the device: transforms, whose size does not depend on the number of rows
    evicts = False  # whether rows that are not chosen are dropped, and the chosen ones stay on the device

    @property
    def device_bytes_per_key(self) -> float:
        """The part of `bytes_per_key` that is on the device, not on the host."""
        return self.bytes_per_key

    def logits(self, q: Tensor) -> Tensor:
        """Approximate q . k for all rows: q [num_kv_heads, n, head_dim] -> [num_kv_heads, n, context_len].

        The n queries are those of all tokens for the group's first head, then for its second, and so on.
        """
        raise NotImplementedError

    def logits_with_own(self, q: Tensor, own_keys: Tensor, joined: Tensor) -> Tensor:
        """Like `logits`, but also for the tokens' own rows that have joined the index: [..., context_len + num_own].

        own_keys: [num_kv_heads, num_own, head_dim]; joined: [num_tokens, num_own] bool.
        """
        raise NotImplementedError

    def group_scores(self, q: Tensor, top_k: int) -> Tensor | None:
        """Return the scores [num_kv_heads, num_tokens, context_len] by which a group's top_k rows are chosen.

        None: they are chosen by their shares in the softmaxes of `logits`.

        q: [num_kv_heads, group_size, num_tokens, head_dim].
        """
        return None

    def weighted_values(self, weights: Tensor, q: Tensor) -> Tensor:
        """Approximate the sum of the rows' values times their weights: [num_kv_heads, n, head_dim].

        weights: [num_kv_heads, n, context_len], in proportion to e^logit; 0 for rows that are not in the sum.
        """
        raise NotImplementedError

    def sampled(self, q: Tensor) -> tuple[Tensor, Tensor] | None:
        """Draw rows that each query head reads besides those that its group chooses; None: the method draws none.

        q: [num_kv_heads, n, head_dim] -> a bool mask of the rows drawn, and the logarithms of their sampling
        probabilities, which are subtracted from their logits: both [num_kv_heads, n, context_len].
        """
        return None

    def finish(self, out: Tensor, q: Tensor, step: Step, seen: Tensor, is_read: Tensor) -> Tensor:
        """Return the final output, shaped like q: `out`, the attention to the rows read, unless a method adds to it.

        q: [num_kv_heads, group_size, num_tokens, head_dim]. seen [num_tokens, num_rows] and is_read
        [num_kv_heads, group_size * num_tokens, num_rows] cover the context's rows and then the step's own.
        """
        return out


@dataclass(frozen=True, slots=True)
class Reading:
    """Which rows of a context are read exactly, and how the rest is attended to."""

    top_k: int  # rows chosen per KV head and token, besides sinks and window
    sink_len: int
    window_len: int
    rest: Literal["none", "codes", "moments"]
    own_window: int | None = None  # how many of the tokens' last own rows are always read; None: all own rows
    per_query_head: bool = False  # each query head chooses its own rows; codes must then be of `heads_apart(layer)`

    def near(self, context_len: int, num_own: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return masks [n, num_rows] over context and own rows: those a token always reads, and those it may see."""
        rows, last = torch.arange(context_len + num_own, device=tokens.device), context_len + tokens[:, None]
        own = rows >= (context_len if self.own_window is None else (last - self.own_window + 1).clamp_min(context_len))
        resident = (rows < self.sink_len) | (rows >= context_len - self.window_len) & (rows < context_len)
        seen = rows <= last
        return (resident | own) & seen, seen


# called with the chosen rows [num_kv_heads, num_tokens, top_k] of one batch of tokens after another
OnChosen = Callable[[Tensor], None]


def attend(
    layer: ContextLayer, step: Step, codes: Codes | None, reading: Reading, on_chosen: OnChosen = lambda chosen: None
) -> Tensor:
    """Return the attention output, shaped like step.q. Rows are chosen by `codes`, or (None) by their exact logits."""
    if reading.per_query_head:
        alone = replace(reading, per_query_head=False)
        return attend(heads_apart(layer), step_apart(step), codes, alone, on_chosen).view_as(step.q)
    num_heads, group_size, num_tokens, _ = step.q.shape
    most = _ELEMENTS_ON_GPU if step.q.is_cuda else _ELEMENTS
    at_once = max(1, most // (num_heads * group_size * layer.context_len))
    moments = _Moments(layer, reading) if reading.rest == "moments" else None
    parts = []
    for start in range(0, num_tokens, at_once):
        tokens = slice(start, min(start + at_once, num_tokens))
        parts.append(_attend_tokens(layer, step, tokens, codes, reading, moments, on_chosen))
    return torch.cat(parts, dim=2)


def _attend_tokens(
    layer: ContextLayer,
    step: Step,
    tokens: slice,
    codes: Codes | None,
    reading: Reading,
    moments: "_Moments | None",
    on_chosen: OnChosen,
) -> Tensor:
    q, early = step.q[:, :, tokens], step.early[:, :, tokens]
    scale, context_len, num_own = layer.softmax_scale, layer.context_len, step.k.shape[1]
    exact = scale * torch.cat([_flat(q) @ layer.k.mT, _flat(q) @ step.k.mT], dim=2)
    ahead = step.early is not step.q
    coded = None
    if codes is not None and reading.rest == "codes":
        coded = scale * codes.logits(_flat(q))
    near, seen = reading.near(context_len, num_own, torch.arange(step.q.shape[2], device=q.device)[tokens])
    is_exact = near.expand(len(q), -1, -1)
    if reading.top_k > 0:
        group_scores = codes.group_scores(early, reading.top_k) if codes is not None else None
        if group_scores is None:
            if reading.own_window is not None:
                by = exact
                if codes is not None:
                    by = scale * codes.logits_with_own(_flat(early), step.k, (seen & ~near)[:, context_len:])
            elif codes is None:
                by = scale * _flat(early) @ layer.k.mT if ahead else exact[..., :context_len]
            else:
                by = scale * codes.logits(_flat(early)) if ahead or coded is None else coded
            group_scores = _group_share(by.unflatten(1, q.shape[1:3]))
        may_be_chosen = (seen & ~near)[:, : group_scores.shape[2]]
        best = group_scores.masked_fill_(~may_be_chosen, -torch.inf).topk(min(reading.top_k, context_len), dim=-1)
        on_chosen(best.indices)
        is_chosen = torch.zeros_like(is_exact).scatter_(2, best.indices, best.values > -torch.inf)
        is_exact = is_exact | is_chosen
    mask = is_exact.repeat(1, q.shape[1], 1)
    drawn = codes.sampled(_flat(early)) if codes is not None else None
    if drawn is not None:
        is_drawn, log_chance = drawn
        exact[..., :context_len] -= torch.where(is_drawn & ~mask[..., :context_len], log_chance, 0.0)
        mask[..., :context_len] |= is_drawn
    logits = exact.masked_fill_(~mask, -torch.inf)
    if reading.rest == "codes":
        assert coded is not None
        logits[..., :context_len] = torch.where(mask[..., :context_len], logits[..., :context_len], coded)
    out = _sum_up(layer, step, tokens, logits, mask, codes, reading, moments)
    return out if codes is None else codes.finish(out, q, step, seen, mask)


def _sum_up(
    layer: ContextLayer,
    step: Step,
    tokens: slice,
    logits: Tensor,  # [num_kv_heads, group_size * num_tokens, num_rows], exact or approximate
    is_exact: Tensor,  # [num_kv_heads, group_size * num_tokens, num_rows] bool
    codes: Codes | None,
    reading: Reading,
    moments: "_Moments | None",
) -> Tensor:
    """Return attention with one softmax over the context, the estimate of the rest and the tokens' own rows."""
    q, context_len = step.q[:, :, tokens], layer.context_len
    largest = logits.amax(-1, keepdim=True)
    weights = logits.sub_(largest).exp_()
    total = weights.sum(-1, keepdim=True)
    out = weights[..., context_len:] @ step.v
    if reading.rest == "codes":
        assert codes is not None
        of_rest = weights.masked_fill(is_exact, 0.0)[..., :context_len]
        out += codes.weighted_values(of_rest, _flat(q))
        weights = weights.masked_fill_(~is_exact, 0.0)
    out += weights[..., :context_len] @ layer.v
    if moments is not None:
        value, lse = moments.estimate(_flat(q))
        weight = (lse - largest[..., 0]).exp()[..., None]
        out, total = out + weight * value, total + weight
    return (out / total).unflatten(1, q.shape[1:3])


def _group_share(logits: Tensor) -> Tensor:
    """Return each row's group score, [num_kv_heads, num_tokens, context_len].

    logits: [num_kv_heads, group_size, num_tokens, context_len].
    """
    return logits[:, 0].clone() if logits.shape[1] == 1 else logits.softmax(-1).sum(1)


def _flat(q: Tensor) -> Tensor:
    """[num_kv_heads, group_size, num_tokens, head_dim] -> [num_kv_heads, group_size * num_tokens, head_dim]."""
    return q.flatten(1, 2)


class _Moments:
    """`csattn.rest.reference` for all heads and queries at once."""

    def __init__(self, layer: ContextLayer, reading: Reading):
        middle = slice(reading.sink_len, layer.context_len - reading.window_len)
        k, v = layer.k[:, middle].double(), layer.v[:, middle].double()
        self._num_rows = k.shape[1]
        self._share = min(reading.top_k, self._num_rows) / self._num_rows
        self._scale = layer.softmax_scale
        self._key_mean, self._value_mean = k.mean(1, keepdim=True), v.mean(1, keepdim=True)
        k, v = k - self._key_mean, v - self._value_mean
        self._key_cov, self._cross_cov = k.mT @ k / self._num_rows, k.mT @ v / self._num_rows

    def estimate(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Estimate output [num_kv_heads, n, head_dim] and log-sum-exp [num_kv_heads, n] of the rows not chosen."""
        query = self._scale * q.double()
        mean = (query @ self._key_mean.mT)[..., 0]
        spread = (query @ self._key_cov * query).sum(-1).clamp_min(1e-12).sqrt()
        cut = torch.special.ndtri(torch.tensor(1.0 - self._share, dtype=torch.float64, device=q.device)) - spread
        log_below = torch.special.log_ndtr(cut)
        density = torch.exp(-cut.square() / 2 - log_below) / (2 * torch.pi) ** 0.5
        slope = ((spread - density) / spread)[..., None]
        value = self._value_mean + slope * (query @ self._cross_cov)
        lse = mean + spread.square() / 2 + log_below + torch.log(torch.tensor(float(self._num_rows)))
        return value.float(), lse.float()
