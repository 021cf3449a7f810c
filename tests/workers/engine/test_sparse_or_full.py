"""`all_where_faster`: which steps attend to all rows, and that these equal full attention."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from csattn.artifact import Artifact, open_artifact
from csattn.config import SearchConfig, preset
from csattn.errors import ConfigError
from csattn.models import LoadedModel
from csattn.models.loader import wrap_model
from csattn.sketch.own import Growth
from index_build.pipeline import build_artifact
from offload.codecs.formats import KvFormat
from tests.cuda_on_cpu import emulated
from tests.cuda_on_cpu.emulated import DEVICE
from tests.tiny import byte_tokenizer, make_model, token_ids
from tests.workers.engine.emulated_engine import emulate
from workers.engine.gpu import sparse_or_full
from workers.engine.gpu.attend_all import attend_all_bytes
from workers.engine.gpu.engine import GpuEngine
from workers.engine.gpu.memory import plan_memory
from workers.engine.gpu.shape import EngineShape
from workers.engine.gpu.sparse_or_full import all_are_faster
from workers.serving.step_engine import NO_CONTEXT, StepRow

CONTEXT_LEN = 300
CONFIG = SearchConfig(keep=0.05, window_len=16)
ROW_BYTES = 2 * 2 * 16 * 2  # a row of two KV heads, in bfloat16


@pytest.fixture(autouse=True)
def kernels(emulator: emulated.Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(emulator, monkeypatch)
    # so that two requests on one context read all of it and one does not; the model has two query heads per KV head
    monkeypatch.setattr(sparse_or_full, "SELECTION_BYTES", 100 * ROW_BYTES)
    monkeypatch.setattr(sparse_or_full, "SELECTION_BYTES_PER_ROW", 10 * ROW_BYTES)
    monkeypatch.setattr(sparse_or_full, "HEADS_LIKE_FULL", 5)


@pytest.fixture(scope="module")
def half() -> LoadedModel:
    return wrap_model(make_model("llama", max_position_embeddings=4096).bfloat16(), byte_tokenizer(), "tiny")


@pytest.fixture(scope="module")
def artifact(half: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Artifact]:
    store = tmp_path_factory.mktemp("store")
    built = build_artifact(half, token_ids(CONTEXT_LEN, seed=1), preset("default"), store)
    with open_artifact(built.path) as opened:
        yield opened


def make_engine(half: LoadedModel, **changes: object) -> GpuEngine:
    options = {"batch_sizes": (1, 2, 4), "max_requests": 4, "tail_capacity": 900, "max_context_len": 400}
    return GpuEngine(half, CONFIG, "device", device=DEVICE, **{**options, **changes})


def logits(engine: GpuEngine, tokens: Sequence[Sequence[int]], context_id: int = 0) -> NDArray[np.float32]:
    """Run a step for each list of tokens, one token per request. Return the logits of the last step."""
    selector = engine.selector
    for request_slot in range(len(tokens[0])):
        engine.open(request_slot, context_id, CONFIG, selector)
    for step in tokens:
        result = engine.step(
            [StepRow(request_slot, token) for request_slot, token in enumerate(step)], want_logits=True
        )
    assert result.logits is not None
    return result.logits


def test_a_step_reads_all_rows_where_several_requests_share_a_context(half, artifact) -> None:
    """Such a step is bitwise full attention's; others are bitwise those of an engine that always selects."""
    pair, alone = [(5, 9), (7, 3)], [(5,), (7,)]
    for tokens, like in ((pair, {"selector": "full"}), (alone, {})):
        with make_engine(half, all_where_faster=True) as engine, make_engine(half, **like) as other:
            for each in (engine, other):
                each.add_context(0, artifact)
            got, want = logits(engine, tokens), logits(other, tokens)
            assert np.array_equal(got, want)
            reading, told = engine.reading(0), other.reading(0)
            assert reading.rows == told.rows, "a reading tells of what was read"


def test_a_request_reads_some_rows_in_one_step_and_all_in_the_next(half, artifact) -> None:
    with make_engine(half, all_where_faster=True) as engine:
        engine.add_context(0, artifact)
        engine.open(0, 0, CONFIG, "csattn")
        engine.step([StepRow(0, 5)])
        some = engine.reading(0).rows
        engine.open(1, 0, CONFIG, "csattn")
        engine.step([StepRow(0, 6), StepRow(1, 6)])
        assert some < engine.reading(0).rows < engine.reading(1).rows
        alone, together = [StepRow(0, 7)], [StepRow(0, 6), StepRow(1, 6)]
        assert engine.step(together, watch=(0, 1)).fidelity is None, "nothing is chosen"
        chosen = engine.step(alone, watch=(0, 1)).fidelity
        assert chosen is not None and chosen.recall < 1


def test_there_are_no_drafts_because_a_draft_may_change_what_the_row_before_it_reads(half, artifact) -> None:
    with make_engine(half, all_where_faster=True) as engine:
        engine.add_context(0, artifact)
        got = []
        for draft in ([], [StepRow(0, 6, is_draft=True)]):
            engine.open(0, 0, CONFIG, "csattn")
            got.append(engine.step([StepRow(0, 5), *draft], want_logits=True).logits[0].copy())
            engine.close_request(0)
        assert not np.array_equal(*got)
        assert not engine.takes_drafts(artifact, CONFIG, "csattn")
    with make_engine(half) as engine:
        assert engine.takes_drafts(artifact, CONFIG, "csattn")


def test_reading_counts_only_computed_tokens_not_written_rows(half, artifact) -> None:
    with make_engine(half, all_where_faster=True) as engine:
        engine.add_context(0, artifact)
        for request_slot in (0, 1):
            engine.open(request_slot, 0, CONFIG, "csattn")
            engine.write_rows(request_slot, torch.randn(3, 2, 100, 2, 16).bfloat16())
        engine.step([StepRow(0, 5), StepRow(1, 5)])
        assert engine.reading(0).rows == CONTEXT_LEN + 101


def test_own_segments_are_read_in_full_by_a_step_that_reads_all_rows(half, artifact, monkeypatch) -> None:
    growth, rows = Growth(segment_len=1024, least_near=64), torch.randn(3, 2, 1200, 2, 16).bfloat16()
    got = []
    for changes, choosing in (
        ({"all_where_faster": True}, 4000),
        ({"all_where_faster": True}, 0),
        ({"selector": "full"}, 0),
    ):
        monkeypatch.setattr(sparse_or_full, "SELECTION_BYTES", choosing * ROW_BYTES)
        with make_engine(half, growth=growth, tail_capacity=1300, **changes) as engine:
            engine.add_context(0, artifact)
            for request_slot in (0, 1):
                engine.open(request_slot, 0, CONFIG, engine.selector)
                engine.write_rows(request_slot, rows)
            result = engine.step([StepRow(0, 5), StepRow(1, 5)], want_logits=True)
            got.append(result.logits.copy())
            assert engine.requests[0].num_segments == ("all_where_faster" in changes)
    assert np.array_equal(got[0], got[2]) and not np.array_equal(got[1], got[2])


def test_logits_without_a_context_equal_full_attention(half) -> None:
    with make_engine(half, all_where_faster=True) as engine, make_engine(half, selector="full") as full:
        tokens = [(5,), (7,)]
        assert np.array_equal(logits(engine, tokens, NO_CONTEXT), logits(full, tokens, NO_CONTEXT))


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2", "qwen3_5_text"])
def test_steps_that_read_all_rows_equal_full_attention_with_other_kinds_of_layers(family: str, tmp_path: Path) -> None:
    """Windows, sink logits, softcapped logits, states of linear attention."""
    wide = {"intermediate_size": 64} if family == "gpt_oss" else {}  # for torch's 16-bit products of experts
    model = wrap_model(make_model(family, **wide).bfloat16(), byte_tokenizer(), family)
    with open_artifact(
        build_artifact(model, token_ids(CONTEXT_LEN, seed=1), preset("default"), tmp_path).path
    ) as built:
        got = []
        for changes in ({"all_where_faster": True}, {"selector": "full"}):
            with make_engine(model, tail_capacity=32, **changes) as engine:
                engine.add_context(0, built)
                got.append(logits(engine, [(5, 9), (7, 3)]))
    assert np.array_equal(*got)


def test_all_rows_are_read_where_that_reads_fewer_bytes_than_selecting() -> None:
    """Decided by bytes: those of whole contexts, against a constant for selecting plus what each request selects."""
    shape = EngineShape(
        num_layers=1,
        num_q_heads=4,
        num_kv_heads=2,
        num_index_heads=2,
        head_dim=16,
        dtype=torch.bfloat16,
        softmax_scale=1.0,
        search=CONFIG,
        max_context_len=1000,
        batch_sizes=(4,),
    )
    assert all_are_faster(shape, [(0, 180)], []) and not all_are_faster(shape, [(0, 190)], [])
    assert not all_are_faster(shape, [(0, 180), (1, 180)], []), "contexts of their own are both read"
    assert all_are_faster(shape, [(0, 590)] * 2, []) and not all_are_faster(shape, [(0, 610)] * 2, [])
    assert all_are_faster(shape, [(0, 100_000)] * 3, []), "they choose as much as there is"
    assert not all_are_faster(shape, [(0, 150)], [64]) and not all_are_faster(shape, [], [64, 64])
    assert not all_are_faster(replace(shape, dtype=torch.float32), [(0, 180)], []), "wider rows"
    keeps_all = replace(shape, search=replace(CONFIG, keep=1.0))
    assert all_are_faster(keeps_all, [(0, 100_000)], []), "they are chosen, or read"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"selector": "full"}, "not with placement device and selector full;"),
        ({"placement": "hybrid"}, "not with placement hybrid and selector csattn;"),
        ({"config": SearchConfig(lookahead=1)}, "decides at each step, but lookahead is 1 and search_period 1"),
        ({"config": SearchConfig(search_period=4)}, "lookahead is 0 and search_period 4"),
        ({"kv_format": KvFormat.parse("fp8")}, "leave the KV codec out"),
    ],
)
def test_all_where_faster_is_refused_with_incompatible_options(half, changes, message) -> None:
    options = {"config": CONFIG, "placement": "device", "device": DEVICE, **changes}
    with pytest.raises(ConfigError, match=message):
        GpuEngine(half, options.pop("config"), options.pop("placement"), all_where_faster=True, **options)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {}, r"this model has 4 over 2 heads of 16 in torch\.float32;"),
        ("gemma4_text", {"global_head_dim": 272}, "4 over 2 heads of 272 in torch"),
        pytest.param("deepseek_v3", {}, "this model has latents;", marks=pytest.mark.large_gpu),
    ],
)
def test_models_without_a_kernel_are_refused(family: str, changes: dict[str, int], message: str) -> None:
    model = make_model(family, **changes)
    loaded = wrap_model(model if family == "llama" else model.bfloat16(), byte_tokenizer(), family)
    with pytest.raises(ConfigError, match=message):
        GpuEngine(loaded, CONFIG, "device", all_where_faster=True)


def test_memory_is_planned_for_sparse_and_full_steps(half) -> None:
    with make_engine(half, all_where_faster=True) as both, make_engine(half) as one:
        shapes = [each._placing._sizing.shape(preset("default"), 400) for each in (both, one)]
        plans = [plan_memory(0, preset("default"), shape, "device", 0).device_bytes for shape in shapes]
    assert plans[0] - plans[1] == attend_all_bytes(shapes[0]) > 0
