"""Full attention to compare with: the fastest way torch has for a shape."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.decode.gpu_timing import Timing, time_graph, time_replays
from bench.timing import gate

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v as in `full_attention_ways`, out like q

# One row too many or too few changes the output over random values by far more than this.
TOLERANCE = 0.02
SPLITS = (4, 16, 64)
HOPELESS, LAUNCH_US = 3, 500  # a way that takes longer than HOPELESS * best + LAUNCH_US is not timed in a graph


def full_attention_ways() -> dict[str, Attention]:
    """Return every way that torch offers to attend to all rows: name -> function.

    q: [batch_size, num_q_heads, 1, head_dim]; k, v: [batch_size, num_kv_heads, kv_len, head_dim], contiguous.
    "packed": the query heads of a group take the place of query rows, so that one pass over the KV serves them all.
    "n splits": split-K (flash-decoding): n parts of the KV are treated as heads, then merged by their log-sum-exps.
    """
    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
    ways: dict[str, Attention] = {}
    for name, backend in backends.items():
        ways[name] = _grouped(backend)
        ways[f"{name}, packed"] = _packed(backend)
    for num_splits in SPLITS:
        ways[f"flash, packed, {num_splits} splits"] = _split(num_splits)
    return ways


@dataclass(frozen=True, slots=True)
class FullAttention:
    """The fastest way for a shape, and how long all of them took."""

    name: str
    attend: Attention
    timing: Timing
    candidates: dict[str, float | str]  # µs per call, or why it does not run


def fastest_full_attention(
    inputs: list[tuple[Tensor, Tensor, Tensor]],  # sets of q, k, v, used in turn
    seconds: float = 0.3,
) -> FullAttention:
    """Time all ways, reject those with wrong results, and time the fastest again for longer.

    Raises GateError if no way works.
    """
    q, k, v = inputs[0]
    want = reference_attention(q, k, v)
    times: dict[str, float] = {}
    failures: dict[str, float | str] = {}
    ways = full_attention_ways()
    for name, attend in ways.items():
        try:
            with warnings.catch_warnings(action="ignore"):  # torch warns why a backend rejects the shape
                off = relative_error(attend(q, k, v), want)
            if not off < TOLERANCE:
                failures[name] = f"wrong: off by {off:.3f}"
                continue
            roughly = time_replays(_call(attend, *inputs[-1]), 1, seconds=0.0, least=2).p50_us
            calls = [_call(attend, *one) for one in inputs]
            # outside a graph the launches add to the time, so only a way that is far behind is not timed in one
            is_far_behind = bool(times) and roughly > HOPELESS * min(times.values()) + LAUNCH_US
            times[name] = roughly if is_far_behind else time_graph(calls, seconds=0.05, least=5).p50_us
        except RuntimeError as error:  # out-of-memory errors too
            failures[name] = str(error).strip().splitlines()[0][:100]
            torch.cuda.empty_cache()
    gate(bool(times), f"no way to attend to all rows works: {failures}")
    best = min(times, key=lambda name: times[name])
    timing = time_graph([_call(ways[best], *one) for one in inputs], seconds)
    return FullAttention(best, ways[best], timing, {**{name: round(us, 1) for name, us in times.items()}, **failures})


def reference_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to all rows in float32, one request and KV head after the other: out like q."""
    group_size = q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    for request in range(q.shape[0]):
        for head in range(k.shape[1]):
            group = slice(head * group_size, (head + 1) * group_size)
            scores = q[request, group, 0].float() @ k[request, head].float().T * q.shape[-1] ** -0.5
            out[request, group, 0] = (scores.softmax(-1) @ v[request, head].float()).to(q.dtype)
    return out


def relative_error(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want| over all elements; NaN counts as infinite."""
    error = float((got.float() - want.float()).norm() / want.float().norm())
    return error if error == error else float("inf")


def _grouped(backend: SDPBackend) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return attend


def _packed(backend: SDPBackend) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        packed = q.view(q.shape[0], k.shape[1], -1, q.shape[3])
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(packed, k, v).reshape(q.shape)

    return attend


def _split(num_splits: int) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch_size, num_kv_heads, kv_len, head_dim = k.shape
        whole = kv_len // num_splits * num_splits
        gate(whole == kv_len, f"{kv_len} rows do not split into {num_splits}")
        parts = batch_size * num_kv_heads, num_splits, -1, head_dim
        packed = q.view(parts[0], 1, -1, head_dim).expand(-1, num_splits, -1, -1)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(packed, k.view(parts), v.view(parts))
        weights = lse.softmax(1)[..., None]
        return (out * weights).sum(1).to(q.dtype).view(q.shape)

    return attend


def _call(attend: Attention, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], object]:
    return lambda: attend(q, k, v)
