"""A user's own selector, written as in docs/use.md, is known wherever selectors are named."""

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.accuracy.contenders import find_contenders
from csattn.artifact import Artifact, open_artifact
from csattn.config import SearchConfig, preset
from csattn.errors import ArrayError, ConfigError
from csattn.models.attending_cache import CACHE
from csattn.selection import Rest, Selection
from csattn.selector_names import ABOUT
from csattn.selectors import About, register
from index_build.pipeline import build_artifact
from tests.selections import check_selection
from tests.tiny import loaded, token_ids
from workers.api.parsing import read_chat
from workers.cli import comparing
from workers.cli.app import app
from workers.engine.fidelity import Seen
from workers.evaluate import full_attention, measure
from workers.session import csattn_session
from workers.settings import load_settings

CONTEXT_LEN = 400
USE = Path(__file__).parents[2] / "docs" / "use.md"


def forget(name: str) -> None:
    del ABOUT[name]
    del import_module("csattn.selectors.prepare")._FACTORIES[name]  # the package exports a function of the same name


@pytest.fixture(scope="module")
def example() -> Iterator[dict[str, Any]]:
    """The names that the example in docs/use.md defines, after it has registered `newest`."""
    section = USE.read_text().split("## A selector of your own\n")[1]
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0], names)
    yield names
    forget("newest")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> Iterator[Artifact]:
    path = build_artifact(loaded(), token_ids(CONTEXT_LEN), preset("default"), tmp_path_factory.mktemp("store")).path
    with open_artifact(path) as opened:
        yield opened


def logits_of(artifact: Artifact, config: SearchConfig, selector: str, observer=None) -> torch.Tensor:
    """Return the logits of 20 tokens. 12 leave the window of 8; with the context's middle (388) these are 400 rows."""
    ids = torch.from_numpy(token_ids(20, seed=2)).long()[None]
    with csattn_session(loaded(), artifact, config, selector) as session, torch.inference_mode():
        return loaded().model(ids, **{CACHE: session.request(observer)}).logits[0]


@pytest.mark.parametrize("keeps_top_k", [True, False])
def test_an_own_selector_at_keep_1_equals_full_attention(artifact, example, keeps_top_k) -> None:
    """With keeps_top_k, full attention replaces the selector; without it, the selector has to choose all rows."""
    register("newest_too", example["NewestOfLayer"], About("", "", keeps_top_k))
    try:
        got = logits_of(artifact, SearchConfig(keep=1.0, window_len=8), "newest_too")
    finally:
        forget("newest_too")
    torch.testing.assert_close(got, logits_of(artifact, SearchConfig(), "full"), rtol=1e-4, atol=1e-4)


def test_an_own_selector_chooses_the_attended_rows(artifact, example) -> None:
    seen: list[Seen] = []
    got = logits_of(artifact, SearchConfig(keep=0.1, window_len=8), "newest", seen.append)
    for row in seen:
        check_selection(row.chosen, CONTEXT_LEN + row.num_outside_window)
        free = np.r_[4 : CONTEXT_LEN - 8, CONTEXT_LEN : CONTEXT_LEN + row.num_outside_window]
        np.testing.assert_array_equal(row.chosen.kv_indices, np.tile(free[-40:], (len(row.chosen.valid_len), 1)))
    assert len(seen) == 20 * 3 and max(row.num_outside_window for row in seen) == 12
    full, window = (logits_of(artifact, SearchConfig(keep=0.1, window_len=8), name) for name in ("full", "window"))
    assert not torch.equal(got, window) and not torch.equal(got, full)


def test_an_own_selector_can_be_evaluated(artifact, example) -> None:
    ids = token_ids(10, seed=3)
    baseline = full_attention(loaded(), artifact, ids)
    found = measure(loaded(), artifact, SearchConfig(keep=0.1, window_len=8), "newest", ids, baseline)
    assert found.kl > 0 and found.index_bytes_per_key == found.search_bytes_per_step == 0


def test_an_own_selectors_first_choice_is_not_timed(artifact, monkeypatch) -> None:
    """The first choice takes a second, as if kernels were compiled; later choices take no time."""
    chosen = ChoosesWrongly(rows_of_all_heads(9))
    waits = iter([1.0])
    monkeypatch.setattr(chosen, "select", lambda q, recent: time.sleep(next(waits, 0.0)) or chosen.chosen)
    ids = token_ids(10, seed=3)
    baseline = full_attention(loaded(), artifact, ids)
    register("mine", lambda layer: chosen, About("", "", True))
    try:
        found = measure(loaded(), artifact, SearchConfig(keep=0.1, window_len=8), "mine", ids, baseline)
    finally:
        forget("mine")
    assert found.search_ms_per_step < 100


def test_the_command_line_and_the_benchmark_accept_an_own_selector(example, monkeypatch) -> None:
    plans = []
    monkeypatch.setattr(comparing, "compare", lambda text, plan, *others: plans.append(plan) or {})
    app(["eval", "--text", "-", "--selectors", "newest,exact", "--json"], standalone_mode=False)
    with pytest.raises(ConfigError, match=r"got 'newest2'; choose from csattn, .*newest"):
        app(["eval", "--text", "-", "--selectors", "newest2", "--json"], standalone_mode=False)
    assert plans[0].selectors == ["newest", "exact"]
    assert [contender.selector for contender in find_contenders("newest,quest")] == ["newest", "quest"]


def test_a_local_service_accepts_an_own_selector_and_ray_refuses_it(example, tmp_path) -> None:
    """The selector is named in the settings, and in a field of a request."""
    settings = load_settings(None, {}, {"engine.selector": "newest"}).settings
    assert settings.engine.selector == "newest"
    said = {"model": "m", "messages": [{"role": "user", "content": "Why?"}], "selector": "newest"}
    assert [ask.selector for ask in read_chat(said, "id", "m", settings.limits).asks] == ["newest"]
    with pytest.raises(ConfigError, match="newest was registered only in this process; serve from it, with --local"):
        app(["serve", "--selector", "newest", "--store", f"{tmp_path}"], standalone_mode=False)


@pytest.mark.parametrize("name", ["newest", "csattn", "full", "lists", "all"])
def test_registering_a_taken_selector_name_is_refused(example, name) -> None:
    with pytest.raises(ConfigError, match=f"{name} is a selector or a preset already; choose another name"):
        register(name, example["NewestOfLayer"], About("", "", True))


@pytest.mark.parametrize(
    ("factory", "about", "sentence"),
    [
        (None, About("", "", True), "factory is called with each layer, got None; give its class"),
        (len, "the newest rows", "description is an About, got 'the newest rows'; give one"),
        (len, None, "description is an About, got None"),
    ],
)
def test_an_invalid_selector_is_not_registered(factory, about, sentence) -> None:
    with pytest.raises(ConfigError, match=sentence):
        register("oldest", factory, about)
    assert "oldest" not in ABOUT


@pytest.mark.parametrize("name", ["", "a-b", "7th", "a,b", None])
def test_a_selector_name_that_is_not_an_identifier_is_refused(example, name) -> None:
    with pytest.raises(ConfigError, match="a selector's name must be an identifier, got"):
        register(name, example["NewestOfLayer"], About("", "", True))


class ChoosesWrongly:
    """A selector that returns the given choice."""

    index_bytes = search_bytes = 0

    def __init__(self, chosen: object) -> None:
        self.chosen = chosen

    def selector(self, view) -> "ChoosesWrongly":
        return self

    def append(self, k, v) -> None:
        """Keep nothing."""

    def select(self, q, recent) -> object:
        return self.chosen


def rows_of_all_heads(*rows: int, valid: int | None = None, heads: int = 2) -> Selection:
    indices = np.tile(np.array(rows, np.int32), (heads, 1))
    return Selection(indices, np.full(heads, len(rows) if valid is None else valid, np.int32))


OUT, SHARE = np.zeros((4, 16), np.float32), np.full(4, 0.5, np.float32)


def chosen(**more: Any) -> Selection:
    """A valid choice of one row for all heads, except for the given fields."""
    return replace(rows_of_all_heads(9), **more)


@pytest.mark.parametrize(
    ("chosen", "complaint"),
    [
        (None, "selector mine gave None; wanted a Selection of numpy arrays"),
        (Selection(torch.zeros(2, 1), torch.ones(2)), "kv_indices of type Tensor; wanted a numpy array of int32 or"),  # type: ignore[arg-type]
        (chosen(kv_indices=np.full((2, 1), 9.5)), "gave kv_indices of float64; wanted a numpy array of int32 or int64"),
        (chosen(kv_indices=np.full((2, 1), 9, np.uint8)), "gave kv_indices of uint8"),
        (chosen(kv_indices=np.full((2, 1), 9, ">i4")), "gave kv_indices of >i4"),
        (chosen(valid_len=np.full(2, 0.5)), "gave valid_len of float64"),
        (chosen(kv_indices=np.full((2, 1), -1), valid_len=np.full(2, -1)), "a valid_len of -1 and 1 rows a head"),
        (chosen(log_weights=np.zeros((1, 1), np.float32)), r"log_weights of shape \[1, 1\]; wanted \[2, 1\]"),
        (chosen(log_weights=[[0.0], [0.0]]), "log_weights of type list; wanted a numpy array of float32 or float64"),
        (chosen(rest=3), "rest.out of type NoneType"),
        (chosen(rest=Rest(OUT[:1], SHARE)), r"rest.out of shape \[1, 16\]; wanted \[4, 16\]"),
        (chosen(rest=Rest(OUT, SHARE[:1])), r"rest.share of shape \[1\]; wanted \[4\]"),
        (chosen(rest=Rest(OUT, SHARE + 1.5)), "a rest.share of 2.0; wanted 0 to 1"),
        (rows_of_all_heads(9, heads=3), r"kv_indices of shape \[3, 1\] .* of 2 or 4 heads"),
        (rows_of_all_heads(9, 8), "gave 8 at place 1 of head 0, of 2 rows; wanted them ascending, each once"),
        (rows_of_all_heads(9, 9), "each once"),
        (rows_of_all_heads(3), "from 4 up to 392 or 400 up to 400, and -1 after them"),
        (rows_of_all_heads(399), "gave 399"),
        (rows_of_all_heads(400), "gave 400"),
        (rows_of_all_heads(-7), "gave -7"),
        (rows_of_all_heads(9, 10, valid=1), "gave 10 at place 1 of head 0, of 1 rows"),
        (rows_of_all_heads(9, valid=2), "a valid_len of 2 and 1 rows a head"),
    ],
)
def test_an_own_selectors_invalid_selection_is_refused_with_the_reason(artifact, chosen, complaint) -> None:
    register("mine", lambda layer: ChoosesWrongly(chosen), About("", "", True))
    try:
        with pytest.raises(ArrayError, match=complaint):
            logits_of(artifact, SearchConfig(keep=0.1, window_len=8), "mine")
    finally:
        forget("mine")


def test_a_selection_may_have_any_memory_order(artifact, example) -> None:
    right = rows_of_all_heads(9, 12, 20)
    transposed = Selection(np.asfortranarray(right.kv_indices), right.valid_len)
    got = []
    for chosen in (right, transposed):
        register("mine", lambda layer, chosen=chosen: ChoosesWrongly(chosen), About("", "", True))
        try:
            got.append(logits_of(artifact, SearchConfig(keep=0.1, window_len=8), "mine"))
        finally:
            forget("mine")
    assert torch.equal(*got)
