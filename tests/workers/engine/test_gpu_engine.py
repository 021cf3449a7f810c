"""The scheduler's engine on a GPU: any mix of requests, contexts loaded and unloaded. Without a device, kernels run on
the CPU."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from csattn.artifact import Artifact, open_artifact
from csattn.config import SearchConfig, preset
from csattn.errors import ConfigError, ContextError, CsattnError
from csattn.selector_names import SelectorName
from index_build.pipeline import build_artifact
from offload.codecs.formats import KvFormat
from offload.errors import CodecError, MemoryPlanError
from tests.cuda_on_cpu import emulated
from tests.cuda_on_cpu.emulated import DEVICE
from tests.tiny import loaded, token_ids
from tests.workers.engine.emulated_engine import emulate
from tests.workers.engine.talks import next_ids_beside_nan
from workers.engine import GpuEngine, lossy_keys
from workers.engine.cpu.engine import CpuEngine
from workers.engine.gpu import engine as gpu_engine
from workers.engine.gpu.memory import PLACEMENTS
from workers.engine.gpu.on_host import SearchOnHost
from workers.model.runner import ModelRunner
from workers.searchers.worker_searcher import WorkerSearcher
from workers.serving.messages import Sampling
from workers.serving.sampling import adjust_logits, draw, draw_spec, likelihood_of
from workers.serving.step_engine import NO_CONTEXT, StepEngine, StepRow
from workers.session import csattn_session

CONTEXT_LENS = (300, 340)
CONFIG = SearchConfig(keep=0.1, window_len=16)
QUESTIONS = [token_ids(5, seed=1).tolist(), token_ids(3, seed=2).tolist()]
NUM_STEPS = 2 if DEVICE.type == "cpu" else 12


@pytest.fixture(autouse=True)
def kernels(emulator: emulated.Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(emulator, monkeypatch)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Artifact]]:
    yield from built_artifacts(tmp_path_factory.mktemp("store"))


def built_artifacts(store: Path) -> Iterator[list[Artifact]]:
    """Yield an artifact of each of CONTEXT_LENS, which stay open until the iterator ends."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                open_artifact(build_artifact(loaded(), token_ids(n, seed=n), preset("default"), store).path)
            )
            for n in CONTEXT_LENS
        ]


def make_engine(placement: str, **changes: object) -> GpuEngine:
    options = {
        "batch_sizes": (1, 2, 4),
        "max_requests": 3,
        "tail_capacity": 32,
        "num_contexts": 2,
        "max_context_len": 400,
    }
    return GpuEngine(loaded(), CONFIG, placement, device=DEVICE, num_threads=2, **{**options, **changes})


def answer(
    engine: StepEngine, request_slot: int, context_id: int, question: list[int], selector: SelectorName = "csattn"
) -> list[int]:
    """Return the greedy continuation of one request alone."""
    engine.open(request_slot, context_id, CONFIG, selector)
    tokens = [int(engine.step([StepRow(request_slot, token) for token in question[:4]]).next_ids[-1])]
    if question[4:]:
        tokens = [int(engine.step([StepRow(request_slot, token) for token in question[4:]]).next_ids[-1])]
    for _ in range(NUM_STEPS - 1):
        tokens.append(int(engine.step([StepRow(request_slot, tokens[-1])]).next_ids[0]))
    engine.close_request(request_slot)
    return tokens


@pytest.mark.parametrize(
    ("placement", "num_workers", "selector", "codec"),
    [
        pytest.param(name, 0, selector, codec, marks=[] if name == "hybrid" else pytest.mark.gpu)
        for name in PLACEMENTS
        for selector, codec in (("csattn", None), ("csattn", "fp8"), ("full", None), ("full", "fp8"))
    ]
    + [pytest.param("host", 2, "csattn", None, marks=pytest.mark.gpu)],
)
def test_answers_equal_the_cpus_while_contexts_are_loaded_and_unloaded(
    artifacts, placement, num_workers, selector, codec
) -> None:
    form = None if codec is None else KvFormat.parse(codec)
    with CpuEngine(loaded(), num_threads=2, kv_format=form) as on_cpu:
        for context_id, artifact in enumerate(artifacts):
            on_cpu.add_context(context_id, artifact)
        want = [answer(on_cpu, 0, context_id, question, selector) for context_id, question in enumerate(QUESTIONS)]
    searcher = WorkerSearcher(num_workers) if num_workers else None
    ready = make_engine(placement, searcher=searcher, selector=selector, kv_format=form)
    try:
        ready.add_context(7, artifacts[0])
        assert answer(ready, 2, 7, QUESTIONS[0], selector) == want[0]
        said = list[list[int]]()

        def meanwhile() -> None:
            if not said or DEVICE.type != "cpu":  # on the CPU, once is enough
                said.append(answer(ready, 2, 7, QUESTIONS[0], selector))

        ready.add_context(9, artifacts[1], meanwhile)
        assert said and all(told == want[0] for told in said)
        together = run_together(ready, [(0, 7), (1, 9)], selector)
        assert together == want
        ready.remove_context(7)
        ready.add_context(8, artifacts[0])
        assert answer(ready, 0, 8, QUESTIONS[0], selector) == want[0]
        counts = ready.counts()
        row_bytes = 2 * 16 * 4 if codec is None else 48  # 2 * (4 + 16), padded to a multiple of 16
        assert counts.kv_bytes == sum(CONTEXT_LENS) * 3 * 2 * row_bytes
        assert (counts.slot_hits > 0) == (placement != "device" and selector == "csattn")
    finally:
        ready.close()


def test_engines_on_one_device_take_turns(artifacts: list[Artifact], monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a search wait for each other: those of two steps at once could each get a part of the device."""
    run, running, most_at_once = ModelRunner.step, 0, 0

    def step(runner: ModelRunner, batch_size: int) -> object:
        nonlocal running, most_at_once
        running += 1
        most_at_once = max(most_at_once, running)
        time.sleep(0.1)
        try:
            return run(runner, batch_size)
        finally:
            running -= 1

    with make_engine("device") as one, make_engine("device") as other, ThreadPoolExecutor() as threads:
        for engine in one, other:
            engine.add_context(0, artifacts[0])
            engine.open(0, 0, CONFIG, "csattn")
        monkeypatch.setattr(ModelRunner, "step", step)
        results = list(threads.map(lambda engine: engine.step([StepRow(0, 5)]), (one, other)))
    assert most_at_once == 1
    assert results[0].next_ids == results[1].next_ids


def run_together(engine: StepEngine, opened: list[tuple[int, int]], selector: SelectorName) -> list[list[int]]:
    """Feed both questions, sharing a step where they fit, then the greedy tokens of both, two rows a step."""
    for request_slot, context_id in opened:
        engine.open(request_slot, context_id, CONFIG, selector)
    engine.step([StepRow(opened[0][0], token) for token in QUESTIONS[0][:4]])
    rows = [StepRow(opened[0][0], token) for token in QUESTIONS[0][4:]]
    rows += [StepRow(opened[1][0], token) for token in QUESTIONS[1]]
    last = engine.step(rows).next_ids
    tokens = [[int(last[0])], [int(last[-1])]]
    for _ in range(NUM_STEPS - 1):
        result = engine.step(
            [StepRow(request_slot, said[-1]) for (request_slot, _), said in zip(opened, tokens, strict=True)]
        )
        for said, token_id in zip(tokens, result.next_ids.tolist(), strict=True):
            said.append(token_id)
    for request_slot, _ in opened:
        engine.close_request(request_slot)
    return tokens


@pytest.mark.parametrize("selector", ["csattn", "full"])
def test_a_watched_step_gives_the_logits_and_fidelity_of_the_cpu(artifacts, selector) -> None:
    with CpuEngine(loaded(), num_threads=2) as on_cpu:
        on_cpu.add_context(0, artifacts[0])
        want = take_watched_step(on_cpu, selector)
    ready = make_engine("hybrid", selector=selector)
    try:
        ready.add_context(0, artifacts[0])
        got = take_watched_step(ready, selector)
    finally:
        ready.close()
    assert got.fidelity is not None
    assert got.next_ids.tolist() == want.next_ids.tolist()
    np.testing.assert_allclose(got.logits, want.logits, rtol=2e-3, atol=2e-3)
    assert got.fidelity.recall == pytest.approx(want.fidelity.recall, abs=0.02)
    assert got.fidelity.mass == pytest.approx(want.fidelity.mass, abs=1e-3)


@pytest.mark.parametrize(
    "placement", [pytest.param(name, marks=[] if name == "hybrid" else pytest.mark.gpu) for name in PLACEMENTS]
)
def test_requests_in_one_step_may_have_different_keep(artifacts, placement) -> None:
    configs = [CONFIG, replace(CONFIG, keep=0.02)]
    with CpuEngine(loaded(), num_threads=2) as on_cpu, make_engine(placement) as ready:
        for engine in (on_cpu, ready):
            engine.add_context(0, artifacts[0])
        want, got = two_logits(on_cpu, configs), two_logits(ready, configs)
        assert [ready.reading(request_slot).rows for request_slot in range(2)] == [20 + 30 + 1.5, 20 + 6 + 1.5]
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3)
        assert np.abs(got[0] - got[1]).max() > 0.01


def two_logits(engine: StepEngine, configs: list[SearchConfig]) -> np.ndarray:
    """Return the logits after two tokens of each of two requests, all in one step."""
    for request_slot, config in enumerate(configs):
        engine.open(request_slot, 0, config, "csattn")
    result = engine.step(
        [StepRow(request_slot, token) for request_slot in range(2) for token in (7, 9)], want_logits=True
    )
    assert result.logits is not None
    return result.logits[1::2].copy()


def test_tokens_are_drawn_for_rows_with_a_draw_also_if_the_step_is_split_in_two(artifacts, monkeypatch) -> None:
    """The tokens are those drawn from the step's logits on the host; logits of other rows are unchanged."""
    sampling = Sampling(max_new_tokens=9, temperature=1.0, top_p=0.9, logit_bias=((7, 2.0),), top_logprobs=2)
    mask = np.arange(loaded().geometry.vocab_size) % 3 == 0
    hows = [
        draw_spec(sampling, 5, 0),
        draw_spec(sampling, 5, 1, token_ids=[7, 9], ends={11}),
        draw_spec(sampling, 5, 2, allowed=lambda vocab_size: lambda: mask),
    ]
    with make_engine("hybrid") as engine:
        engine.add_context(0, artifacts[0])
        results = []
        for asked in ([None] * 3, hows, hows):
            for request_slot in range(3):
                engine.open(request_slot, 0, CONFIG, "csattn")
            rows = [StepRow(request_slot, 7 + request_slot, draw=how) for request_slot, how in enumerate(asked)]
            if len(results) == 2:
                monkeypatch.setattr(engine, "_split_at", lambda rows, lens: 1 if len(rows) > 1 else 0)
            result = engine.step([*rows, StepRow(0, 3)], want_logits=True)
            results.append((result.next_ids.copy(), result.logits.copy(), list(result.likelihoods)))
            for request_slot in range(3):
                engine.close_request(request_slot)
    (argmax, logits, none), *drawn = results
    assert none == [None] * 4
    for next_ids, others, likelihoods in drawn:
        for row, (token_id, how, of) in enumerate(zip(next_ids, hows, likelihoods, strict=False)):
            assert token_id == draw(adjust_logits(logits[row], how), how)
            want = likelihood_of(logits[row], int(token_id), 2)
            assert of is not None and of.logit == pytest.approx(want.logit, abs=1e-4)
            assert [top_id for top_id, _ in of.top] == [top_id for top_id, _ in want.top]
        assert next_ids[3] == argmax[3] and likelihoods[3] is None
        np.testing.assert_allclose(others[3], logits[3], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("token_id", "watch"), [(1 << 20, None), (5, (9, 0)), (5, (1, 9))])
def test_no_part_of_a_refused_step_is_run(artifacts, monkeypatch, token_id, watch) -> None:
    """Also if the step would be split in two."""
    with make_engine("hybrid") as engine:
        engine.add_context(0, artifacts[0])
        want = answer(engine, 0, 0, [3, 4])
        engine.open(0, 0, CONFIG, "csattn")
        monkeypatch.setattr(engine, "_split_at", lambda rows, lens: 1 if len(rows) > 1 else 0)
        with pytest.raises(CsattnError, match=r"token|watched"):
            engine.step([StepRow(0, 3), StepRow(0, token_id)], watch=watch)
        assert engine.step([StepRow(0, 3), StepRow(0, 4)]).next_ids[1] == want[0]


def take_watched_step(engine: StepEngine, selector: SelectorName):
    engine.open(0, 0, CONFIG, selector)
    result = engine.step([StepRow(0, token) for token in QUESTIONS[0][:4]], want_logits=True, watch=(2, 1))
    engine.close_request(0)
    return result


def test_a_failed_fidelity_measurement_leaves_no_search_pending(artifacts, monkeypatch) -> None:
    """With lookahead, a later layer's search has started when the watched layer is read."""
    ahead = replace(CONFIG, lookahead=1)
    with GpuEngine(
        loaded(), ahead, "hybrid", device=DEVICE, batch_sizes=(1, 4), max_requests=1, tail_capacity=32, num_contexts=1,
        max_context_len=400,
    ) as engine:  # fmt: skip
        engine.add_context(0, artifacts[0])
        for fails in (True, False, True, False):
            engine.open(0, 0, ahead, "csattn")
            with monkeypatch.context() as patch, pytest.raises(MemoryError) if fails else nullcontext():
                if fails:
                    patch.setattr(gpu_engine, "fidelity", lambda *_: (_ for _ in ()).throw(MemoryError))
                result = engine.step([StepRow(0, 5)], watch=(0, 0))
                assert result.fidelity is not None and result.fidelity.recall <= 1
            engine.close_request(0)


def test_contexts_can_be_loaded_right_after_a_failed_step(artifacts, monkeypatch) -> None:
    """The threads that search for the step wait for no more queries. If they did, loading would never end."""
    with make_engine("host") as engine:
        engine.add_context(0, artifacts[0])
        engine.open(0, 0, CONFIG, "csattn")
        engine.step([StepRow(0, 5)])
        with monkeypatch.context() as patch:
            patch.setattr(SearchOnHost, "attend", lambda *_: (_ for _ in ()).throw(MemoryError))
            with pytest.raises(MemoryError):
                engine.step([StepRow(0, 6)], watch=(0, 0))
        engine.add_context(1, artifacts[1])
        assert engine.step([StepRow(0, 6)]).next_ids[0] >= 0


@pytest.mark.parametrize("placement", ["device", "hybrid", "host"])
def test_keys_that_a_codec_makes_indistinguishable_are_warned_about(artifacts, placement, monkeypatch, caplog) -> None:
    monkeypatch.setattr(lossy_keys, "TOO_LARGE", 0.0)
    lossy_keys._warn.cache_clear()
    with make_engine(placement, kv_format=KvFormat.parse("fp8")) as ready:
        ready.add_context(0, artifacts[0])
    (record,) = caplog.records
    assert "cannot be distinguished in fp8, in 3 of 3 layers (0, 1, 2)" in record.getMessage()
    assert record.getMessage().endswith("use no KV codec")


def test_invalid_engines_contexts_and_requests_are_refused_with_the_reason(artifacts) -> None:
    with pytest.raises(ConfigError, match="'quest', but a GPU decodes with csattn or full"):
        make_engine("device", selector="quest")
    with pytest.raises(CodecError, match="head_dim is 16, but q8_0 takes multiples of 32"):
        make_engine("device", kv_format=KvFormat.parse("q8_0"))
    ready = make_engine("device", num_contexts=1, max_context_len=320, tail_capacity=4)
    try:
        with pytest.raises(ConfigError, match="no context 0"):
            ready.open(0, 0, CONFIG, "csattn")
        ready.add_context(0, artifacts[0])
        with pytest.raises(MemoryPlanError, match="room for 1 contexts"):
            ready.add_context(1, artifacts[1])
        with pytest.raises(ConfigError, match="leave it out"):
            ready.open(0, 0, CONFIG, "exact")
        with pytest.raises(ConfigError, match=r"keep is 0\.5 .* captured with up to 0\.1"):
            ready.open(0, 0, SearchConfig(keep=0.5, window_len=16), "csattn")
        ready.open(0, 0, CONFIG, "csattn")
        with pytest.raises(ConfigError, match="in use in request slots"):
            ready.remove_context(0)
        ready.step([StepRow(0, 1)] * 3)
        with pytest.raises(ContextError, match="5 rows of its own, and there is room for 4"):
            ready.step([StepRow(0, 1)] * 2)
        ready.close_request(0)
        ready.remove_context(0)
        with pytest.raises(ConfigError, match=r"340 rows.*planned for 320"):
            ready.add_context(1, artifacts[1])
    finally:
        ready.close()


@pytest.mark.parametrize("selector", ["csattn", "full"])
@pytest.mark.parametrize(
    "placement", [pytest.param(name, marks=[] if name == "hybrid" else pytest.mark.gpu) for name in PLACEMENTS]
)
def test_requests_without_a_context_answer_as_on_the_cpu(artifacts, placement, selector) -> None:
    """Before a context is loaded, and in the same steps as a request over a context."""
    with CpuEngine(loaded(), num_threads=2) as on_cpu:
        on_cpu.add_context(7, artifacts[0])
        asked = [(NO_CONTEXT, QUESTIONS[0]), (7, QUESTIONS[1])]
        want = [answer(on_cpu, 0, context_id, question, selector) for context_id, question in asked]
    with make_engine(placement, selector=selector) as ready:
        assert answer(ready, 1, NO_CONTEXT, QUESTIONS[0], selector) == want[0]
        ready.add_context(7, artifacts[0])
        assert run_together(ready, [(0, NO_CONTEXT), (1, 7)], selector) == want


def test_a_context_with_another_index_is_refused_while_others_are_loaded(artifacts, tmp_path) -> None:
    other = build_artifact(loaded(), token_ids(300), preset("lists"), tmp_path).path
    with open_artifact(other) as lists, make_engine("device", max_context_len=None) as ready:
        ready.add_context(0, artifacts[0])
        with pytest.raises(ConfigError, match="different index configurations"):
            ready.add_context(1, lists)
        ready.remove_context(0)
        ready.add_context(1, lists)


def test_a_row_of_nan_has_no_next_token(artifacts: list[Artifact]) -> None:
    """The other row of the step has one."""
    engine = make_engine("device")
    try:
        engine.add_context(0, artifacts[0])
        next_ids = next_ids_beside_nan(engine, engine._placing.ready().runner.weights.embedding, CONFIG)
    finally:
        engine.close()
    assert next_ids[0] >= 0 and next_ids[1] == -1


@pytest.mark.parametrize("placement", [pytest.param("device", marks=pytest.mark.gpu), "hybrid"])
def test_a_session_on_a_gpu_generates_what_it_does_on_the_cpu(artifacts, placement) -> None:
    on_it = {"placement": placement, "device": DEVICE, "batch_sizes": (1, 4), "max_requests": 1, "tail_capacity": 32}
    said = []
    for options in ({}, on_it):
        with csattn_session(loaded(), artifacts[0], CONFIG, **options) as session:
            arguments = session.continue_with(np.array(QUESTIONS[0], np.int32))
            said.append(loaded().model.generate(**arguments, max_new_tokens=NUM_STEPS, do_sample=False).tolist())
            del arguments  # which frees the request's slot
            if options:
                with pytest.raises(ConfigError, match="leave out the observer"):
                    session.request(print)
    assert said[0] == said[1]


@pytest.mark.parametrize("selector", ["csattn", "full"])
def test_a_request_continues_bitwise_from_rows_copied_from_another(artifacts, selector) -> None:
    """The rows are read while the first request continues, and written to a slot that was used before."""
    with make_engine("hybrid", selector=selector) as engine:
        engine.add_context(0, artifacts[0])
        tokens = token_ids(7, seed=5).tolist()
        engine.open(0, 0, CONFIG, selector)
        engine.step([StepRow(0, token) for token in tokens[:4]])
        first, second = engine.read_rows(0, 0, 3), engine.read_rows(0, 3, 4)
        want = engine.step([StepRow(0, token) for token in tokens[4:]], want_logits=True).logits.copy()
        engine.close_request(0)
        engine.open(0, 0, CONFIG, selector)
        engine.step([StepRow(0, 3)])
        engine.close_request(0)
        engine.open(0, 0, CONFIG, selector)
        engine.write_rows(0, first())
        engine.write_rows(0, second())
        assert torch.equal(engine.read_rows(0, 0, 3)(), first())
        got = engine.step([StepRow(0, token) for token in tokens[4:]], want_logits=True).logits
        np.testing.assert_array_equal(got, want)
        with pytest.raises(ContextError, match="32"):
            engine.write_rows(0, torch.zeros(3, 2, 30, 2, 16))
