"""The CPU engine agrees with the definition, and gives a request the same bits alone and with others."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from csattn.artifact import Artifact, open_artifact
from csattn.config import SearchConfig, preset
from csattn.errors import ArtifactMismatchError, ConfigError, ContextError
from csattn.models.loader import wrap_model
from csattn.search import SearchPool
from csattn.selector_names import SELECTOR_NAMES
from index_build.pipeline import build_artifact
from tests.tiny import FAMILIES, byte_tokenizer, loaded, make_model, token_ids
from tests.workers.engine.definition import defined_logits
from tests.workers.engine.talks import (
    SELECTORS,
    Talk,
    alone,
    assert_same,
    next_ids_beside_nan,
    random_talks,
    run_together,
)
from workers.engine.cpu import attend_in_place, row_plan
from workers.engine.cpu.context import HostBudget
from workers.engine.cpu.engine import CpuEngine
from workers.engine.cpu.pool_searcher import PoolSearcher, RowSearch
from workers.serving.step_engine import NO_CONTEXT, StepRow

CONTEXT_LENS = (700, 391)
CONFIG = SearchConfig(keep=0.05, window_len=64)
LOOKING_AHEAD = SearchConfig(keep=0.05, window_len=64, lookahead=1)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


def opened(store: Path, family: str, context_id: int, preset_name: str = "default") -> Artifact:
    ids = token_ids(CONTEXT_LENS[context_id], seed=context_id)
    return open_artifact(build_artifact(loaded(family), ids, preset(preset_name), store).path)


@pytest.fixture(scope="module")
def artifacts(store: Path) -> Iterator[list[Artifact]]:
    made = [opened(store, "llama", context_id) for context_id in range(len(CONTEXT_LENS))]
    yield made
    for artifact in made:
        artifact.close()


def make_engine(artifacts: list[Artifact], family: str = "llama", **options: object) -> CpuEngine:
    engine = CpuEngine(loaded(family), **{"max_requests": 6, "tail_capacity": 64, "num_threads": 1, **options})
    for context_id, artifact in enumerate(artifacts):
        engine.add_context(context_id, artifact)
    return engine


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("selector", SELECTORS)
def test_logits_of_each_selector_equal_the_definition(artifacts, selector, lookahead) -> None:
    assert_as_defined(artifacts[0], "llama", SearchConfig(keep=0.05, window_len=64, lookahead=lookahead), selector)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama"])
def test_logits_of_every_family_equal_the_definition(store, family, rng) -> None:
    """With lookahead; and requests run together get the same bits as alone."""
    with opened(store, family, 0) as first, opened(store, family, 1) as second:
        assert_as_defined(first, family, SearchConfig(keep=0.05, window_len=64, lookahead=1), "csattn")
        assert_together_as_alone([first, second], family, 2, rng)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_with_keep_1_equal_transformers(store, family) -> None:
    with opened(store, family, 0) as artifact, make_engine([artifact], family) as engine:
        got = alone(engine, Talk(0, SearchConfig(keep=1.0, lookahead=1), "csattn", token_ids(11, seed=1).tolist(), 12))
        whole = torch.from_numpy(np.concatenate([artifact.token_ids, token_ids(11, seed=1), got.tokens])).long()
    with torch.inference_mode():
        want = loaded(family).model(whole[None]).logits[0, -13:-1]
    assert got.tokens == want.argmax(-1).tolist()
    np.testing.assert_allclose(np.stack(got.logits), want.numpy(), atol=2e-4)


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize(("selector", "rest"), [("csattn", "moments"), ("csattn", "none"), ("exact", "sketch")])
def test_attention_to_the_rest_equals_the_definition(artifacts, selector, rest, lookahead) -> None:
    config = SearchConfig(keep=0.05, window_len=64, lookahead=lookahead, rest=rest)
    assert_as_defined(artifacts[0], "llama", config, selector)


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("rest", ["none", "sketch", "moments"])
def test_rows_between_searches_reuse_the_last_choice(artifacts, rest, lookahead) -> None:
    config = SearchConfig(keep=0.05, window_len=64, lookahead=lookahead, rest=rest, search_period=4)
    assert_as_defined(artifacts[0], "llama", config, "csattn")


def assert_as_defined(artifact, family, config, selector) -> None:
    question = token_ids(11, seed=1).tolist()
    with make_engine([artifact], family) as engine:
        got = alone(engine, Talk(0, config, selector, question, 12))
    want = defined_logits(loaded(family), artifact, config, selector, [*question, *got.tokens[:-1]])[-12:]
    differences = np.abs(np.stack(got.logits) - want).max(axis=1)
    # queries that differ in their last bits may also differ in an integer of the sketch's scores, thus in a chosen row
    # or a weight of the rest, and then in all of the request's later keys and values
    by_integers = selector == "csattn" or config.rest == "sketch"
    assert differences.max() < (0.02 if by_integers else 2e-4)
    assert differences.min() < 2e-4


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_requests_in_shared_steps_get_the_bits_they_get_alone(artifacts, num_threads, rng) -> None:
    assert_together_as_alone(artifacts, "llama", num_threads, rng)


def assert_together_as_alone(artifacts, family, num_threads, rng) -> None:
    with make_engine(artifacts, family) as engine:
        talks = random_talks(rng, 10)
        want = [alone(engine, talk) for talk in talks]
    with make_engine(artifacts, family, num_threads=num_threads, max_rows=11) as engine:
        run_together(engine, talks, rng)
    for got, wanted in zip(talks, want, strict=True):
        assert_same(got, wanted)


def test_loading_and_unloading_contexts_between_steps_changes_no_other_request(store, rng) -> None:
    first, second = opened(store, "llama", 0), opened(store, "llama", 1)
    with make_engine([first, second]) as engine:
        talks = [Talk(context_id, CONFIG, "csattn", [7, 8, 9], 6) for context_id in (0, 1)]
        want = [alone(engine, talk) for talk in talks]
        kv_bytes = engine.counts().kv_bytes
    with make_engine([first]) as engine:
        kept, late = talks
        engine.open(2, 0, CONFIG, "csattn")
        while not kept.done:
            engine.add_context(1, second)
            assert engine.counts().kv_bytes == kv_bytes
            engine.open(3, 1, CONFIG, "csattn")
            late = Talk(1, CONFIG, "csattn", [7, 8, 9], 6)
            for _ in range(2):
                rows = [
                    (talk, request_slot, talk.next_rows(3))
                    for talk, request_slot in ((late, 3), (kept, 2))
                    if not talk.done
                ]
                result = engine.step(
                    [StepRow(request_slot, token) for _, request_slot, ids in rows for token in ids], want_logits=True
                )
                at = 0
                for talk, _, ids in rows:
                    talk.take(len(ids), result.next_ids[at : at + len(ids)], result.logits[at : at + len(ids)])
                    at += len(ids)
            with pytest.raises(ConfigError, match=r"in use in request slots \[3\]"):
                engine.remove_context(1)
            engine.close_request(3)
            engine.remove_context(1)
            assert late.tokens == want[1].tokens[:2]
            np.testing.assert_array_equal(late.logits, want[1].logits[:2])
    assert_same(kept, want[0])


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize(
    ("preset_name", "rest", "period"), [("paper", None, 1), ("lists", "moments", 1), ("lists", None, 3)]
)
@pytest.mark.parametrize("window_len", [64, 8])
def test_lists_equal_the_definition_as_rows_leave_the_window(
    store, preset_name, rest, period, lookahead, window_len
) -> None:
    """`paper` selects per query head, `lists` per KV head."""
    options = {"lookahead": lookahead, "rest": rest, "search_period": period}
    config = SearchConfig(keep=0.05, window_len=window_len, **options)
    with opened(store, "llama", 0, preset_name) as artifact:
        assert_as_defined(artifact, "llama", config, "csattn")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_weights_and_kv_lose_no_more_precision_than_in_transformers(tmp_path, dtype) -> None:
    narrow = wrap_model(make_model().to(getattr(torch, dtype)), byte_tokenizer(), "narrow")
    report = build_artifact(narrow, token_ids(300), preset("default"), tmp_path)
    question = token_ids(6, seed=3).tolist()
    wide = make_model().to(getattr(torch, dtype)).float()
    with open_artifact(report.path) as artifact, CpuEngine(narrow, num_threads=1) as engine:
        engine.add_context(0, artifact)
        got = alone(engine, Talk(0, SearchConfig(keep=1.0), "csattn", question, 5))
        whole = torch.from_numpy(np.concatenate([artifact.token_ids, question, got.tokens[:-1]])).long()
    with torch.no_grad():
        want = wide(whole[None]).logits[0, -5:]
        theirs = narrow.model(whole[None]).logits[0, -5:].float()
    assert (torch.from_numpy(np.stack(got.logits)) - want).norm() <= 1.2 * (theirs - want).norm()


def test_fidelity_is_1_if_all_rows_are_read_and_lower_otherwise(store) -> None:
    with opened(store, "llama", 0) as artifact, make_engine([artifact]) as engine:
        seen = {}
        for request_slot, (keep, selector) in enumerate(
            [(1.0, "csattn"), (0.05, "exact"), (0.05, "csattn"), (0.05, "window")]
        ):
            engine.open(request_slot, 0, SearchConfig(keep=keep, window_len=64), selector)
            rows = [StepRow(request_slot, token) for token in (5, 6, 7)]
            seen[keep, selector] = engine.step(rows, watch=(2, 1)).fidelity
    full, exact, ours, window = seen.values()
    assert (full.recall, full.mass) == (1.0, pytest.approx(1, abs=1e-5))
    assert exact.recall == 1.0
    assert 1 > exact.mass > ours.mass > window.mass
    assert 1 > ours.recall > window.recall == 0


class _Failing(PoolSearcher):
    """Fails once if `fail` is set, after the searches of layer 2."""

    fail = True

    def start(self, layer_idx: int, searches: list[RowSearch]) -> None:
        super().start(layer_idx, searches)
        self._layer = layer_idx

    def finish(self) -> None:
        super().finish()
        if self.fail and self._layer == 2:
            self.fail = False
            raise RuntimeError("lost")


@pytest.mark.parametrize("period", [1, 5])
def test_a_failed_step_can_be_repeated_with_the_same_result(store, period) -> None:
    """Also a step whose first rows read the choice of an earlier step, while later rows search."""
    config = SearchConfig(keep=0.05, window_len=64, lookahead=1, search_period=period)
    question = list(range(1, 12))
    with opened(store, "llama", 0) as artifact:
        with make_engine([artifact]) as engine:
            want = alone(engine, Talk(0, config, "csattn", question, 3))
        searcher = _Failing(1)
        with make_engine([artifact], searcher=searcher) as engine:
            got = Talk(0, config, "csattn", question, 3)
            engine.open(0, 0, config, "csattn")
            searcher.fail = False
            engine.step([StepRow(0, token) for token in question[:3]])
            got.fed, searcher.fail = 3, True
            with pytest.raises(RuntimeError, match="lost"):
                engine.step([StepRow(0, token) for token in question[3:]])
            drive(engine, got)
    assert_same(got, want)


@pytest.mark.parametrize(("owner", "name"), [(attend_in_place, "describe_sketch"), (SearchPool, "start")])
def test_a_step_that_fails_to_begin_leaves_other_requests_unchanged(artifacts, monkeypatch, owner, name) -> None:
    """The step fails while another context's rows are described to the kernels, or when a search is started."""

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    got = Talk(0, CONFIG, "csattn", [5, 7], 2)
    with make_engine(artifacts) as engine:
        want = alone(engine, got)
        for request_slot in range(2):
            engine.open(request_slot, request_slot, LOOKING_AHEAD if request_slot else CONFIG, "csattn")
        engine.step([StepRow(0, 5)])
        got.fed = 1
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(MemoryError, match="no room"):
                engine.step([StepRow(1, 9)])
        drive(engine, got)
    assert_same(got, want)


def drive(engine: CpuEngine, talk: Talk) -> None:
    """Run the remainder of a talk in slot 0, in steps of up to 8 rows."""
    while not talk.done:
        rows = talk.next_rows(8)
        result = engine.step([StepRow(0, token) for token in rows], want_logits=True)
        talk.take(len(rows), result.next_ids, result.logits)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_the_split_of_a_question_into_steps_does_not_change_which_choices_are_reused(store, lookahead) -> None:
    """With a host budget, where attention is computed row by row."""
    config = SearchConfig(keep=0.05, window_len=64, lookahead=lookahead, search_period=5)
    budget = HostBudget(32 << 20, config, "csattn")
    with opened(store, "llama", 0) as artifact, make_engine([artifact], host_budget=budget) as engine:
        want, got = (Talk(0, config, "csattn", list(range(1, 12)), 3) for _ in range(2))
        for talk, cuts in ((want, range(1, 11)), (got, (3,))):
            engine.open(0, 0, config, "csattn")
            for begin, end in pairwise((0, *cuts)):
                engine.step([StepRow(0, token) for token in talk.question[begin:end]])
                talk.fed = end
            drive(engine, talk)
            engine.close_request(0)
    assert_same(got, want)


def test_linear_attention_states_process_the_tokens_of_a_step_in_order(store) -> None:
    """Although a step processes rows that need a search before the others."""
    config = SearchConfig(keep=0.05, window_len=64, search_period=3)
    got = Talk(0, config, "csattn", list(range(1, 12)), 3)
    with opened(store, "qwen3_next", 0) as artifact, make_engine([artifact], "qwen3_next") as engine:
        want = alone(engine, got)
        engine.open(0, 0, config, "csattn")
        for token in got.question[:-1]:
            engine.step([StepRow(0, token)])
            got.fed += 1
        drive(engine, got)
    assert_same(got, want)


def test_next_tokens_and_logits_are_returned_for_rows_that_want_a_token(store) -> None:
    """With interleaved questions of two requests, one without a context."""
    tokens = [(1, 4), (0, 5), (1, 6), (0, 7), (0, 8)]
    with opened(store, "llama", 0) as artifact, make_engine([artifact]) as engine:

        def next_ids_by_row(asking: Sequence[int], rows_a_step: int) -> list[tuple[int, int]]:
            """Return each row's next token, and the argmax of its logits."""
            engine.open(0, 0, CONFIG, "csattn")
            engine.open(1, NO_CONTEXT, CONFIG, "csattn")
            rows, found = [StepRow(*token, wants_token=row in asking) for row, token in enumerate(tokens)], []
            for start in range(0, len(rows), rows_a_step):
                result = engine.step(rows[start : start + rows_a_step], want_logits=True)
                assert result.logits is not None
                found += zip(result.next_ids.tolist(), result.logits.argmax(axis=1).tolist(), strict=True)
            engine.close_request(0)
            engine.close_request(1)
            return found

        alone = next_ids_by_row(range(5), 1)
        assert len(set(alone)) > 2, "rows can be told apart"
        for asking in ([0, 1, 2, 3, 4], [2, 4], [3], []):
            for row, (next_id, argmax) in enumerate(next_ids_by_row(asking, 5)):
                assert (next_id, argmax) == alone[row] if row in asking else next_id == -1


def test_rows_that_leave_more_behind_than_themselves_are_no_drafts(store) -> None:
    with (
        opened(store, "llama", 0) as sketch,
        opened(store, "llama", 1, "lists") as lists,
        make_engine([sketch, lists]) as engine,
    ):
        assert engine.takes_drafts(sketch, CONFIG, "csattn") and engine.takes_drafts(None, CONFIG, "csattn")
        assert engine.takes_drafts(lists, CONFIG, "full")
        assert not engine.takes_drafts(lists, CONFIG, "csattn")  # rows that leave the window join the lists
        assert not engine.takes_drafts(sketch, SearchConfig(search_period=4), "csattn")  # tokens share a choice
        assert not any(engine.takes_drafts(sketch, CONFIG, name) for name in SELECTOR_NAMES[1:-1])


@pytest.mark.parametrize("selector", SELECTOR_NAMES)
def test_a_row_of_nan_has_no_next_token(store, selector) -> None:
    model = loaded("llama").model
    with opened(store, "llama", 0, "lists") as artifact, make_engine([artifact]) as engine:
        next_ids = next_ids_beside_nan(engine, model.model.embed_tokens.weight.data, CONFIG, selector)
        engine.close_request(0)
        engine.open(0, 0, CONFIG, selector)
        assert next_ids == [int(engine.step([StepRow(0, 5)]).next_ids[0]), -1]


def test_invalid_calls_are_refused_and_change_nothing(store) -> None:
    with opened(store, "llama", 0) as artifact, make_engine([artifact], max_rows=4, tail_capacity=5) as engine:
        with pytest.raises(ConfigError, match="slot 0 is not open"):
            engine.step([StepRow(0, 1)])
        with pytest.raises(ConfigError, match="no context 5"):
            engine.open(0, 5, CONFIG, "csattn")
        with pytest.raises(ConfigError, match="request slots 0 to 5, not 6"):
            engine.open(6, 0, CONFIG, "csattn")
        with pytest.raises(ConfigError, match="unknown selector"):
            engine.open(0, 0, CONFIG, "best")
        with pytest.raises(ConfigError, match="rest moments works only with"):
            engine.open(0, 0, SearchConfig(rest="moments"), "h2o")
        with pytest.raises(ConfigError, match="loaded already"):
            engine.add_context(0, artifact)
        engine.open(0, 0, CONFIG, "csattn")
        with pytest.raises(ConfigError, match="slot 0 is taken"):
            engine.open(0, 0, CONFIG, "csattn")
        for num_rows in (0, 5):
            with pytest.raises(ConfigError, match="1 to 4 rows"):
                engine.step([StepRow(0, 1)] * num_rows)
        for token_id in (-1, 256):
            with pytest.raises(ContextError, match="vocabulary"):
                engine.step([StepRow(0, token_id)])
        with pytest.raises(ConfigError, match="cannot be watched"):
            engine.step([StepRow(0, 1)], watch=(1, 0))
        engine.step([StepRow(0, 1)] * 4)
        with pytest.raises(ContextError, match="6 rows of its own, and there is room for 5"):
            engine.step([StepRow(0, 1)] * 2)
        engine.step([StepRow(0, 1)])
        with pytest.raises(ContextError, match="room for 5"):
            engine.step([StepRow(0, 1)])


def test_contexts_of_other_models_are_refused(store) -> None:
    with opened(store, "qwen2", 0) as artifact, make_engine([]) as engine:
        with pytest.raises(ArtifactMismatchError, match="fingerprint"):
            engine.add_context(0, artifact)
        with pytest.raises(ConfigError, match="no context 0"):
            engine.remove_context(0)


def test_an_engine_with_max_rows_0_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one row"):
        CpuEngine(loaded(), max_rows=0)


def test_the_pieces_of_linear_layers_depend_on_the_number_of_threads() -> None:
    """The number of CPUs has no effect: 4 large pieces for one thread, pieces of 16 outputs for 64 threads."""
    pieces = []
    for num_threads in (1, 64):
        with make_engine([], num_threads=num_threads) as engine:
            pieces.append(int(engine._model.logits_tape([0]).pieces.max()))
    assert pieces == [4, -(-engine.loaded.geometry.vocab_size // 16)]


def test_searches_are_reused_until_a_request_closes_and_do_not_pile_up(store, monkeypatch) -> None:
    with opened(store, "llama", 0) as artifact, make_engine([artifact]) as engine:
        for request_slot in range(6):
            engine.open(request_slot, 0, SearchConfig(keep=0.05, window_len=64, lookahead=request_slot % 2), "csattn")
        num_made = 0

        def step(request_slots: list[int]) -> set[int]:
            engine.step([StepRow(request_slot, 1) for request_slot in request_slots])
            groups = [group for plan in engine._plans._plans.values() for group in plan.groups]
            kept = [search for group in groups for search in (*group.late, *(group.early or ()))]
            return {id(search) for of_rows in kept for search in of_rows.of_layers.values()}

        steps = [[0], [0, 1], [0, 1, 2, 3, 4, 5], [5, 1], [2], [0, 0, 2]]
        for request_slots in steps:
            made = step(request_slots)
            num_made += 3 * len({request_slot % 2 for request_slot in request_slots})
            assert len(made) == num_made
        for request_slots in steps:
            assert step(request_slots) == made, "steps of the same slots have the same searches"
        engine.close_request(5)
        assert not engine._plans._plans
        monkeypatch.setattr(row_plan, "MAX_PLANS", 3)
        for num_rows in (1, 2, 3, 4):
            step([0] * num_rows)
        assert len(step([0])) == 2 * 3, "plans do not pile up"
