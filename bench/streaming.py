"""Endless generation: does memory stay constant, and does attention agree with its definition?

    python -m bench.streaming [--policy window|h2o] [--tokens 200000] [--json FILE]    memory, on a tiny random model
    python -m bench.streaming --perplexity [--tokens 600] [--json FILE]                 the demo model on a novel

**Memory.** Each policy continues a prompt for --tokens tokens. Resident memory is sampled 200 times; a line is fitted
to it after the first tenth, when allocators have settled. Gate: by this line, growth over all tokens is below 2 MB.

**Perplexity.** The novel's tokens pass through streams that keep far fewer rows than there are tokens. The definition
is transformers' own attention, one token at a time, over a cache that is made again for each token from the keys kept,
rotated to their places in it. Gate: for tokens beyond the rows kept, perplexity is within 2 % of the definition's.

Other figures in the JSON file are kept, each with the commit and the command of its run.
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.process_memory import resident_bytes
from bench.timing import finish, gate, machine, options_parser
from csattn.models import LoadedModel, load_model
from csattn.models.attending_cache import CACHE
from workers.streaming.config import StreamConfig
from workers.streaming.session import StreamSession

TEXT = Path(__file__).parent / "texts" / "novel.txt"
NUM_SAMPLES = 200
MEMORY_CONFIGS = {
    "window": StreamConfig(policy="window", sink_len=4, window_len=124),
    "h2o": StreamConfig(policy="h2o", heavy_len=64, window_len=64),
}
MAX_GROWTH_BYTES = 2e6
MAX_DIFFERENCE = 0.02


def memory(config: StreamConfig, num_tokens: int) -> dict[str, Any]:
    """Measure resident memory while a tiny random model generates."""
    with StreamSession(tiny_model(), config) as session:
        cache = session.cache()
        stream = session.tokens(np.arange(300, dtype=np.int32) % 256, cache)
        every = max(1, num_tokens // NUM_SAMPLES)
        started, counts, resident = time.perf_counter(), [], []
        for count, _ in enumerate(islice(stream, num_tokens), start=1):
            if count % every == 0:
                counts.append(count)
                resident.append(sum(resident_bytes().values()))
                if len(counts) % 10 == 0:
                    print(f"{config.policy}: {count} tokens, {resident[-1] / 1e6:.2f} MB", flush=True)
        seconds = time.perf_counter() - started
    settled = len(counts) // 10
    slope = float(np.polyfit(counts[settled:], resident[settled:], 1)[0])
    gate(slope * num_tokens < MAX_GROWTH_BYTES, f"{config.policy}: memory grows by {slope:.1f} bytes a token")
    return {
        "config": asdict(config),
        "num_tokens": num_tokens,
        "kv_bytes": cache.num_bytes,
        "resident_first_mb": round(resident[settled] / 1e6, 2),
        "resident_last_mb": round(resident[-1] / 1e6, 2),
        "resident_most_mb": round(max(resident) / 1e6, 2),
        "bytes_per_token": round(slope, 3),
        "ms_per_token": round(seconds / num_tokens * 1e3, 3),
    }


def tiny_model() -> LoadedModel:
    """Return a random model of 512 positions and one layer; memory growth is measured, not speed."""
    from csattn.models.loader import wrap_model
    from tests.tiny import byte_tokenizer, make_model

    return wrap_model(make_model(num_hidden_layers=1, max_position_embeddings=512), byte_tokenizer(), "tiny")


def perplexity(num_tokens: int) -> dict[str, Any]:
    """Compare streams of the demo model over a novel with the definition of one of them and with full attention."""
    loaded = load_model()
    ids = torch.tensor(loaded.tokenizer(TEXT.read_text()).input_ids[: num_tokens + 1])
    sinks = StreamConfig(policy="window", sink_len=4, window_len=124)
    bare = StreamConfig(policy="window", sink_len=0, window_len=sinks.max_rows)
    runs: dict[str, Callable[[], Tensor]] = {
        "full attention": lambda: nll(lambda part: loaded.model(part).logits[0], ids, num_tokens),
        "sinks and window": lambda: stream_nll(loaded, sinks, ids, 512),
        "sinks and window, as defined": lambda: definition(loaded, ids, sinks),
        "sinks and window, token by token": lambda: stream_nll(loaded, sinks, ids, 1),
        "window without sinks": lambda: stream_nll(loaded, bare, ids, 512),
        "heavy hitters": lambda: stream_nll(loaded, MEMORY_CONFIGS["h2o"], ids, 512),
    }
    scored: dict[str, Tensor] = {}
    for name, run in runs.items():
        scored[name] = run()
        beyond = scored[name][sinks.max_rows :]
        print(f"{name}: {math.exp(float(beyond.mean())):.4f} beyond the rows kept", flush=True)
    result: dict[str, Any] = {"num_tokens": num_tokens, "max_rows": sinks.max_rows}
    result["perplexity"] = {name: round(math.exp(float(each.mean())), 4) for name, each in scored.items()}
    late = {name: each[sinks.max_rows :] for name, each in scored.items()}
    result["beyond the rows kept"] = {name: round(math.exp(float(each.mean())), 4) for name, each in late.items()}
    for name in ("sinks and window", "sinks and window, token by token"):
        difference = abs(math.expm1(float((late[name] - late["sinks and window, as defined"]).mean())))
        result[f"{name}: difference from the definition"] = difference
        gate(difference < MAX_DIFFERENCE, f"{name}: perplexity is {100 * difference:.2f} % from its definition's")
    return result


def stream_nll(loaded: LoadedModel, config: StreamConfig, ids: Tensor, block_len: int) -> Tensor:
    """Return `nll` of a stream that gets the text in blocks."""
    with StreamSession(loaded, config) as session:
        cache = session.cache()
        return nll(lambda part: loaded.model(part, **{CACHE: cache}).logits[0], ids, block_len)


@torch.inference_mode()
def nll(logits_of: Callable[[Tensor], Tensor], ids: Tensor, block_len: int) -> Tensor:
    """Return -log p of each token after the first [num_tokens]; logits_of gets [1, at most block_len] ids."""
    parts = []
    for start in range(0, len(ids) - 1, block_len):
        part = ids[:-1][start : start + block_len]
        targets = ids[start + 1 : start + 1 + len(part)]
        log_probs = logits_of(part[None]).float().log_softmax(-1)
        parts.append(-log_probs.gather(1, targets[:, None])[:, 0])
    return torch.cat(parts)


def definition(loaded: LoadedModel, ids: Tensor, config: StreamConfig) -> Tensor:
    """Return -log p of each token after the first, by transformers' attention over caches made from the rows kept."""
    from transformers import DynamicCache
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model = loaded.model
    rotary = model.model.rotary_emb
    kept: list[tuple[Tensor, Tensor]] = []  # per layer, K before RoPE and V: [1, num_kv_heads, num_rows, head_dim]

    def step(part: Tensor) -> Tensor:
        nonlocal kept
        num_rows = kept[0][0].shape[2] if kept else 0
        cos, sin = rotary(torch.zeros(1, 1, 1), position_ids=torch.arange(num_rows + 1)[None])
        cache = DynamicCache()
        for layer_idx, (k, v) in enumerate(kept):
            cache.update(apply_rotary_pos_emb(k, k, cos[:, :-1], sin[:, :-1])[0], v, layer_idx)
        logits = model(part, position_ids=torch.tensor([[num_rows]]), **{CACHE: cache}).logits[0]
        rows = []
        for layer_idx, layer in enumerate(cache.layers):
            new = layer.keys[:, :, -1:]
            new = apply_rotary_pos_emb(new, new, cos[:, -1:], -sin[:, -1:])[0]
            k = torch.cat([kept[layer_idx][0], new], dim=2) if kept else new
            v = layer.values
            if k.shape[2] == config.max_rows:  # the window's oldest row leaves, to make room for the next token
                stays = [row for row in range(config.max_rows) if row != config.sink_len]
                k, v = k[:, :, stays], v[:, :, stays]
            rows.append((k, v))
        kept = rows
        return logits

    return nll(step, ids, 1)


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--tokens", type=int, help="tokens of the memory test [200000] or of the novel [600]")
    parser.add_argument("--policy", choices=MEMORY_CONFIGS, help="policy of the memory test [both]")
    parser.add_argument("--perplexity", action="store_true")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    of_run = {name: machine()[name] for name in ("commit", "command")}
    if arguments.perplexity:
        figures["perplexity"] = perplexity(arguments.tokens or 600) | of_run
    else:
        for policy in [arguments.policy] if arguments.policy else list(MEMORY_CONFIGS):
            figures[f"memory, {policy}"] = memory(MEMORY_CONFIGS[policy], arguments.tokens or 200_000) | of_run
            print(json.dumps(figures), flush=True)
    earlier = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}
    finish({**earlier, "bench": "streaming", "machine": machine(), **figures}, arguments.json)


if __name__ == "__main__":
    main()
