"""What does a long question or answer cost? Is the last token as good and as fast as the first?

    python -m bench.growing [--text novel] [--context-len 6000] [--own-len 2150] [--eval-len 256] [--json FILE]
    python -m bench.growing --shape llama-3.1-8b --context-len 32K --own-len 12K --placement device
    python -m bench.growing --text manual --context-len 32K --own-len 12K --eval-len 1024 --stretch 6 --placement hybrid

A context is built from the beginning of a real text, and a request continues it with --own-len tokens, teacher-forced;
at the beginning and the end, a step has one token. Reported: for the last tokens, KL to full attention and its ratio to
the KL of exact Top-K, which chooses as many of all rows outside the windows and drops the others; the time of a step,
and its ratio of end to beginning; the bytes of the request's own segments over the KV of its own rows; on a GPU, the
extra memory of an engine for such requests over one for requests without own rows, relative to the KV of these rows.
Gate: every KL is finite; and, if exact Top-K is computed, the engine's first predictions, before any segment is in use,
are nearer to full attention's than exact Top-K's.
"""

import argparse
import gc
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.accuracy.attending.context import Attend, RealContext, Step, read_context
from bench.accuracy.long import read_text, token_count
from bench.accuracy.texts import TEXTS
from bench.build import byte_ids, random_model
from bench.timing import finish, gate, machine, options_parser
from csattn.artifact import open_artifact
from csattn.config import SearchConfig, preset
from csattn.models import LoadedModel, load_model
from csattn.sketch.own import Growth, own_top_k
from index_build.pipeline import build_artifact
from workers.engine.cpu.engine import GROWTH, CpuEngine
from workers.engine.gpu.engine import GpuEngine
from workers.engine.gpu.memory import PLACEMENTS
from workers.engine.gpu.split_engine import SplitEngine
from workers.engine.opening import open_engine
from workers.serving.step_engine import StepRow

TIMED = 64  # steps, at the beginning and at the end
_TOKENS_AT_ONCE = 64  # of exact Top-K; rows that leave the window within such a batch stay near


def main() -> None:
    arguments = _arguments()
    num_ids = arguments.context_len + arguments.own_len + 1
    config = SearchConfig(keep=arguments.keep, lookahead=int(arguments.lookahead))
    if arguments.shape:  # only timed
        loaded = random_model(arguments.shape, arguments.layers, arguments.device)
        ids, sha256 = byte_ids(num_ids), ""
    else:
        loaded = load_model(arguments.model, "float32", device=arguments.device, stretch=arguments.stretch)
        ids, sha256 = read_text(arguments.text, loaded.tokenizer, arguments.context_len, arguments.own_len)
    context, following = ids[: arguments.context_len], ids[arguments.context_len :]
    gate(len(ids) == num_ids, "the text is too short")
    gate(arguments.own_len >= 3 * TIMED and arguments.eval_len <= arguments.own_len, "there is too little to measure")
    report: dict[str, Any] = {"bench": "growing", "machine": machine(), "text": arguments.text, "text_sha256": sha256}
    report |= {"context_len": len(context), "own_len": len(following) - 1, "eval_len": arguments.eval_len}
    report |= {name: getattr(arguments, name) for name in ("keep", "lookahead", "placement", "own_on_host", "stretch")}
    growth = GROWTH if arguments.placement == "cpu" else Growth()
    if arguments.segment_len is not None:
        growth = Growth(segment_len=arguments.segment_len)
    report |= {"segment_len": growth.segment_len, "model": loaded.name}
    with tempfile.TemporaryDirectory() as store:
        path = build_artifact(loaded, context, preset("default"), Path(store)).path
        with open_artifact(path) as artifact:
            options: dict[str, Any] = {"max_requests": 1, "placement": arguments.placement, "growth": growth}
            if arguments.placement != "cpu":
                options |= {"batch_sizes": (1, 16)}
                with open_engine(loaded, artifact, config, **options, tail_capacity=1) as engine:
                    engine.open(0, 0, config, "csattn")
                    without_own = engine.counts().device_bytes
                gc.collect()  # the engine is part of reference cycles
                options |= {"tail_capacity": len(following), "own_on_host": arguments.own_on_host}
            with open_engine(loaded, artifact, config, **options) as engine:
                assert not isinstance(engine, SplitEngine), "of one device"
                grown, timed = decode(engine, config, following)
                report |= timed | own_bytes(engine)
            if arguments.placement != "cpu":
                own_kv = (len(following) - 1) * row_bytes(loaded)
                report["own_device_share"] = round((report["device_bytes"] - without_own) / own_kv, 4)
    if not arguments.shape:
        report |= judge(read_context(loaded, context, following), grown, arguments.eval_len, config, arguments)
    finish(report, arguments.json)


def judge(
    real: RealContext, grown: Tensor, eval_len: int, config: SearchConfig, arguments: argparse.Namespace
) -> dict[str, float]:
    """Return KL to full attention of the engine's predictions, and of exact Top-K's unless it is left out."""
    report = {}
    kl = kl_of(real, grown.to(real.log_probs.device))
    report["kl"] = float(kl[-eval_len:].mean())
    report["kl_at_the_beginning"] = float(kl[:eval_len].mean())
    gate(bool(kl.isfinite().all()), "a prediction is no number")
    if not arguments.without_exact:
        exact = kl_of(real, real.predict(exact_attention(real, config)))
        report["kl_exact"] = float(exact[-eval_len:].mean())
        report["times_exact"] = report["kl"] / report["kl_exact"]
        first = slice(config.window_len)
        gate(bool(kl[first].mean() < exact[first].mean()), "even the first tokens are off")
    return report


def decode(
    engine: CpuEngine | GpuEngine, config: SearchConfig, following: NDArray[np.int32]
) -> tuple[Tensor, dict[str, float]]:
    """Return log-probabilities after each token but the last, and the times of steps."""
    engine.open(0, 0, config, "csattn")
    parts, times_ms = [], []
    timed: dict[str, float] = {}
    last = len(following) - 1
    for start, stop in _pieces(last, engine.max_rows):
        rows = [StepRow(0, token_id) for token_id in following[start:stop].tolist()]
        started = time.perf_counter()
        result = engine.step(rows, want_logits=True)
        if stop == TIMED:
            timed["device_bytes_first"] = engine.counts().device_bytes
        if stop - start == 1:
            times_ms.append((time.perf_counter() - started) * 1e3)
        assert result.logits is not None
        parts.append(torch.from_numpy(result.logits.copy()).float().log_softmax(-1))
    first, end = (float(np.median(times)) for times in (times_ms[:TIMED], times_ms[-TIMED:]))
    timed |= {"step_ms_first": first, "step_ms_last": end, "last_over_first": end / first}
    timed["last_over_first_least"] = min(times_ms[-TIMED:]) / min(times_ms[:TIMED])  # least affected by other processes
    return torch.cat(parts), {name: round(value, 4) for name, value in timed.items()}


def _pieces(num_tokens: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of tokens for steps: single tokens where steps are timed, else up to `most`."""
    at = 0
    while at < num_tokens:
        timed = at < TIMED or at >= num_tokens - TIMED
        stop = at + 1 if timed else min(at + most, num_tokens - TIMED)
        yield at, stop
        at = stop


def own_bytes(engine: CpuEngine | GpuEngine) -> dict[str, float]:
    """Return the size of the own rows' codes over the KV of all own rows; on a GPU, the device's bytes."""
    if isinstance(engine, GpuEngine):
        return {"device_bytes": engine.counts().device_bytes}
    request = engine.requests[0]
    num_segments = request.own.num_segments(request.tail_len) if request.own else 0
    coded = sum(s.num_bytes for s in request.own.sketches(num_segments)) if request.own and num_segments else 0
    kv = request.tail_len * row_bytes(engine.loaded)
    return {"own_segments": num_segments, "coded_share": round(coded / kv, 4)}


def row_bytes(loaded: LoadedModel) -> int:
    """Return the KV bytes of a token, over all layers."""
    geometry = loaded.geometry
    return 2 * geometry.num_layers * geometry.num_kv_heads * geometry.head_dim * loaded.dtype.itemsize


def kl_of(context: RealContext, log_probs: Tensor) -> Tensor:
    """Return each token's KL from full attention's prediction, in nats [num_tokens]."""
    with torch.inference_mode():
        reference = context.log_probs
        return (reference.exp() * (reference - log_probs)).sum(-1)


def exact_attention(context: RealContext, config: SearchConfig) -> Attend:
    """Return attention to sinks, windows and the best rows of context and tail by exact weights, without the others."""

    def attend(layer_idx: int, step: Step) -> Tensor:
        layer, out = context.layers[layer_idx], torch.empty_like(step.q)
        for start in range(0, step.q.shape[2], _TOKENS_AT_ONCE):
            tokens = slice(start, min(start + _TOKENS_AT_ONCE, step.q.shape[2]))
            num_left = max(0, start + 1 - config.window_len)
            k = torch.cat([layer.k, step.k[:, : tokens.stop]], dim=1)
            v = torch.cat([layer.v, step.v[:, : tokens.stop]], dim=1)
            logits = layer.softmax_scale * torch.einsum("hgtd,hnd->hgtn", step.q[:, :, tokens], k)
            places, seen = torch.arange(k.shape[1], device=k.device), torch.arange(tokens.start, tokens.stop)
            hidden = places > (layer.context_len + seen.to(k.device))[:, None]
            logits = logits.masked_fill(hidden, -torch.inf)
            far = _far(layer.context_len, num_left, len(places), config).to(k.device)
            scores = logits.softmax(-1).sum(1).masked_fill(~far, -1.0)
            top_k = config.top_k(layer.context_len) + own_top_k(config, num_left)  # as many as csattn chooses
            chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(2, scores.topk(top_k, dim=2).indices, True)
            weights = logits.masked_fill(far & ~chosen[:, None], -torch.inf).softmax(-1)
            out[:, :, tokens] = torch.einsum("hgtn,hnd->hgtd", weights, v)
        return out

    return attend


def _far(context_len: int, num_left: int, num_rows: int, config: SearchConfig) -> Tensor:
    """Return a mask of the rows that are read only if chosen."""
    far = torch.zeros(num_rows, dtype=torch.bool)
    far[config.sink_len : context_len - config.window_len] = True
    far[context_len : context_len + num_left] = True
    return far


def _arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = options_parser(__doc__)
    parser.add_argument("--text", default="novel", help=f"text: {', '.join(TEXTS)}, or a file")
    parser.add_argument("--context-len", type=token_count, default="6000")
    parser.add_argument("--own-len", type=token_count, default="2150", help="tokens of question and answer together")
    parser.add_argument("--eval-len", type=token_count, default="256", help="last tokens of these, which are evaluated")
    parser.add_argument("--keep", type=float, default=SearchConfig().keep)
    parser.add_argument("--lookahead", action="store_true", help="search one layer ahead")
    parser.add_argument(
        "--shape", help="time a model of this shape, such as llama-3.1-8b, with random weights; quality is not measured"
    )
    parser.add_argument("--layers", type=int, help="layers of the shape to use [default: all]")
    parser.add_argument("--placement", default="cpu", choices=("cpu", *PLACEMENTS))
    parser.add_argument(
        "--own-on-host", action="store_true", help="in hybrid, also keep the request's first rows in host memory"
    )
    parser.add_argument("--segment-len", type=int, help="own rows that share a transform [default: as in a service]")
    parser.add_argument("--stretch", type=float, default=1.0, help="factor by which YaRN extends the model's positions")
    parser.add_argument(
        "--without-exact", action="store_true", help="leave out exact Top-K, which takes several times as long"
    )
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="device for full attention and exact Top-K",
    )
    parser.add_argument("--model")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
