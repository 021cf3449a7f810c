"""One model and its contexts on two devices, with a process each: the same tokens as on one device. Without two
devices, kernels run on the CPU and gloo sums."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from csattn.artifact import Artifact, open_artifact
from csattn.config import SearchConfig, preset
from csattn.errors import ConfigError, ContextError, CsattnError, DevicesError
from csattn.models import LoadedModel
from csattn.models.loader import wrap_model
from csattn.models.quantized_model import linears_of_layers, round_weights
from csattn.models.quantized_weight import QuantizedWeight
from csattn.selector_names import SelectorName
from csattn.share import Share
from csattn.sketch.own import Growth
from index_build.pipeline import build_artifact
from offload.budget import AvailableMemory
from offload.codecs.formats import KvFormat
from offload.errors import MemoryPlanError
from tests.cuda_on_cpu import emulated
from tests.tiny import byte_tokenizer, loaded, make_model, token_ids
from tests.workers.engine import emulated_follower
from tests.workers.engine.emulated_engine import emulate
from workers.engine.gpu import followers, step_model
from workers.engine.gpu.engine import GpuEngine
from workers.engine.gpu.split_engine import SplitEngine
from workers.model.devices import Devices
from workers.serving.step_engine import NO_CONTEXT, StepEngine, StepRow

ON_GPUS = torch.cuda.device_count() > 1
DEVICE = torch.device("cuda", 0) if ON_GPUS else torch.device("cpu")
MODULE = followers.MODULE if ON_GPUS else emulated_follower.MODULE
CLOSE = 2e-3 if ON_GPUS else 5e-4
CONFIG = SearchConfig(keep=0.1, window_len=16)
CONTEXT_LENS = (300, 340)
OF_FEW_BITS: dict[str, Any] = {"head_dim": 64, "initializer_range": 0.1}  # so that each device has whole runs
QUESTIONS = [token_ids(5, seed=1).tolist(), token_ids(3, seed=2).tolist()]
OPTIONS: dict[str, Any] = {
    "batch_sizes": (1, 4),
    "max_requests": 2,
    "tail_capacity": 32,
    "num_contexts": 2,
    "max_context_len": 400,
    "num_threads": 2,
    "device": DEVICE,
}

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() == 1, reason="kernels are compiled for this machine's one device"
)


@pytest.fixture(scope="module", autouse=True)
def start(emulator: emulated.Emulator) -> Iterator[Callable[..., Any]]:
    """How followers are started: on the CPU by a nursery, because each would import what it needs for seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(emulated_follower.KERNELS, str(emulator.directory))
        if ON_GPUS:
            yield followers._start
            return
        nursery = emulated_follower.Nursery()
        yield nursery.start
        nursery.close()


@pytest.fixture(autouse=True)
def kernels(emulator: emulated.Emulator, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(emulator, monkeypatch)
    monkeypatch.setattr(followers, "_start", start)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Artifact]]:
    store: Path = tmp_path_factory.mktemp("store")
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                open_artifact(build_artifact(loaded(), token_ids(n, seed=n), preset("default"), store).path)
            )
            for n in CONTEXT_LENS
        ]


def one(placement: str, model: LoadedModel | None = None, config: SearchConfig = CONFIG, **changes: Any) -> GpuEngine:
    return GpuEngine(model or loaded(), config, placement, **{**OPTIONS, **changes})


def two(placement: str, model: LoadedModel | None = None, config: SearchConfig = CONFIG, **changes: Any) -> SplitEngine:
    close_shared()
    return SplitEngine(model or loaded(), config, placement, 2, module=MODULE, **{**OPTIONS, **changes})


@cache
def shared() -> SplitEngine:
    """An engine for all tests that leave it as it was, because processes start slowly. `two` closes it."""
    return two("hybrid")


def close_shared() -> None:
    if shared.cache_info().currsize:
        shared().close()
        shared.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def close_shared_after_all_tests(start: Callable[..., Any]) -> Iterator[None]:
    """Before a nursery ends, and its followers with it: one that is lost ends this process, too."""
    yield
    close_shared()


def logits_of(engine: StepEngine, request_slot: int, tokens: list[int]) -> np.ndarray:
    result = engine.step([StepRow(request_slot, token) for token in tokens], want_logits=True)
    assert result.logits is not None
    return result.logits.copy()


def talk(
    engine: StepEngine, artifacts: list[Artifact], config: SearchConfig = CONFIG, selector: SelectorName = "csattn"
) -> tuple[list[list[int]], np.ndarray]:
    """Run two requests over two contexts, sharing steps; then copy the first one's rows to another slot and run both.

    Returns the tokens of both requests, and the logits of the first and its copy.
    """
    for context_id, artifact in enumerate(artifacts):
        engine.add_context(context_id, artifact)
    for request_slot in range(2):
        engine.open(request_slot, request_slot, config, selector)
    engine.step([StepRow(0, token) for token in QUESTIONS[0][:4]])
    last = engine.step([StepRow(0, QUESTIONS[0][4]), *(StepRow(1, token) for token in QUESTIONS[1])]).next_ids
    said = [[int(last[0])], [int(last[-1])]]
    for _ in range(3):
        result = engine.step([StepRow(request_slot, said[request_slot][-1]) for request_slot in range(2)])
        for request_slot, token in enumerate(result.next_ids.tolist()):
            said[request_slot].append(token)
    rows = engine.read_rows(0, 0, 8)()
    engine.close_request(1)
    engine.remove_context(1)
    engine.open(1, 0, config, selector)
    if config.search_period == 1:  # as `write_rows` requires
        engine.write_rows(1, rows)
    return said, np.concatenate([logits_of(engine, 0, said[0][3:]), logits_of(engine, 1, said[0][3:])])


def test_a_call_that_one_device_refuses_is_refused_and_all_devices_continue(artifacts, monkeypatch) -> None:
    """Also while the first context is loaded, when memory is planned."""
    engine = shared()
    with pytest.raises(ConfigError, match="no context 0"):
        engine.open(0, 0, CONFIG, "csattn")
    with monkeypatch.context() as patch:
        little = AvailableMemory(device_bytes=1, host_bytes=1)
        patch.setattr(step_model, "available_memory", lambda device: little)
        with pytest.raises(MemoryPlanError, match="device memory"):  # only on the first device
            engine.add_context(0, artifacts[0])
    engine.add_context(0, artifacts[0])
    with pytest.raises(ConfigError, match="context 0 is loaded already"):
        engine.add_context(0, artifacts[0])
    with open_artifact(artifacts[1].path) as gone:
        gone.path = gone.path / "away"
        with pytest.raises(CsattnError, match="away"):  # only on the second device
            engine.add_context(1, gone)
    engine.add_context(1, artifacts[1])
    with pytest.raises(ConfigError, match="no context 2"):
        engine.open(0, 2, CONFIG, "csattn")
    engine.open(0, 1, CONFIG, "csattn")
    with pytest.raises(ContextError, match="token id 256 is not"):
        engine.step([StepRow(0, 256)])
    with pytest.raises(ConfigError, match="slot 1 is not open"):
        engine.step([StepRow(0, 1), StepRow(1, 1)])
    assert engine.step([StepRow(0, 1)]).next_ids[0] >= 0
    with pytest.raises(ConfigError, match="in use in request slots"):
        engine.remove_context(1)
    with pytest.raises(ConfigError, match="computes with other devices already"):
        Devices(Share(0, 2), DEVICE, Path("nowhere"))
    engine.close_request(0)
    for context_id in range(2):
        engine.remove_context(context_id)


def test_the_fidelity_of_a_watched_step_covers_the_heads_of_all_devices(artifacts) -> None:
    seen = []
    for engine in (one("hybrid"), shared()):
        engine.add_context(0, artifacts[0])
        engine.open(0, 0, CONFIG, "csattn")
        seen.append(engine.step([StepRow(0, 7)], watch=(0, 1)).fidelity)
        engine.close_request(0)
        engine.remove_context(0)
    assert seen[1].recall == pytest.approx(seen[0].recall, abs=1e-6)
    assert seen[1].mass == pytest.approx(seen[0].mass, abs=1e-5)


@pytest.mark.parametrize("placement", ["hybrid", pytest.param("device", marks=pytest.mark.gpu)])
def test_two_devices_generate_what_one_generates(artifacts, placement) -> None:
    with one(placement) as engine:
        want_said, want = talk(engine, artifacts)
        want_counts = engine.counts()
    with nullcontext(shared()) if placement == "hybrid" else two(placement) as engine:
        before = engine.counts()
        said, got = talk(engine, artifacts)
        counts = engine.counts()
        assert "1 contexts, 2 requests" in repr(engine)
        tidy(engine)
    assert said == want_said
    np.testing.assert_allclose(got, want, rtol=CLOSE, atol=CLOSE)
    assert counts.kv_bytes == want_counts.kv_bytes
    assert counts.slot_lookups - before.slot_lookups == want_counts.slot_lookups


@pytest.mark.parametrize(
    ("placement", "options"),
    [
        pytest.param(
            "host",
            {"config": replace(CONFIG, lookahead=1, search_period=4), "kv_format": KvFormat.parse("fp8")},
            id="by the CPU, at every fourth token, rows in fewer bits",
        ),
        pytest.param("hybrid", {"selector": "full"}, id="all rows, streamed"),
        pytest.param("device", {"selector": "exact"}, id="exact"),
        pytest.param("host", {"config": replace(CONFIG, lookahead=1)}, id="by the CPU", marks=pytest.mark.gpu),
        pytest.param("hybrid", {"kv_format": KvFormat.parse("fp8")}, id="fewer bits", marks=pytest.mark.gpu),
        pytest.param("device", {"selector": "full"}, id="all rows", marks=pytest.mark.gpu),
        pytest.param("device", {"config": replace(CONFIG, search_period=4)}, id="in periods", marks=pytest.mark.gpu),
    ],
)
def test_two_devices_equal_one_with_other_placements_selectors_and_codecs(artifacts, placement, options) -> None:
    config, selector = options.get("config", CONFIG), options.get("selector", "csattn")
    of_one = of_two = None
    for make in (one, two):
        with make(placement, **options) as engine:
            of_one, of_two = of_two, talk(engine, artifacts, config, selector)
    assert of_one is not None and of_two is not None
    assert of_one[0] == of_two[0]
    np.testing.assert_allclose(of_two[1], of_one[1], rtol=CLOSE, atol=CLOSE)


def test_two_devices_read_all_rows_where_that_is_faster(tmp_path) -> None:
    half = wrap_model(make_model("llama").bfloat16(), byte_tokenizer(), "half")
    said = []
    with open_artifact(build_artifact(half, token_ids(300), preset("default"), tmp_path).path) as artifact:
        for make in (one, two):
            with make("device", half, all_where_faster=True) as engine:
                engine.add_context(0, artifact)
                engine.open(0, 0, CONFIG, "csattn")
                said.append(logits_of(engine, 0, [5]))
                assert engine.reading(0).rows == 301
    np.testing.assert_allclose(said[1], said[0], rtol=0, atol=0.05 * said[0].std())


def tidy(engine: SplitEngine) -> None:
    for request_slot in range(2):
        engine.close_request(request_slot)
    engine.remove_context(0)


@pytest.mark.parametrize("family", [pytest.param("qwen2_moe", marks=pytest.mark.gpu), "glm4_moe", "gpt_oss"])
def test_experts_split_over_two_devices_equal_one_device(tmp_path, family) -> None:
    """Routed and shared experts, experts and dense MLPs, biases and sink logits."""
    want, got = (decode(make, loaded(family), tmp_path) for make in (one, two))
    np.testing.assert_allclose(got, want, rtol=CLOSE, atol=CLOSE)


def test_compressed_attention_split_over_two_devices_equals_one_device(tmp_path) -> None:
    model = loaded("deepseek_v4")
    built = [build_artifact(model, token_ids(n, seed=n), preset("default"), tmp_path) for n in CONTEXT_LENS]
    given = []
    for make in (one, two):
        with ExitStack() as stack:
            engine = stack.enter_context(make("device", model))
            for number, of in enumerate(built):
                engine.add_context(number, stack.enter_context(open_artifact(of.path)))
                engine.open(number, number, CONFIG, "csattn")
                engine.step([StepRow(number, token) for token in QUESTIONS[number][:3]])
            logits = [logits_of(engine, 0, [9])]
            for token in range(20, 29):  # enough to complete compressed rows
                logits.append(engine.step([StepRow(0, token), StepRow(1, token + 1)], want_logits=True).logits)
            given.append(np.concatenate(logits))
    np.testing.assert_allclose(given[1], given[0], rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("rounding", [pytest.param("fp8", marks=pytest.mark.gpu), "int4"])
def test_quantized_weights_split_over_two_devices_equal_one_device(tmp_path, rounding) -> None:
    """In float32, which steps of many rows may use; steps of few rows use bfloat16, as in the next test."""
    whole = make_model("llama", **OF_FEW_BITS, intermediate_size=256)
    for _, linear in linears_of_layers(whole):
        linear.quantized = QuantizedWeight.rounded(linear.weight.data, rounding)
        linear.weight.data = linear.quantized.decoded(torch.float32)
    model = wrap_model(whole, byte_tokenizer(), rounding)
    want, got = (decode(make, model, tmp_path, (16,)) for make in (one, two))
    np.testing.assert_allclose(got, want, rtol=CLOSE, atol=CLOSE)


def test_quantized_experts_split_over_two_devices_equal_one_device(tmp_path) -> None:
    """In bfloat16, where another order of summation makes larger differences."""
    whole = make_model("qwen3_moe", **OF_FEW_BITS, moe_intermediate_size=256, dtype=torch.bfloat16)
    round_weights(whole, "int4")
    model = wrap_model(whole, byte_tokenizer(), "rounded")
    want, got = (decode(make, model, tmp_path) for make in (one, two))
    np.testing.assert_allclose(got, want, rtol=0, atol=0.15 * want.std())


def decode(
    make: Callable[..., StepEngine], model: LoadedModel, store: Path, batch_sizes: tuple[int, ...] = (4,)
) -> np.ndarray:
    """Return the logits of a step of several tokens, and of three with one each."""
    artifact = build_artifact(model, token_ids(300), preset("default"), store)
    with open_artifact(artifact.path) as artifact, make("hybrid", model, batch_sizes=batch_sizes) as engine:
        engine.add_context(0, artifact)
        engine.open(0, 0, CONFIG, "csattn")
        steps = QUESTIONS[1], *([token] for token in QUESTIONS[0][:3])
        return np.concatenate([logits_of(engine, 0, step) for step in steps])


def test_own_segments_split_over_two_devices_equal_one_device(tmp_path, rng) -> None:
    """Each device makes the segments of its own heads, here from rows that were written. Drafts come and go."""
    model = wrap_model(make_model("gemma3_text", max_position_embeddings=4096), byte_tokenizer(), "long")
    config, growth = replace(CONFIG, lookahead=1), Growth(least_near=8)
    num_layers, heads = len(model.geometry.indexed_layers), model.geometry.num_kv_heads
    rows = torch.from_numpy(rng.standard_normal((num_layers, heads, 1050, 2, 16)).astype(np.float32))
    logits = []
    with open_artifact(build_artifact(model, token_ids(300), preset("default"), tmp_path).path) as artifact:
        for make in (one, two):
            with make("hybrid", model, config, tail_capacity=1100, growth=growth, batch_sizes=(1, 4)) as engine:
                engine.add_context(0, artifact)
                engine.open(0, 0, config, "csattn")
                engine.write_rows(0, rows)
                engine.step([StepRow(0, 5), *[StepRow(0, 6, is_draft=True)] * 2])
                engine.drop_rows(0, 2)
                logits.append(logits_of(engine, 0, [7]))
                assert engine.reading(0).rows < 300 + 1050
    np.testing.assert_allclose(logits[1], logits[0], rtol=CLOSE, atol=CLOSE)


def test_requests_without_a_context_may_precede_a_context_with_another_index(artifacts) -> None:
    said, lists = [], preset("lists")
    for make in (one, two):
        with make("hybrid", max_context_len=None, index_config=lists, batch_sizes=(1,)) as engine:
            with pytest.raises(ConfigError, match="0 to 1, not 5"):
                engine.open(5, NO_CONTEXT, CONFIG, "csattn")
            engine.open(0, NO_CONTEXT, CONFIG, "csattn")
            said.append(logits_of(engine, 0, [5]))
            engine.close_request(0)
            engine.add_context(0, artifacts[1])
            engine.open(1, 0, CONFIG, "csattn")
            said.append(logits_of(engine, 1, [7]))
    np.testing.assert_allclose(said[2], said[0], rtol=CLOSE, atol=CLOSE)
    np.testing.assert_allclose(said[3], said[1], rtol=CLOSE, atol=CLOSE)


def test_engines_that_cannot_be_split_are_refused_with_the_reason() -> None:
    rounded = wrap_model(make_model("llama"), byte_tokenizer(), "rounded")
    linear = rounded.model.model.layers[0].self_attn.o_proj
    linear.quantized = QuantizedWeight.rounded(linear.weight.data, "fp8")
    with pytest.raises(ConfigError, match=r"3 devices cannot split 2 KV heads .* 1 or 2 can"):
        SplitEngine(loaded(), CONFIG, "hybrid", 3, **OPTIONS)
    with pytest.raises(ConfigError, match="norms over all heads together, which csattn cannot split"):
        SplitEngine(loaded("olmoe"), CONFIG, "hybrid", 2, **OPTIONS)
    with pytest.raises(ConfigError, match="search workers support only one device"):
        SplitEngine(loaded(), CONFIG, "hybrid", 2, searcher=object(), **OPTIONS)
    with pytest.raises(ConfigError, match=r"2 devices cannot split this model's weights of 8 or 4 bits: .*; 1 can"):
        SplitEngine(rounded, CONFIG, "hybrid", 2, **OPTIONS)
    with pytest.raises(ConfigError, match="unknown placement 'cloud'"):
        SplitEngine(loaded(), CONFIG, "cloud", 2, **OPTIONS)
    with pytest.raises(DevicesError, match=r"did not start .*look at its output"):
        SplitEngine(loaded(), CONFIG, "hybrid", 2, module="tests.no_such_module", **OPTIONS)


def test_the_first_process_exits_and_cleans_up_if_the_other_is_killed(artifacts, tmp_path: Path) -> None:
    """While steps are running. Nothing is left of their rendezvous directory."""
    command = [sys.executable, "-m", "tests.workers.engine.split_process", str(artifacts[0].path)]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=environment) as child:
        assert child.stdout is not None and child.stderr is not None
        other = int(child.stdout.readline())
        next(tmp_path.glob("csattn-devices-*/meeting")).unlink()  # as also happens while a group ends
        os.kill(other, signal.SIGKILL)
        status, said = child.wait(60), child.stderr.read()
    assert status == 1
    assert re.search("(process of device 1 is lost|first device failed at a step).*this process ends", said)
    assert not list(tmp_path.glob("csattn-devices-*"))


def test_a_follower_process_exits_if_the_first_process_is_killed() -> None:
    """The follower waits for its first message, which never comes, on a socket that stays open."""
    ours, theirs = socket.socketpair()
    start = f"import os, subprocess, sys, time; p = subprocess.Popen([{sys.executable!r}, '-P', '-m', {MODULE!r}, "
    start += f"'{theirs.fileno()}', str(os.getpid())], pass_fds=[{theirs.fileno()}]); "
    start += "print(p.pid, flush=True); time.sleep(600)"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    with ours, theirs:
        first = subprocess.Popen(
            [sys.executable, "-c", start], stdout=subprocess.PIPE, pass_fds=[theirs.fileno()], env=environment
        )
        with first:
            assert first.stdout is not None
            other = int(first.stdout.readline())
            first.kill()
        until = time.monotonic() + 60
        while is_running(other):
            assert time.monotonic() < until, "nobody has ended it"
            time.sleep(0.1)


def is_running(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
