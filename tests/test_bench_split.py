"""The benchmark of several GPUs: the shares of a workload and of random weights add up to the whole."""

import json
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any
from unittest.mock import Mock
from weakref import ref

import pytest
import torch

from bench import split
from bench.decode.recording import save_recording
from bench.decode.variants import INDEXES
from bench.decode.widened import Heads
from bench.decode.workload import Workload
from bench.random_weights import random_weights
from bench.shapes import config_named, shape_named
from bench.split import CLOSE, ShareOfWorkload, compare, main
from bench.streamed import streamed_bytes
from bench.timing import GateError, machine
from csattn.errors import ConfigError
from csattn.models.weights import LayerWeights
from csattn.share import Share
from tests.cuda_on_cpu.emulated import Emulator
from tests.emulated_split import ADD_US, STEP_US
from tests.test_bench_decode import built_once, recording  # noqa: F401 (fixtures)
from workers.model import weights as model_weights

CPU = torch.device("cpu")
HEADS = Heads.of(shape_named("llama-3.1-8b"))


def test_the_shares_of_a_workload_concatenate_to_the_whole(recording) -> None:  # noqa: F811
    whole = Workload(recording, HEADS, 192, 2, CPU)
    parts = [ShareOfWorkload(recording, HEADS, 192, 2, CPU, share=Share(rank, 2)) for rank in range(2)]
    assert parts[1].rows(0).untyped_storage().nbytes() == whole.rows(0).nbytes // 2
    for layer_idx in range(2):
        assert torch.equal(torch.cat([part.rows(layer_idx) for part in parts]), whole.rows(layer_idx))
        queries = torch.cat([part.queries(layer_idx) for part in parts], dim=2)
        assert torch.equal(queries, whole.queries(layer_idx))
        index = whole.index(layer_idx, INDEXES["default"])
        of_parts = [part.index(layer_idx, INDEXES["default"]) for part in parts]
        for name in ("codes", "marks", "key_mean", "query_transform", "value_mean", "value_transform"):
            assert torch.equal(torch.cat([getattr(part, name) for part in of_parts]), getattr(index, name))


@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen2.5-7b"])  # tied to its embedding; with biases
def test_the_shares_of_random_weights_add_up_to_the_whole(name: str) -> None:
    shape = few_layers(name)
    whole = random_weights(shape, CPU, torch.float32)
    parts = [random_weights(shape, CPU, torch.float32, share=Share(rank, 2)) for rank in range(2)]
    down = whole.layers[1].down.weight
    x = torch.randn(3, down.shape[1])
    added = [half @ part.layers[1].down.weight.T for part, half in zip(parts, x.chunk(2, dim=1), strict=True)]
    torch.testing.assert_close(sum(added), x @ down.T, rtol=1e-4, atol=1e-4)
    assert torch.equal(torch.cat([part.head.weight for part in parts]), whole.head.weight)
    for part in parts:
        (qkv,) = part.layers[0].qkv
        assert len(qkv.weight) == part.spec.heads.qkv_width
        assert qkv.bias is None or len(qkv.bias) == len(qkv.weight)
        assert torch.equal(part.embedding, whole.embedding)


def test_shares_of_random_experts_have_the_memory_layout_of_steps() -> None:
    """Gates and ups share one matrix, and the whole's memory is not kept."""
    shape = few_layers("gpt-oss-20b")
    whole = random_weights(shape, CPU).layers[1].experts[0]
    parts = [random_weights(shape, CPU, share=Share(rank, 2)) for rank in range(2)]
    for part in parts:
        of, experts = part.spec.layers[1].experts[0], part.layers[1].experts[0]
        assert experts.ups.data_ptr() - experts.gates.data_ptr() == experts.gates[0].nbytes
        assert experts.up_bias.data_ptr() - experts.gate_bias.data_ptr() == experts.gate_bias[0].nbytes
        assert experts.gates.untyped_storage().nbytes() == 2 * experts.gates.numel() * 2
        assert experts.down.untyped_storage().nbytes() == experts.down.numel() * 2 == experts.gates.numel() * 2
        assert experts.gates.shape == (of.num_experts, of.intermediate_size, 64)
    assert torch.equal(torch.cat([part.layers[1].experts[0].down for part in parts], dim=2), whole.down)


def test_only_the_share_of_a_model_stays_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """During construction, at most one whole layer is held besides the share."""
    wholes, share_of_layer = list[ref[torch.Tensor]](), model_weights.share_of_layer

    def watched(whole: LayerWeights, *others: Any) -> LayerWeights:
        assert not any(other() is not None for other in wholes)
        wholes.extend(ref(x) for x in (whole.down.weight, whole.qkv[0].weight, whole.gate_up[0].weight))
        return share_of_layer(whole, *others)

    monkeypatch.setattr(model_weights, "share_of_layer", watched)
    weights, one = (random_weights(few_layers("llama-3.1-8b"), CPU, share=share) for share in (Share(1, 2), None))
    linears = [weights.head]
    for layer in weights.layers:
        linears += [*layer.qkv, layer.out, *layer.gate_up, layer.down]
    assert len(wholes) == 6 and not any(whole() is not None for whole in wholes)
    assert sum(linear.weight.untyped_storage().nbytes() for linear in linears) == streamed_bytes(weights)
    assert 2 * streamed_bytes(weights) == streamed_bytes(one)


def test_a_number_of_devices_that_does_not_divide_the_kv_heads_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 devices cannot split 8 KV heads"):
        random_weights(few_layers("llama-3.1-8b"), CPU, share=Share(0, 3))


def few_layers(name: str) -> Any:
    return config_named(name, num_hidden_layers=2, hidden_size=64, head_dim=64, vocab_size=130)


def test_logits_that_differ_from_the_whole_models_are_refused() -> None:
    logits = torch.randn(2, 1000)
    assert compare(logits + 0.1 * CLOSE, logits)["same_tokens"] == 1.0
    with pytest.raises(GateError, match="of their spread apart"):
        compare(logits.roll(1, dims=1), logits)


def test_invalid_numbers_of_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked in ("1", "2,4", "", "0"):
        monkeypatch.setattr("sys.argv", ["bench.split", "--devices", asked])
        with pytest.raises(GateError, match=f"alone or beside 1: 4, or 1,4; '{asked}' is neither"):
            main()


def test_a_process_records_the_command_that_the_user_gave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["-m", "bench.split", "--devices", "2", "--json", str(tmp_path / "result.json")]
    monkeypatch.setattr("sys.orig_argv", ["python3", *given, "--process", "0", "meeting"])
    monkeypatch.setattr("sys.argv", [*given[1:], "--process", "0", "meeting"])
    monkeypatch.setattr(split, "Devices", Mock())
    monkeypatch.setattr(split, "_Bench", lambda *_: Mock(ceilings={}, run=lambda counts: []))
    monkeypatch.setattr(split, "device_machine", machine)
    main()
    told = json.loads((tmp_path / "result.json").read_text())["machine"]["command"]
    assert told == " ".join(["python", *given])


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for this machine's devices")
def test_one_and_two_devices_compute_the_same_step_and_report_its_bound(
    emulator: Emulator,
    recording,  # noqa: F811
    tmp_path: Path,
) -> None:
    save_recording(recording, tmp_path / "recorded.npz")
    told = str(emulator.directory), str(tmp_path / "recorded.npz"), str(tmp_path / "meeting")
    command = [sys.executable, "-m", "tests.emulated_split", *told]
    with Popen(command, stdout=PIPE, text=True, process_group=0) as process, ExitStack() as stack:
        stack.callback(os.killpg, process.pid, signal.SIGKILL)
        said = process.communicate(timeout=300)[0]
        stack.pop_all()
    assert process.returncode == 0
    (cases, without_whole, without_second), (others, *_) = json.loads(said.splitlines()[-1])
    names = ("placement", "num_devices")
    assert [[case[name] for name in names] for case in cases] == [
        ["device", 1],
        ["device", 2],
        ["hybrid", 1],
        ["hybrid", 2],
        ["host", 1],
        ["host", 2],
    ]
    assert [case["num_devices"] for case in others] == [2, 2, 2]
    for one, two in (cases[:2], cases[2:4], cases[4:]):
        assert two["logits_apart"] < 1e-3 and two["same_tokens"] == 1.0
        for part, read_us in one["least_us"].items():
            assert read_us == pytest.approx(2 * two["least_us"][part], rel=1e-2)
        assert two["add_us"] == ADD_US and two["exchange_us"] == 1.0
        assert two["least_us"]["sums"] == 4.0 and "sums" not in one["least_us"]
        for case in (one, two):
            assert case["bound_us"] == pytest.approx(sum(case["least_us"].values()), abs=0.3)
            assert case["of_bound"] == pytest.approx(case["bound_us"] / STEP_US, abs=1e-3)
    assert cases[3]["hit_rate"] >= 0
    whole, shared_out = without_whole
    assert "the whole model needs" in whole["refused"] and shared_out["of_bound"] == cases[1]["of_bound"]
    assert "an operation failed on another device" in without_second[0]["refused"]
