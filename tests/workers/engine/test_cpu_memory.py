"""Memory of the CPU engine: what does not fit is refused before it is allocated, and unloading frees memory."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from csattn.artifact import Artifact
from csattn.config import SearchConfig
from offload import budget
from offload.codecs.formats import KvFormat
from offload.errors import MemoryPlanError
from tests.workers.engine.test_cpu_engine import make_engine, opened
from workers.serving.step_engine import StepRow

CONFIG = SearchConfig(keep=0.05, window_len=64)
HALF = KvFormat.parse("float16")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> Iterator[Artifact]:
    with opened(tmp_path_factory.mktemp("store"), "llama", 0) as artifact:
        yield artifact


def set_available_memory(monkeypatch, num_bytes: int) -> None:
    monkeypatch.setattr(budget, "host_memory_bytes", lambda: budget.SPARE_BYTES + num_bytes)


def test_a_coded_context_is_refused_if_one_byte_of_memory_is_missing(artifact: Artifact, monkeypatch) -> None:
    with make_engine([], kv_format=HALF) as engine:
        engine.add_context(0, artifact)
        num_bytes = engine.counts().kv_bytes
        set_available_memory(monkeypatch, num_bytes)
        engine.add_context(1, artifact)
        set_available_memory(monkeypatch, num_bytes - 1)
        with pytest.raises(
            MemoryPlanError, match=f"the context in float16 needs {num_bytes:,} bytes .*choose a KV codec"
        ):
            engine.add_context(2, artifact)
        with pytest.raises(Exception, match="no context 2"):
            engine.open(0, 2, CONFIG, "csattn")


def test_memory_mapped_rows_need_no_further_memory(artifact: Artifact, monkeypatch) -> None:
    set_available_memory(monkeypatch, -budget.SPARE_BYTES)
    with make_engine([artifact]) as engine:
        engine.open(0, 0, CONFIG, "csattn")
        assert engine.step([StepRow(0, 5)]).next_ids[0] >= 0


def test_a_selector_is_refused_without_memory_for_the_data_it_computes(artifact: Artifact, monkeypatch) -> None:
    with make_engine([artifact]) as engine:
        set_available_memory(monkeypatch, 100)
        with pytest.raises(MemoryPlanError, match="the data that quest computes from the context needs"):
            engine.open(0, 0, CONFIG, "quest")
        engine.open(0, 0, CONFIG, "exact")  # reads the keys in place
        set_available_memory(monkeypatch, 1 << 30)
        engine.open(1, 0, CONFIG, "quest")


def test_an_unloaded_context_is_no_longer_referenced(artifact: Artifact) -> None:
    """Neither the engine nor the plan of the last step keeps a reference to it."""
    with make_engine([], kv_format=HALF) as engine:
        engine.add_context(0, artifact)
        engine.open(0, 0, CONFIG, "quest")
        engine.step([StepRow(0, 5)])
        context = engine.requests[0].context
        kept = [weakref.ref(context.store), weakref.ref(context.prepared["quest"][0])]
        del context
        engine.close_request(0)
        engine.remove_context(0)
        gc.collect()
        assert [thing() for thing in kept] == [None, None]
        assert engine.counts().kv_bytes == 0
