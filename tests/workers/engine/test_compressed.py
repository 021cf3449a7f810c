"""Steps of compressed attention agree with the same layer over the whole sequence, on the CPU and on a device.

Requests have contexts of any length, and steps any number of rows; idle rows have no effect.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from csattn.artifact import open_artifact
from csattn.artifact.layout import file_layout, state_file
from csattn.batch import StepRows, make_step_rows
from csattn.config import SearchConfig, preset
from csattn.errors import ArtifactCorruptError
from csattn.lightning.compressed import CompressedAttention, CompressedWeights
from csattn.models.description import describe
from csattn.models.loader import load_model, wrap_model
from csattn.models.module_weights import weights_of
from csattn.models.weights import CompressedStepWeights, Linear
from index_build.pipeline import build_artifact
from tests.cuda_on_cpu.emulated import DEVICE
from tests.tiny import byte_tokenizer, make_model, save, token_ids
from tests.workers.engine.talks import Talk, alone
from tests.workers.model.full_context import compressed_shape
from workers.engine.cpu.compressed_on_cpu import CompressedOnCpu
from workers.engine.cpu.engine import CpuEngine
from workers.engine.gpu.attend_compressed import AttendCompressed
from workers.engine.gpu.compressed_memory import CompressedMemory, compressed_bytes
from workers.engine.gpu.compressed_ops import CompressedOps
from workers.model.ops import CompressedBuffers
from workers.serving.step_engine import NO_CONTEXT

WHERE = ["cpu", "device"] if DEVICE.type == "cpu" else [pytest.param("device", marks=pytest.mark.gpu)]
HIDDEN, CAPACITY, MAX_ROWS, NUM_TAILS = 64, 50, 16, 3
# empty; shorter than a window; ends within a compressed row; long enough that its compressed rows are selected
CONTEXT_LENS = (0, 3, 40, 171)


@dataclass(frozen=True)
class Layers:
    """A model with all kinds of layers, each of which is tested by itself."""

    model: Any
    weights: list[CompressedStepWeights]

    def whole(self, layer_idx: int) -> CompressedAttention:
        attention = self.model.model.layers[layer_idx].self_attn
        return CompressedAttention(CompressedWeights.of(attention, self.model.model.rotary_emb))


@pytest.fixture(scope="module")
def layers() -> Layers:
    model = make_model("deepseek_v4")
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    model = model.to(DEVICE)
    return Layers(model, [layer.compressed for layer in weights_of(model).layers])


@dataclass
class Steps:
    """Runs steps of requests. A row is (request number, context id, number of own rows that it sees)."""

    begin: Callable[[int, int], None]  # begins a request (first argument) over a context (second; -1: none)
    attend: Callable[[int, list[tuple[int, int, int]], CompressedBuffers], None]  # runs one layer


def on_device(layers: Layers, states: list[list[Any]]) -> Steps:
    sizes = {"batch_sizes": (1, MAX_ROWS), "num_tails": NUM_TAILS, "tail_capacity": CAPACITY}
    shape = compressed_shape(describe(layers.model.config), CONTEXT_LENS, **sizes)
    memory = CompressedMemory(shape, DEVICE)
    assert memory.nbytes == compressed_bytes(shape)
    for layer in memory.layers:
        for part in (layer.rows, layer.keys, layer.pending):
            part.fill_(torch.nan)
    for context_id, (of_layers, context_len) in enumerate(zip(states, CONTEXT_LENS, strict=True)):
        memory.load(context_id, [state_on(of, "cpu") for of in of_layers], context_len)
    attention = AttendCompressed(shape, layers.weights, memory, DEVICE)

    def attend(layer_idx: int, rows: list[tuple[int, int, int]], buffers: CompressedBuffers) -> None:
        step = step_rows(rows)
        if layer_idx:  # attend_compressed finds the visible rows in layer 0 only
            attention._seen = memory.find(step, layers.weights)
        attention.attend_compressed(layer_idx, buffers, step)

    return Steps(memory.begin_request, attend)


def step_rows(rows: list[tuple[int, int, int]]) -> StepRows:
    step = make_step_rows(MAX_ROWS, DEVICE)
    fill_rows(step, rows)
    return step


def fill_rows(step: StepRows, rows: list[tuple[int, int, int]]) -> None:
    for row, (tail, context, tail_len) in enumerate(rows):
        step.context_ids[row], step.tail_ids[row], step.tail_lens[row] = context, tail, tail_len
        step.positions[row] = (CONTEXT_LENS[context] if context >= 0 else 0) + tail_len - 1


def on_cpu(layers: Layers, states: list[list[Any]]) -> Steps:
    spec, num_layers = describe(layers.model.config), len(layers.weights)
    buffers_of_layers: dict[int, CompressedBuffers] = {i: buffers_of(layers, i) for i in range(num_layers)}
    model: Any = SimpleNamespace(
        spec=SimpleNamespace(num_layers=num_layers),
        max_rows=MAX_ROWS,
        tails=[torch.full((NUM_TAILS, 1, CAPACITY, 2, spec.head_dim), torch.nan) for _ in buffers_of_layers],
        compressed=lambda i: (spec.layers[i].compressed, buffers_of_layers[i], layers.weights[i]),
    )
    attention = CompressedOnCpu(model)
    nothing = [layers.whole(layer_idx).state for layer_idx in range(num_layers)]

    def begin(tail: int, context: int) -> None:
        context_len = CONTEXT_LENS[context] if context >= 0 else 0
        attention.begin_request(tail, states[context] if context >= 0 else nothing, context_len)

    def attend(layer_idx: int, rows: list[tuple[int, int, int]], buffers: CompressedBuffers) -> None:
        tails, contexts, lens = map(list, zip(*rows, strict=True))
        context_lens = torch.tensor([CONTEXT_LENS[i] if i >= 0 else 0 for i in contexts]).numpy()
        attention.set_contexts([states[i] if i >= 0 else nothing for i in contexts])
        attention.set_lens(tails, context_lens, torch.tensor(lens).numpy())
        mine = buffers_of_layers[layer_idx]
        mine.inputs.copy_(buffers.inputs)
        mine.projected.copy_(buffers.projected)
        attention.attend(layer_idx)
        buffers.attended.copy_(mine.attended)

    return Steps(begin, attend)


def state_on(state: Any, device: str) -> Any:
    return type(state)(*(getattr(state, name).to(device) for name in ("window", "rows", "keys", "pending")))


def buffers_of(layers: Layers, layer_idx: int) -> CompressedBuffers:
    of = describe(layers.model.config).layers[layer_idx].compressed
    assert of is not None

    def buffers(*sizes: int) -> Tensor:
        return torch.full(sizes, torch.nan, device=DEVICE)

    return CompressedBuffers(
        latents=buffers(MAX_ROWS, of.q_rank),
        normed=buffers(MAX_ROWS, of.q_rank),
        projected=buffers(MAX_ROWS, of.q_width + of.index_q_width),
        inputs=buffers(MAX_ROWS, sum(of.in_widths)),
        attended=buffers(of.num_groups, MAX_ROWS, of.q_width // of.num_groups),
        grouped=buffers(MAX_ROWS, of.out_width),
    )


def products(x: Tensor, linears: tuple[Linear, ...]) -> Tensor:
    return torch.cat([linear(x, each.weight) for each in linears], dim=-1)


def project(weights: CompressedStepWeights, hidden: Tensor, buffers: CompressedBuffers) -> None:
    latents = linear(hidden, weights.latents.weight)
    normed = rms_norm(latents, latents.shape[1:], weights.latent_norm, weights.eps)
    buffers.projected[: len(hidden)] = products(normed, weights.queries)
    buffers.inputs[: len(hidden)] = products(hidden, weights.inputs)


def finish(layers: Layers, layer_idx: int, buffers: CompressedBuffers, num_rows: int) -> Tensor:
    attention = layers.model.model.layers[layer_idx].self_attn
    groups = attention.o_a_proj.weight.view(len(buffers.attended), -1, buffers.attended.shape[2])
    return linear(
        torch.einsum("gti,gri->tgr", buffers.attended[:, :num_rows], groups).flatten(1), attention.o_b_proj.weight
    )


@pytest.mark.parametrize("layer_idx", range(4))
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("num_rows", [1, 5, MAX_ROWS])
@torch.no_grad()
def test_steps_equal_attention_over_the_whole_sequence(
    layers: Layers, layer_idx: int, where: str, num_rows: int
) -> None:
    contexts = [torch.randn(length, HIDDEN, device=DEVICE) for length in CONTEXT_LENS]
    states, wanted, own = [], {}, {}
    for hidden in contexts:
        whole = [layers.whole(i) for i in range(4)]
        for attention in whole:
            if len(hidden):
                attention.append(hidden)
        states.append([attention.state for attention in whole])
    steps = (on_cpu if where == "cpu" else on_device)(layers, states)
    requests = {0: 3, 1: 2, 2: 1}  # request number -> context id
    for again in (False, True):  # then the same tails with requests over other contexts
        if again:
            requests = {0: -1, 1: 3, 2: 0}
        for tail, context in requests.items():
            own[tail] = torch.randn(CAPACITY, HIDDEN, device=DEVICE)
            before = contexts[context] if context >= 0 else contexts[0]
            wanted[tail] = layers.whole(layer_idx).append(torch.cat((before, own[tail])))[len(before) :]
            steps.begin(tail, context)
        buffers, done = buffers_of(layers, layer_idx), dict.fromkeys(requests, 0)
        while min(done.values()) < CAPACITY:
            rows: list[tuple[int, int, int]] = []
            for tail, context in requests.items():
                more = min(CAPACITY - done[tail], max(1, num_rows * (tail + 1) // 6), MAX_ROWS - len(rows))
                rows += [(tail, context, done[tail] + i + 1) for i in range(more)]
            rows = rows[:num_rows]
            if not rows:
                break
            hidden = torch.stack([own[tail][tail_len - 1] for tail, _, tail_len in rows])
            project(layers.weights[layer_idx], hidden, buffers)
            steps.attend(layer_idx, rows, buffers)
            got = finish(layers, layer_idx, buffers, len(rows))
            want = torch.stack([wanted[tail][tail_len - 1] for tail, _, tail_len in rows])
            torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)
            for tail, _, tail_len in rows:
                done[tail] = tail_len
            requests = dict([*requests.items()][1:] + [*requests.items()][:1])  # rotate the requests
            if all(done[tail] == CAPACITY for tail in requests):
                break


@pytest.mark.parametrize("layer_idx", range(4))
@torch.no_grad()
def test_triton_kernels_equal_the_torch_operations(layers: Layers, layer_idx: int) -> None:
    """On a GPU, or in Triton's interpreter: rows that complete compressed ones (also the first), and an idle row."""
    triton_ops = pytest.importorskip("workers.engine.gpu.compressed_triton_ops", reason="Triton is not installed")
    sizes = {"batch_sizes": (1, MAX_ROWS), "num_tails": NUM_TAILS, "tail_capacity": CAPACITY}
    shape = compressed_shape(describe(layers.model.config), CONTEXT_LENS, **sizes)
    rows = make_step_rows(5, DEVICE)
    step = [(0, 3, 1), (1, 2, 7), (1, 2, 8), (2, -1, 4)]
    fill_rows(rows, step)
    spec, weights, buffers = shape.compressed[layer_idx], layers.weights[layer_idx], buffers_of(layers, layer_idx)
    buffers.inputs.normal_()
    buffers.projected.normal_()
    attended = torch.randn(5, spec.num_heads, spec.head_dim, device=DEVICE)
    pending = torch.randn(NUM_TAILS + 1, MAX_ROWS + spec.span, 2 * sum(spec.compressed_widths), device=DEVICE)
    pending[2, 4:] = torch.nan  # entries before the first token
    made = []
    for ops in (CompressedOps(), triton_ops.TritonCompressedOps()):
        memory = CompressedMemory(shape, DEVICE)
        for context_id, context_len in enumerate(CONTEXT_LENS):
            memory._lens[context_id] = context_len
        layer, seen = memory.layers[layer_idx], memory.find(rows, layers.weights)[spec.ratio]
        if spec.ratio:
            layer.pending.copy_(pending)
        inputs, projected = buffers.inputs[:5], buffers.projected[:5]
        ops.append(inputs, weights, seen, layer)
        if spec.ratio:
            ops.compress(weights, seen, layer)
        queries = ops.make_queries(projected, inputs, weights, seen, layer)
        out = torch.full((spec.num_groups, 5, spec.q_width // spec.num_groups), torch.nan, device=DEVICE)
        ops.unrotate(attended, weights, seen, layer, out)
        own = layer.rows[: memory.first_compressed - 1]
        parts = own, layer.compressed[: layer.nowhere], layer.keys[: layer.nowhere], queries.q, out
        made.append(
            [*(part.clone() for part in parts), layer.pending[:NUM_TAILS], queries.index_q, queries.index_weights]
        )
    for defined, got in zip(*made, strict=True):
        assert (defined is None) == (got is None)
        if defined is not None:
            torch.testing.assert_close(got, defined, rtol=2e-5, atol=2e-5, equal_nan=True)
    assert not made[0][1].isnan().any() and (made[0][1] != 0).any(1).sum() == {0: 0, 4: 3, 12: 1}[spec.ratio]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_without_a_context_are_as_precise_as_in_transformers(dtype: str, tmp_path: Path) -> None:
    """In bfloat16, `pending` has another dtype than the rows."""
    ids = token_ids(45, seed=3).tolist()
    loaded = load_model(save(tmp_path, "deepseek_v4"), dtype=dtype)
    with CpuEngine(loaded, max_requests=2, num_threads=1) as engine:
        got = alone(engine, Talk(NO_CONTEXT, SearchConfig(), "csattn", ids, 4))
    whole = torch.tensor(ids + got.tokens[:-1])[None]
    wide = load_model(tmp_path, dtype=dtype).model.float()
    with torch.no_grad():
        want = wide(whole).logits[0, -4:]
        try:
            theirs = loaded.model(whole).logits[0, -4:].float()
        except RuntimeError as error:
            pytest.skip(f"this transformers does not run it: {error}")
    assert (torch.from_numpy(np.stack(got.logits)) - want).norm() <= 1.2 * (theirs - want).norm() + 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["window", "rows", "keys", "pending"])
def test_a_context_with_nan_is_refused(dtype: str, name: str, tmp_path: Path) -> None:
    model = wrap_model(make_model("deepseek_v4").to(getattr(torch, dtype)), byte_tokenizer(), "altered")
    path = build_artifact(model, token_ids(257), preset("default"), tmp_path).path
    with open_artifact(path) as artifact:
        artifact.require_sound()
        tensors = {tensor.name: (tensor, at) for tensor, at in file_layout(artifact.spec, state_file(1)).tensors}
    tensor, start = tensors[name]
    with (path / state_file(1)).open("r+b") as file:
        file.seek(start)
        file.write(b"\xc0\x7f" if tensor.dtype == "BF16" else b"\x00\x00\xc0\x7f")
    with open_artifact(path) as artifact, pytest.raises(ArtifactCorruptError, match=r"layer-001.* holds NaN"):
        artifact.require_sound()
