"""Requests with other selectors than csattn on the CPU engine: as defined, alone and together."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from csattn.artifact import Artifact, open_artifact
from csattn.attention import reference
from csattn.config import SearchConfig, preset
from csattn.errors import ConfigError
from csattn.models.loader import wrap_model
from csattn.selection import Rest, Selection
from csattn.selector_names import SELECTOR_NAMES
from csattn.selectors import index_bytes, search_bytes
from index_build.pipeline import build_artifact
from offload.host_store import HostStore
from tests.tiny import byte_tokenizer, make_model, token_ids
from tests.workers.engine.talks import Talk, alone, assert_same, random_talks, run_together
from tests.workers.engine.test_cpu_engine import _Failing, assert_as_defined, make_engine, opened
from workers.engine.cpu.engine import CpuEngine
from workers.engine.cpu.row_by_row import _choices, attend_pieces, attend_row
from workers.serving.step_engine import StepRow

CONFIG = SearchConfig(keep=0.05, window_len=64)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory) -> Iterator[list[Artifact]]:
    made = [opened(tmp_path_factory.mktemp("store"), "llama", context_id) for context_id in (0, 1)]
    yield made
    for artifact in made:
        artifact.close()


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("selector", [name for name in SELECTOR_NAMES if name not in ("csattn", "full")])
def test_logits_of_other_selectors_equal_the_definition(artifacts, selector, lookahead) -> None:
    """The window is so short that rows of the tail leave it."""
    config = SearchConfig(keep=0.05, window_len=7, lookahead=lookahead)
    assert_as_defined(artifacts[0], "llama", config, selector)


@pytest.mark.parametrize(("selector", "rest"), [("h2o", None), ("exact", "moments"), ("exact", "sketch")])
def test_other_selectors_with_a_search_period_and_the_rest_equal_the_definition(artifacts, selector, rest) -> None:
    config = SearchConfig(keep=0.05, window_len=7, search_period=3, rest=rest)
    assert_as_defined(artifacts[0], "llama", config, selector)


@pytest.mark.parametrize("types", [["full_attention", "mlp"], ["linear_attention", "full_attention"]])
def test_h2o_over_layers_without_rows_is_refused(tmp_path, types) -> None:
    model = wrap_model(make_model("nemotron_h", layers_block_type=types), byte_tokenizer(), "tiny")
    built = build_artifact(model, token_ids(300), preset("default"), tmp_path)
    with open_artifact(built.path) as artifact, CpuEngine(model, num_threads=1) as engine:
        engine.add_context(0, artifact)
        with pytest.raises(ConfigError, match="some of whose layers keep no rows"):
            engine.open(0, 0, SearchConfig(), "h2o")


def test_requests_of_all_selectors_in_shared_steps_get_the_bits_they_get_alone(artifacts, rng) -> None:
    with make_engine(artifacts) as engine:
        talks = random_talks(rng, 14, SELECTOR_NAMES)
        want = [alone(engine, talk) for talk in talks]
    with make_engine(artifacts, num_threads=2, max_rows=11) as engine:
        run_together(engine, talks, rng)
    for got, wanted in zip(talks, want, strict=True):
        assert_same(got, wanted)


def test_requests_over_lists_in_shared_steps_get_the_bits_they_get_alone(tmp_path, rng) -> None:
    with opened(tmp_path, "llama", 0, "lists") as first, opened(tmp_path, "llama", 1, "lists") as second:
        with make_engine([first, second]) as engine:
            talks = random_talks(rng, 10, ("csattn",), rests=(None, "moments"))
            want = [alone(engine, talk) for talk in talks]
            assert any(len(talk.question) + talk.num_new > talk.config.window_len for talk in talks)
        with make_engine([first, second], num_threads=2, max_rows=11) as engine:
            run_together(engine, talks, rng)
    for got, wanted in zip(talks, want, strict=True):
        assert_same(got, wanted)


@pytest.mark.parametrize(("selector", "preset_name"), [("h2o", "default"), ("quest", "default"), ("csattn", "lists")])
def test_a_failed_step_leaves_no_trace_in_selectors_and_lists(tmp_path, selector, preset_name) -> None:
    """H2O adds up each query's attention, and rows that leave the window join pages and lists: only once each."""
    config, question = SearchConfig(keep=0.05, window_len=2, search_period=2), [1, 2, 3, 4, 5, 6]
    with opened(tmp_path, "llama", 0, preset_name) as artifact:
        with make_engine([artifact]) as engine:
            want = alone(engine, Talk(0, config, selector, question, 8))
        with make_engine([artifact], searcher=_Failing(1)) as engine:
            got = Talk(0, config, selector, question, 8)
            engine.open(0, 0, config, selector)
            engine.open(1, 0, CONFIG, "csattn")  # its search fails in the last layer
            while not got.done:
                rows = [StepRow(0, token) for token in got.next_rows(4)]
                engine._searcher.fail = got.fed in (0, 4, 9)
                try:
                    result = engine.step([*rows, StepRow(1, 9)], want_logits=True)
                except RuntimeError:
                    result = engine.step(rows, want_logits=True)
                    got.take(len(rows), result.next_ids, result.logits)
                    continue
                got.take(len(rows), result.next_ids[:-1], result.logits[:-1])
    assert_same(got, want)


def test_a_selectors_data_of_a_context_is_shared_by_requests_and_freed_with_the_context(artifacts) -> None:
    with make_engine(artifacts) as engine:
        engine.open(0, 0, CONFIG, "quest")
        engine.open(1, 0, SearchConfig(keep=0.1, window_len=32), "quest")
        engine.open(2, 0, CONFIG, "csattn")
        first, second, ours = (engine.requests[request_slot] for request_slot in (0, 1, 2))
        assert ours.choices is None
        assert list(first.context.prepared) == ["quest"]
        chosen_by = ([choice.selector for choice in _choices(request)] for request in (first, second))
        for one, other, made in zip(*chosen_by, first.context.prepared["quest"], strict=True):
            assert one is not other
            assert one._prepared is other._prepared is made
        for request_slot in (0, 1, 2):
            engine.close_request(request_slot)
        engine.remove_context(0)
        engine.add_context(0, artifacts[0])
        engine.open(0, 0, CONFIG, "csattn")
        assert not engine.requests[0].context.prepared


@pytest.mark.parametrize("num_index_heads", [2, 4], ids=["shared by the group", "one per query head"])
@pytest.mark.parametrize("num_chosen", [0, 1, 5])
@pytest.mark.parametrize("tail_len", [1, 8, 14])
def test_a_row_attends_to_exactly_the_resident_and_chosen_rows(
    artifacts, num_index_heads, num_chosen, tail_len, rng
) -> None:
    """With log weights and an estimate of the rest; rows that must not be read are NaN."""
    scale, tail, num_outside_window = 0.25, torch.randn(2, tail_len, 2, 16), max(0, tail_len - 8)
    with make_engine(artifacts) as engine:
        engine.open(0, 0, SearchConfig(keep=0.05, window_len=8), "sparq")
        request = engine.requests[0]
    first, second = request.near
    may_be_chosen = np.concatenate([np.arange(first, second), 700 + np.arange(num_outside_window)])
    kv_indices = np.full((num_index_heads, 6), -1, np.int32)
    for rows in kv_indices:
        rows[:num_chosen] = np.sort(rng.choice(may_be_chosen, num_chosen, replace=False))
        if num_chosen and num_outside_window:
            rows[num_chosen - 1] = 700 + num_outside_window - 1
    valid_len = np.full(num_index_heads, num_chosen, np.int32)
    weights = np.where(kv_indices >= 0, rng.standard_normal(kv_indices.shape), 0).astype(np.float32)
    rest = Rest(rng.standard_normal((4, 16), np.float32), rng.random(4, np.float32))
    context, q = request.context.kv[1], torch.randn(4, 16)
    poisoned, read = torch.full_like(context, torch.nan), torch.full_like(tail, torch.nan)
    read[:, num_outside_window:] = tail[:, num_outside_window:]
    for kv_head in range(2):
        group = kv_indices[kv_head * num_index_heads // 2 : (kv_head + 1) * num_index_heads // 2]
        rows = group[(group >= 0) & (group < 700)].tolist()
        poisoned[kv_head, [*rows, *range(first), *range(second, 700)]] = context[
            kv_head, [*rows, *range(first), *range(second, 700)]
        ]
        if (of_tail := group[group >= 700] - 700).size:
            read[kv_head, of_tail.tolist()] = tail[kv_head, of_tail.tolist()]
    request.context = replace(request.context, store=HostStore([poisoned] * 3))
    out = attend_row(q, request, 1, read, Selection(kv_indices, valid_len, weights, rest), scale)
    kv = torch.cat([context, tail], dim=1)
    for head in range(4):
        far = kv_indices[head * num_index_heads // 4, :num_chosen].tolist()
        near = [*range(first), *range(second, 700), *range(700 + num_outside_window, 700 + tail_len)]
        rows = kv[head // 2, [*far, *near]][None, None]
        log_weights = torch.zeros(rows.shape[2])
        log_weights[:num_chosen] = torch.from_numpy(weights[head * num_index_heads // 4, :num_chosen])
        attended = reference.attend(
            q[None, None, head : head + 1], rows[..., 0, :], rows[..., 1, :], scale, log_weights=log_weights
        )[0][0, 0, 0]
        want = (1 - rest.share[head]) * attended + rest.share[head] * torch.from_numpy(rest.out[head])
        torch.testing.assert_close(out[head], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("selector", "preset_name"),
    [("csattn", "default"), ("csattn", "lists"), ("quest", "default"), ("window", "default")],
)
def test_searches_rows_and_bytes_read_are_counted(tmp_path, selector, preset_name) -> None:
    """15 tokens, a search at every third. From the ninth on, rows leave the tail's window, except with a sketch."""
    config = SearchConfig(keep=0.05, window_len=8, search_period=3, rest="moments" if selector == "csattn" else None)
    with opened(tmp_path, "llama", 0, preset_name) as artifact, make_engine([artifact]) as engine:
        engine.open(0, 0, config, selector)
        for rows in (7, 1, 7):
            engine.step([StepRow(0, token) for token in range(rows)])
        request, reading = engine.requests[0], engine.reading(0)
    count, tails = request.count, range(1, 16)
    resident = tails if preset_name == "default" and selector == "csattn" else [min(8, tail_len) for tail_len in tails]
    assert count.searches == (0 if selector == "window" else 3 * 5)
    assert count.near_rows == 3 * sum(4 + 8 + tail_len for tail_len in resident)
    assert count.far_rows == (0 if selector == "window" else 3 * 15 * 35)
    assert reading.rows == (count.near_rows + count.far_rows) / (3 * 15)
    if selector == "csattn":
        searched, moments = sum(search_bytes(index, 4) for index in request.context.indexes), request.moments
        assert count.search_bytes == 5 * searched
        assert count.rest_bytes == 15 * sum(layer.num_bytes for layer in moments)
        assert request.index_bytes == sum(map(index_bytes, request.context.indexes)) + request.rest_bytes
    elif selector == "window":
        assert count.search_bytes == count.rest_bytes == request.index_bytes == 0
    else:
        bounds = sum(layer.index_bytes for layer in request.context.prepared["quest"])
        assert request.index_bytes == bounds
        pages = 2 * 2 * 16 * 4  # two bounds of two heads, of the tail's first page; read after a row has left
        assert count.search_bytes == 5 * bounds + 3 * 2 * pages


def cut(rows: torch.Tensor, num_rows: int) -> list[torch.Tensor]:
    return list(rows.split(num_rows, dim=1)) if rows.shape[1] else []


@pytest.mark.parametrize("num_rows", [1, 2, 63, 300])
@pytest.mark.parametrize("piece_rows", [1, 7, 64, 300])
def test_pieces_of_any_size_give_attention_over_all_rows(num_rows, piece_rows) -> None:
    """Each query gets the same bits as alone."""
    queries, rows = [3 * torch.randn(6, 16) for _ in range(3)], torch.randn(2, num_rows, 2, 16)
    k, v = rows.repeat_interleave(3, dim=0).unbind(2)
    attended = attend_pieces(queries, cut(rows, piece_rows), 0.25)
    for q, (out, lse) in zip(queries, attended, strict=True):
        want_out, want_lse = reference.attend(q[None, :, None].double(), k[None].double(), v[None].double(), 0.25)
        torch.testing.assert_close(out, want_out[0, :, 0].float(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse, want_lse[0, :, 0].float(), rtol=1e-5, atol=1e-6)
        assert torch.equal(attend_pieces([q], cut(rows, piece_rows), 0.25)[0][0], out)


def test_attention_over_no_pieces_is_zero() -> None:
    ((out, lse),) = attend_pieces([torch.randn(4, 8)], [], 1.0)
    assert not out.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_piece_may_be_overwritten_once_the_next_is_requested(dtype) -> None:
    rows, q = torch.randn(2, 60, 2, 8).to(dtype), torch.randn(4, 8)
    buffer = torch.empty(2, 10, 2, 8, dtype=dtype)

    def pieces():
        for piece in cut(rows, 10):
            yield buffer.copy_(piece)
            buffer.fill_(torch.nan)

    ((out, lse),), ((want_out, want_lse),) = attend_pieces([q], pieces(), 1.0), attend_pieces([q], cut(rows, 10), 1.0)
    assert torch.equal(out, want_out)
    assert torch.equal(lse, want_lse)
