"""Steps whose searches run on the host: an error on one side reaches the other, and neither waits forever."""

from collections.abc import Iterator

import pytest
import torch

from csattn.artifact import Artifact, open_artifact
from csattn.attention import device as attention
from csattn.batch import StepRows, make_step_rows
from csattn.config import SearchConfig, preset
from csattn.search import SearchPool
from csattn.search.device import compiling, to_device
from index_build.pipeline import build_artifact
from offload import gather, slot_cache, step_mail
from tests.cuda_on_cpu import emulated
from tests.cuda_on_cpu.emulated import DEVICE
from tests.search.shapes import shape_of
from tests.tiny import loaded, token_ids
from tests.workers.engine.test_placements import CONTEXT_LEN, cached_rows, context_kv, make_shape
from workers.engine.gpu.on_host import SearchOnHost, StepSearcher
from workers.searchers.step_searches import StepSearches

CONFIG = SearchConfig(keep=0.1, window_len=16)


@pytest.fixture(autouse=True)
def kernels(emulator: emulated.Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.stand_in(monkeypatch, compiling, attention, gather, slot_cache, step_mail)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Artifact]:
    path = build_artifact(loaded(), token_ids(CONTEXT_LEN), preset("default"), tmp_path_factory.mktemp("s")).path
    with open_artifact(path) as opened:
        yield opened


def make_steps(artifact: Artifact, searcher: StepSearcher) -> SearchOnHost:
    shape = make_shape(CONFIG)
    kv = context_kv(artifact, shape)
    indexes = [artifact.layer_index(layer_idx) for layer_idx in range(shape.num_layers)]
    far = cached_rows(shape, kv, 60)
    made = SearchOnHost(shape, shape_of(indexes[0], shape.num_q_heads), far, searcher, DEVICE)
    searcher.load(0, artifact)
    made.load(0, kv, [to_device(index, DEVICE) for index in indexes])
    # idle rows first, as a runner does: loading a kernel while another one waits for a choice would block on that one
    take_step(made, make_step_rows(1, DEVICE), make_query(made))
    return made


def make_rows() -> StepRows:
    """One row of context 0."""
    rows = make_step_rows(1, DEVICE)
    rows.context_ids.fill_(0)
    rows.tail_lens.fill_(1)
    return rows


def take_step(steps: SearchOnHost, rows: StepRows, q: torch.Tensor) -> list[torch.Tensor]:
    """Return the attention output of each layer; all layers get the same query."""
    outs = [torch.empty_like(q) for _ in range(steps.shape.num_layers)]
    steps.begin_step(rows)
    for layer_idx, out in enumerate(outs):
        steps.attend(layer_idx, q, rows, out)
    steps.end_step(rows)
    return outs


def make_query(steps: SearchOnHost) -> torch.Tensor:
    return torch.randn(1, steps.shape.num_q_heads, steps.shape.head_dim, dtype=steps.shape.dtype).to(DEVICE)


def test_a_step_raises_the_error_of_its_failed_search(artifact: Artifact) -> None:
    pool = SearchPool(2)
    steps, rows = make_steps(artifact, StepSearches(pool)), make_rows()
    pool.close()
    with pytest.raises(RuntimeError, match="the search pool is closed"):
        take_step(steps, rows, make_query(steps))
    with pytest.raises(RuntimeError, match="the search pool is closed"):  # and so does the next step
        take_step(steps, rows, make_query(steps))


def test_an_unfinished_step_does_not_block_the_next(artifact: Artifact) -> None:
    with SearchPool(2) as pool:
        steps, rows = make_steps(artifact, StepSearches(pool)), make_rows()
        q = make_query(steps)
        want = take_step(steps, rows, q)
        steps.begin_step(rows)  # its queries are never posted
        for got, wanted in zip(take_step(steps, rows, q), want, strict=True):
            assert torch.equal(got, wanted)


def test_idle_rows_are_not_searched(artifact: Artifact) -> None:
    with SearchPool(2) as pool:
        steps, rows = make_steps(artifact, StepSearches(pool)), make_step_rows(1, DEVICE)
        take_step(steps, rows, make_query(steps))
        assert steps.chosen(0, rows).valid_len.sum() == 0


def test_a_row_chooses_at_most_its_own_top_k(artifact: Artifact) -> None:
    with SearchPool(2) as pool:
        steps, rows = make_steps(artifact, StepSearches(pool)), make_rows()
        q = make_query(steps)
        for asked, chosen in ((5, 5), (2**31 - 1, 30), (1, 1)):
            rows.top_ks.fill_(asked)
            take_step(steps, rows, q)
            for layer_idx in (0, 1):  # layers use two buffers in turn: these are the last two choices
                assert (steps.chosen(layer_idx, rows).valid_len == chosen).all()


def test_loading_another_context_replaces_the_searches_of_the_first(artifact: Artifact) -> None:
    with SearchPool(2) as pool:
        searcher = StepSearches(pool)
        steps, rows = make_steps(artifact, searcher), make_rows()
        q = make_query(steps)
        take_step(steps, rows, q)
        steps.unload(0)
        searcher.unload(0)
        other = [artifact.layer_index(layer_idx) for layer_idx in reversed(range(steps.shape.num_layers))]
        searcher.load_layers(0, other)
        kv = context_kv(artifact, steps.shape)
        steps.far.load(0, cached_rows(steps.shape, kv, 60)._kv[0])
        steps.load(0, kv, [to_device(index, DEVICE) for index in other])
        take_step(steps, rows, q)
        ((series,),) = searcher._series.values()
        assert [search.index.codes.ctypes.data for search in series.searches] == [
            index.codes.ctypes.data for index in other
        ]
