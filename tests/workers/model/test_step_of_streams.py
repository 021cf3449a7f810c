"""Steps of models with several residual streams give transformers' logits. A stand-in replaces attention."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.streamed import streamed_bytes, streamed_params
from csattn.batch import StepRows, make_step_rows
from csattn.cpu.team import Team
from csattn.models.module_weights import stream_weights, weights_of
from csattn.models.weight_sizes import weight_bytes
from csattn.models.weights import ModelWeights
from tests.tiny import make_model
from tests.workers.model.step_ops import DEVICE
from tests.workers.model.test_streams import ON_CPU, make_modules, make_spec
from tests.workers.model.test_tapes import Recorded, attended, run_tapes
from workers.model import take_weights
from workers.model.cpu import cpu_model
from workers.model.cpu.cpu_model import CpuModel
from workers.model.cpu.tape_ops import TapeOps
from workers.model.devices import Devices
from workers.model.layers import StepLayers
from workers.model.torch_ops import TorchOps

TOKENS = [3, 250, 0, 17]


class Alone:
    """A stand-in for `Devices`: the other devices contribute nothing."""

    def exchange(self, batch_size: int, width: int) -> None:
        return None

    def add(self, x: Tensor) -> None:
        pass


def with_streams(weights: ModelWeights, num: int) -> tuple[ModelWeights, list[Any]]:
    """Return weights with `num` streams, and `transformers`' modules that mix them: each branch's and the last."""
    spec = replace(weights.spec, streams=make_spec(num, 3))
    modules = make_modules(spec.streams, spec.hidden_size, 2 * spec.num_layers, spec.norm_eps)
    mixes = [stream_weights(module) for module in modules[:-1]]
    layers = tuple(
        replace(layer, attention_mix=mixes[2 * i], mlp_mix=mixes[2 * i + 1]) for i, layer in enumerate(weights.layers)
    )
    return replace(weights, spec=spec, layers=layers, join=stream_weights(modules[-1], "hc_")), modules


def logits_in_transformers(model: Any, modules: list[Any]) -> Tensor:
    """Return the logits of TOKENS, each at position 0, where RoPE rotates nothing."""
    num = modules[0].hc_mult
    streams = model.model.embed_tokens(torch.tensor(TOKENS, device=DEVICE))[:, None, None].repeat(1, 1, num, 1)
    waiting = iter(modules)

    def add(streams: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        post, comb, read = next(waiting)(streams)
        return post[..., None] * branch(read)[:, :, None] + comb.transpose(-1, -2) @ streams

    for layer in model.model.layers:

        def attend(x: Tensor, of: Any = layer) -> Tensor:
            attention = of.self_attn
            heads = attention.q_proj(of.input_layernorm(x)).unflatten(-1, (-1, attention.head_dim))
            norm = getattr(attention, "q_norm", None)
            return attention.o_proj(attended(heads if norm is None else norm(heads)).flatten(-2))

        def compute(x: Tensor, of: Any = layer) -> Tensor:
            return of.mlp(of.post_attention_layernorm(x))

        streams = add(add(streams, attend), compute)
    return model.lm_head(model.model.norm(next(waiting)(streams)))[:, 0]


@pytest.mark.parametrize("family", ["llama", "glm4_moe"])
@pytest.mark.parametrize(
    ("kind", "is_shared"), [("torch", False), ("torch", True), ("triton", False), ("triton", True), ("tapes", False)]
)
@torch.no_grad()
def test_a_step_with_several_streams_gives_the_logits_of_transformers(kind: str, is_shared: bool, family: str) -> None:
    """llama has MLPs, glm4_moe experts beside one. is_shared: as on several devices, where the others add nothing."""
    if kind == "tapes" and DEVICE.type == "cuda":
        pytest.skip("tapes are of CPUs")
    model = make_model(family).to(DEVICE)
    weights, modules = with_streams(weights_of(model) if kind == "tapes" else take_weights(model, DEVICE), 3)
    devices = cast(Devices, Alone()) if is_shared else None
    got = logits_of_step(weights, kind, devices)
    torch.testing.assert_close(got, logits_in_transformers(model, modules), rtol=1e-3, atol=1e-3)


def logits_of_step(weights: ModelWeights, kind: str, devices: Devices | None) -> Tensor:
    rows, eps = make_step_rows(len(TOKENS), DEVICE), weights.spec.norm_eps
    rows.token_ids.copy_(torch.tensor(TOKENS))
    tails = [torch.zeros(1, weights.spec.num_kv_heads, 1, 2, weights.spec.head_dim, device=DEVICE)] * len(
        weights.layers
    )
    attention, finish = Recorded(tails, [None] * len(tails)), lambda: None
    if kind == "tapes":
        ops: Any = TapeOps("float32", np.array([len(TOKENS)]), eps)
        rows = replace(rows, tail_ids=rows.tail_ids.long(), tail_lens=torch.ones(len(TOKENS), dtype=torch.int64))
        attention, finish = AtOnce(tails, ops), lambda: run_recorded(ops)
    elif kind == "triton":
        triton_ops = pytest.importorskip("workers.model.gpu.triton_ops", reason="Triton is not installed")
        ops = triton_ops.TritonOps(DEVICE, eps)
    else:
        ops = TorchOps(eps)
    layers = StepLayers(weights, attention, [None] * len(tails), ops, rows, torch.float32, devices)
    for rotation in layers.rotations:
        rotation.cos.fill_(1)
    for call in layers.calls(ahead=False):
        call.run()
    finish()
    return layers.logits


class AtOnce(Recorded):
    """Runs the recorded stages before it attends."""

    def __init__(self, tails: list[Tensor], ops: TapeOps) -> None:
        super().__init__(tails, [None] * len(tails))
        self._ops = ops

    def attend(self, layer_idx: int, q: Tensor, rows: StepRows, out: Tensor) -> None:
        run_recorded(self._ops)
        super().attend(layer_idx, q, rows, out)


def run_recorded(ops: TapeOps) -> None:
    tape = ops.cut()
    tape.set_rows(len(TOKENS))
    with Team(2) as team:
        team.run(tape.tape)


@ON_CPU
@torch.no_grad()
def test_rows_with_streams_have_the_same_bits_in_any_batch_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has the bits that it has alone, and logits are those of the requested rows."""
    whole = make_model("gpt_oss")
    weights, _ = with_streams(weights_of(whole), 4)
    monkeypatch.setattr(cpu_model, "weights_of", lambda _: weights)
    model = CpuModel(whole, 7, 5, 9)
    together = run_tapes(model, [0, 1, 2, 3, 4], True, num_threads=2)[2]
    with Team(2) as team:
        run_tapes(model, [0, 1, 2, 3, 4], True)
        team.run(model.logits_tape([3, 0]))
    np.testing.assert_array_equal(model.logits[:2], together[[3, 0]])
    for row in range(5):
        np.testing.assert_array_equal(run_tapes(model, [row], True)[2][0], together[row])


def test_parameter_and_byte_counts_include_the_stream_mixing_weights() -> None:
    """Weights that mix streams are float32 in every model."""
    model = make_model("llama")
    plain = take_weights(model, "cpu")
    matrices = (2 * plain.spec.num_layers * (3 + 2) * 3 + 3) * 3 * plain.spec.hidden_size
    for weights, item_bytes in ((plain, 4), (take_weights(model.bfloat16(), "cpu"), 2)):
        several, _ = with_streams(weights, 3)
        assert streamed_params(several.spec) == streamed_params(plain.spec) + matrices
        assert streamed_bytes(several) == item_bytes * streamed_params(plain.spec) + 4 * matrices


def test_stream_mixing_weights_stay_float32() -> None:
    module = make_model("deepseek_v4").bfloat16().model.layers[0].ffn_hc
    weights = stream_weights(module)
    assert weights.matrix.dtype == weights.bias.dtype == weights.scales.dtype == torch.float32
    assert torch.equal(weights.matrix, module.fn.float()) and torch.equal(weights.scales, module.scale.float())


def test_weight_bytes_count_the_weights_that_stay_float32(tmp_path: Path) -> None:
    """`transformers` loads weights that mix streams, norms and some others in float32, whatever the model's dtype."""
    make_model("deepseek_v4").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32, torch.bfloat16}
    assert weight_bytes(model.config, 2).decoded == sum(parameter.nbytes for parameter in model.parameters())
