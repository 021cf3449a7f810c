"""Compares a whole layer of DeepSeek-V4's compressed attention, from hidden states to output, with transformers' own.

Random weights of V4-Flash's shape. transformers holds every head's scores of all pairs in memory; csattn, only rows.
"""

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from bench.lightning.measure import measure
from bench.process_memory import Watch, resident_bytes
from bench.records import Case, Records
from bench.timing import finish, gate
from csattn.cpu.heap import trim_heap
from csattn.lightning import causal_lens
from csattn.lightning.compressed import CompressedAttention, CompressedWeights

KEY = ("kind", "variant", "num_tokens")
KINDS = {"sparse": "compressed_sparse_attention", "heavy": "heavily_compressed_attention"}
VARIANTS = ("csattn", "transformers")
SEED = 2026
CHECKED = 1024  # tokens whose results are compared first
MOST_APART = {torch.float32: 1e-3, torch.bfloat16: 4e-2}  # largest difference, relative to the result's norm
K = 1024


class Layer:
    """One layer, computed by csattn and by transformers."""

    def __init__(self, kind: str, device: str, shape: dict[str, Any]) -> None:
        from transformers import DeepseekV4Config
        from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

        types = {"num_hidden_layers": 1, "layer_types": [KINDS[kind]], "mlp_layer_types": ["moe"]}
        self.config = DeepseekV4Config(**types, attn_implementation="eager", **shape)
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self._device = device
        torch.manual_seed(SEED)
        with torch.device(device):
            self._rotary = v4.DeepseekV4RotaryEmbedding(self.config)
            self._module = v4.DeepseekV4Attention(self.config, 0).eval()
        for name, parameter in self._module.named_parameters():
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=parameter.shape[-1] ** -0.5)
        self._module.to(self.dtype)  # norms too: some versions pass a float32 norm's output to matrices as it is
        self._weights = CompressedWeights.of(self._module, self._rotary)

    def tokens(self, num_tokens: int) -> Tensor:
        """Make hidden states like the output of a norm: [num_tokens, hidden_size]."""
        generator = torch.Generator(self._device).manual_seed(SEED)
        sizes = num_tokens, self.config.hidden_size
        return torch.randn(*sizes, generator=generator, dtype=self.dtype, device=self._device)

    def run(self, variant: str, hidden: Tensor) -> Tensor:
        """Return the layer's output [num_tokens, hidden_size] by one of `VARIANTS`."""
        if variant == "csattn":
            return CompressedAttention(self._weights).append(hidden)
        return self._run_eagerly(hidden)

    @torch.no_grad()
    def _run_eagerly(self, hidden: Tensor) -> Tensor:
        positions = torch.arange(len(hidden), device=hidden.device)[None]
        back = positions.T - positions
        mask = torch.zeros_like(back, dtype=self.dtype).masked_fill_(
            (back < 0) | (back >= self._weights.window), -torch.inf
        )
        turned = {"compress": self._rotary(hidden[None], position_ids=positions, layer_type="compress")}
        out: Tensor = self._module(hidden[None], turned, positions, mask[None, None], None)[0][0]
        return out

    def num_flops(self, num_tokens: int) -> float:
        """Count the operations of projections, of index scores of causal pairs, and of attention."""
        weights, rows = self._weights, self._weights.rows
        assert rows is not None, "these layers have compressed rows"
        ratio = rows.compressor.ratio
        legal = causal_lens(num_tokens, num_tokens // ratio, ratio=ratio).double()
        matrices = [
            weights.q_a,
            weights.q_b,
            weights.kv,
            weights.out_a,
            weights.out_b,
            rows.kv,
            rows.gate,
        ]
        pairs = 0.0
        if (of := weights.indexer) is not None:
            matrices += [of.keys.kv, of.keys.gate, of.q_b, of.head_weights]
            pairs = float(legal.sum()) * len(of.q_b)
            legal = legal.clamp(max=of.top_k)
        attended = float(legal.sum()) + sum(min(i + 1, weights.window) for i in range(min(num_tokens, weights.window)))
        attended += max(0, num_tokens - weights.window) * weights.window
        return 2 * (num_tokens * sum(map(torch.numel, matrices)) + pairs + 2 * attended * len(weights.q_b))


def run_layers(
    out: Path | None,
    machine: dict[str, Any],
    max_tokens: int,
    seconds: float,
    device: str,
    shape: dict[str, Any] | None = None,  # fields of transformers' config that differ from V4-Flash's
) -> Records:
    """Measure the cases that the file lacks, small ones first; begin none after that many seconds."""
    records = Records(out, {"bench": "lightning layer", "machine": machine}, KEY)
    deadline = time.monotonic() + seconds
    for kind in KINDS:
        layer = Layer(kind, device, shape or {})
        _check(layer, kind)
        refused: set[str] = set()
        for num_tokens, variant in _cases(max_tokens):
            key = {"kind": kind, "variant": variant, "num_tokens": num_tokens}
            if variant in refused or records.has(**key) or time.monotonic() > deadline:
                continue
            records.add({**key, **(figures := _figures(layer, variant, num_tokens, device))})
            refused |= {variant} if "refused" in figures else set()
    finish(records.content, None)  # the file already has every case and this run's header
    return records


def _cases(max_tokens: int) -> Iterator[tuple[int, str]]:
    num_tokens = K
    while num_tokens <= max_tokens:
        yield from ((num_tokens, variant) for variant in VARIANTS)
        num_tokens *= 2


def _check(layer: Layer, kind: str) -> None:
    hidden = layer.tokens(CHECKED)
    ours, theirs = (layer.run(variant, hidden).float() for variant in VARIANTS)
    apart = float((ours - theirs).norm() / theirs.norm())
    gate(
        apart < MOST_APART[layer.dtype], f"{kind}: the results of {CHECKED} tokens are {apart:.1e} of their norm apart"
    )


def _figures(layer: Layer, variant: str, num_tokens: int, device: str) -> Case:
    hidden = layer.tokens(num_tokens)
    try:
        figures = _measure(lambda: layer.run(variant, hidden), device)
    except torch.OutOfMemoryError:
        return {"refused": "out of memory"}
    except RuntimeError as error:  # torch's CPU allocator raises it
        if "can't allocate memory" not in str(error):
            raise
        return {"refused": "out of memory"}
    finally:
        if device == "cuda":
            torch.cuda.empty_cache()
    return {**figures, "tflops": round(layer.num_flops(num_tokens) / figures["ms"] / 1e9, 2)}


def _measure(run: Callable[[], object], device: str) -> dict[str, Any]:
    if device == "cuda":
        return measure(run, device)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    address_space = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    trim_heap()  # the free memory that the heap keeps differs from run to run
    before = resident_bytes()["anon"]
    resource.setrlimit(resource.RLIMIT_AS, (address_space + psutil.virtual_memory().available, limits[1]))
    try:
        with Watch(resident_bytes) as watch:
            started = time.perf_counter()
            run()
            ms = (time.perf_counter() - started) * 1e3
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    return {"ms": round(ms, 1), "peak_gib": round((watch.most["anon"] - before) / 2**30, 3)}


def layer_table(cases: Sequence[Case]) -> list[str]:
    """Return a Markdown table of time and memory of both variants, with a row for each length."""
    heads = [f"{kind}, {variant}" for kind in KINDS for variant in VARIANTS]
    lines = ["| tokens: ms; GiB above the tokens | " + " | ".join(heads) + " |", "|---:|" + "---:|" * len(heads)]
    found = {tuple(case[name] for name in KEY): case for case in cases}
    for num_tokens in sorted({case["num_tokens"] for case in cases}):
        own = [found.get((kind, variant, num_tokens), {}) for kind in KINDS for variant in VARIANTS]
        cells = [f"{of['ms']:,.0f}; {of['peak_gib']:.1f}" if "ms" in of else of.get("refused", "") for of in own]
        lines.append(f"| {num_tokens:,} | " + " | ".join(cells) + " |")
    return lines
