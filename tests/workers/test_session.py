"""Decoding from an artifact through `model.generate`: the same answer as full attention where no row is left out,
and the same answer whichever way the same rows are chosen."""

import copy
import gc
import inspect
import pickle
import signal
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from csattn.artifact import open_artifact
from csattn.config import SearchConfig, preset
from csattn.errors import ArtifactMismatchError, ConfigError, ContextError
from csattn.models import LoadedModel
from csattn.models.attending_cache import CACHE
from csattn.models.loader import wrap_model
from csattn.selector_names import SELECTOR_NAMES
from index_build.pipeline import build_artifact
from offload.codecs.formats import KvFormat
from tests.selections import check_selection
from tests.tiny import MAX_POSITIONS, byte_tokenizer, loaded, make_model, token_ids
from workers import session_model
from workers.engine.fidelity import Seen
from workers.evaluate import full_attention, measure
from workers.request_cache import RequestCache
from workers.session import csattn_session
from workers.session_model import METHODS, Method

CONTEXT_LEN = 400


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("store")


def artifact_of(store: Path, family: str = "llama", preset_name: str = "default") -> Path:
    model = loaded(family)
    return build_artifact(model, token_ids(CONTEXT_LEN), preset(preset_name), store).path


def logits_of(session, ids, chunk_sizes, observer=None):
    """Feed ids in chunks of the given sizes to one request; return the logits of all ids."""
    request, parts = session.request(observer), torch.from_numpy(ids).long()[None].split(chunk_sizes, 1)
    with torch.inference_mode():
        return torch.cat([session.loaded.model(part, **{CACHE: request}).logits[0] for part in parts])


@pytest.mark.parametrize(
    ("family", "keep", "selector"),
    [("llama", 1.0, "csattn"), ("mistral", 1.0, "exact"), ("qwen2", 0.05, "full"), ("qwen3", 1.0, "exact")],
)
def test_reading_all_rows_generates_the_tokens_of_full_attention(store, family, keep, selector) -> None:
    """tests/workers/test_families.py tests the selector csattn with every family."""
    model = loaded(family)
    question = token_ids(9, seed=1)
    with csattn_session(model, artifact_of(store, family), SearchConfig(keep=keep), selector) as session:
        arguments = session.continue_with(question)
        got = model.model.generate(**arguments, max_new_tokens=60, do_sample=False)
    want = model.model.generate(
        arguments["input_ids"], attention_mask=arguments["attention_mask"], max_new_tokens=60, do_sample=False
    )
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("preset_name", "rest"), [("default", None), ("default", "moments"), ("lists", "moments"), ("paper", None)]
)
@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_question_in_one_piece_equals_the_question_token_by_token(store, preset_name, rest, lookahead) -> None:
    """The question is longer than the window, so that its own rows move into the lists meanwhile."""
    config = SearchConfig(keep=0.1, window_len=8, lookahead=lookahead, rest=rest)
    ids = token_ids(30, seed=2)
    with csattn_session(loaded(), artifact_of(store, preset_name=preset_name), config) as session:
        whole = logits_of(session, ids, [30])
        assert torch.equal(logits_of(session, ids, [1] * 30), whole)
        assert torch.equal(logits_of(session, ids, [7, 1, 13, 9]), whole)


@pytest.mark.parametrize("selector", ["quest", "sparq", "pqcache", "magicpig", "h2o"])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_other_selectors_do_not_depend_on_how_a_question_is_chunked(store, selector, lookahead) -> None:
    """Some of these keep state, estimate the rest or weight rows. The question's rows leave its window."""
    config, ids = SearchConfig(keep=0.1, window_len=8, lookahead=lookahead), token_ids(24, seed=2)
    with csattn_session(loaded(), artifact_of(store), config, selector) as session:
        whole = logits_of(session, ids, [24])
        assert torch.equal(logits_of(session, ids, [1] * 24), whole)
        assert torch.equal(logits_of(session, ids, [7, 1, 11, 5]), whole)


@pytest.fixture
def float64_by_default() -> Iterator[None]:
    """As another thread has it for a moment when it loads a model."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("family", "selector"),
    [*(("llama", name) for name in SELECTOR_NAMES), ("qwen3_next", "csattn"), ("deepseek_v4", "csattn")],
)
def test_torchs_default_dtype_changes_nothing(store, family, selector, request) -> None:
    def logits() -> torch.Tensor:
        with csattn_session(loaded(family), path, SearchConfig(keep=0.1, window_len=8), selector) as session:
            return logits_of(session, token_ids(24, seed=2), [24])

    path = artifact_of(store, family)
    want = logits()
    request.getfixturevalue("float64_by_default")
    assert torch.equal(logits(), want)


@pytest.mark.parametrize("mode", [torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta")])
@pytest.mark.parametrize("selector", SELECTOR_NAMES)
def test_torchs_modes_change_nothing(store, selector, mode) -> None:
    """`torch.set_default_device` is the mode of a device."""

    def logits() -> torch.Tensor:
        with csattn_session(loaded(), artifact_of(store), SearchConfig(keep=0.1, window_len=8), selector) as session:
            return logits_of(session, token_ids(24, seed=2), [24])

    want = logits()
    with mode:
        got = logits()
    assert torch.equal(got, want)


@pytest.mark.parametrize("selector", ["csattn", "exact", "sparq", "pqcache"])
def test_divergence_from_full_attention_falls_with_keep(store, selector) -> None:
    ids, distance = token_ids(40, seed=3), []
    with csattn_session(loaded(), artifact_of(store), SearchConfig(), "full") as session:
        full = logits_of(session, ids, [40]).log_softmax(-1)
    for keep in (0.02, 0.3, 0.9):
        with csattn_session(loaded(), artifact_of(store), SearchConfig(keep=keep, window_len=16), selector) as session:
            sparse = logits_of(session, ids, [40]).log_softmax(-1)
        distance.append(float((full.exp() * (full - sparse)).sum(-1).mean()))
    assert distance[0] > 2 * distance[1] > 4 * distance[2]


def test_invalid_tokens_for_an_evaluation_are_refused(store) -> None:
    one, sentence = token_ids(1, seed=3), "each token is evaluated on the one after it, got 1; give two or more"
    with pytest.raises(ConfigError, match=sentence):
        full_attention(loaded(), artifact_of(store), one)
    baseline = full_attention(loaded(), artifact_of(store), token_ids(2, seed=3))
    with pytest.raises(ConfigError, match=sentence):
        measure(loaded(), artifact_of(store), SearchConfig(), "csattn", one, baseline)
    with open_artifact(artifact_of(store)) as artifact:  # a list of ids, as a tokenizer returns it
        ids = token_ids(9, seed=3).tolist()
        everything = measure(
            loaded(), artifact, SearchConfig(keep=1), "csattn", ids, full_attention(loaded(), artifact, ids)
        )
    assert everything.kl < 1e-6
    for other in (ids[:2], ids[::-1]):
        baseline = full_attention(loaded(), artifact_of(store), other)
        with pytest.raises(ConfigError, match=f"are for {len(other)} other tokens than these 9; give the result of"):
            measure(loaded(), artifact_of(store), SearchConfig(), "csattn", ids, baseline)
    with pytest.raises(ConfigError, match="token ids must be whole numbers"):
        full_attention(loaded(), artifact_of(store), [0.5, 1.5])
    with pytest.raises(ConfigError, match="what `load_model` returned, got a str"):
        full_attention("smollm2", artifact_of(store), [1, 2])  # type: ignore[arg-type]
    for unknown in (2**32 + 1, 256, -1):
        with pytest.raises(ContextError, match=f"token id {unknown} is not in the model's vocabulary of 256"):
            full_attention(loaded(), artifact_of(store), [1, unknown])


def test_an_evaluation_takes_an_artifacts_path(store) -> None:
    path, ids = artifact_of(store), token_ids(9, seed=3)
    assert (
        measure(loaded(), path, SearchConfig(keep=1), "csattn", ids, full_attention(loaded(), str(path), ids)).kl < 1e-6
    )


def test_full_attention_after_another_context_is_refused(store) -> None:
    """The same question about two texts: a result that is not computed again would be compared with the wrong one."""
    ids = token_ids(9, seed=3)
    other = build_artifact(loaded(), token_ids(CONTEXT_LEN, seed=7), preset("default"), store).path
    full = full_attention(loaded(), artifact_of(store), ids)
    with pytest.raises(ConfigError, match=f"another context than that of {other.name}; give the result of"):
        measure(loaded(), other, SearchConfig(), "csattn", ids, full)
    measure(loaded(), artifact_of(store, preset_name="lists"), SearchConfig(), "csattn", ids, full)
    with pytest.raises(ConfigError, match="what `full_attention` returned, got None"):
        measure(loaded(), other, SearchConfig(), "csattn", ids, None)  # type: ignore[arg-type]


def test_an_evaluation_takes_a_kv_format_by_its_name_too(store) -> None:
    ids = token_ids(9, seed=3)
    with open_artifact(artifact_of(store)) as artifact:
        full = full_attention(loaded(), artifact, ids)
        named, parsed = (
            measure(loaded(), artifact, SearchConfig(), "csattn", ids, full, kv_format=form)
            for form in ("float16", KvFormat.parse("float16"))
        )
    assert named.kl == parsed.kl and named.moved_bytes_per_step == parsed.moved_bytes_per_step > 0


def test_window_reads_no_far_rows_and_is_worse_than_the_index(store) -> None:
    ids = token_ids(40, seed=3)
    config = SearchConfig(keep=0.2, window_len=16)
    with csattn_session(loaded(), artifact_of(store), SearchConfig(), "full") as session:
        full = logits_of(session, ids, [40])
    with csattn_session(loaded(), artifact_of(store), config, "window") as session:
        request = session.request()
        with torch.inference_mode():
            window = loaded().model(torch.from_numpy(ids).long()[None], **{CACHE: request}).logits[0]
        assert request.count.far_rows == 0
    with csattn_session(loaded(), artifact_of(store), config) as session:
        indexed = logits_of(session, ids, [40])
    assert (indexed - full).norm() < 0.5 * (window - full).norm()


@pytest.mark.parametrize("preset_name", ["default", "lists"])
def test_selections_are_valid_and_disjoint_from_resident_rows(store, preset_name) -> None:
    """Rows that leave the tail's window join the lists; over a sketch, the whole tail is resident."""
    config, seen = SearchConfig(keep=0.1, window_len=8), []

    def observe(row: Seen) -> None:
        assert row.num_outside_window == (max(0, row.tail.shape[1] - 8) if preset_name == "lists" else 0)
        check_selection(row.chosen, CONTEXT_LEN + row.num_outside_window)
        rows = row.chosen.kv_indices[row.chosen.kv_indices >= 0]
        in_window = (rows >= CONTEXT_LEN - 8) & (rows < CONTEXT_LEN)
        assert not (rows < 4).any()
        assert not in_window.any()
        seen.append((rows >= CONTEXT_LEN).any())

    with csattn_session(loaded(), artifact_of(store, preset_name=preset_name), config) as session:
        logits_of(session, token_ids(40, seed=4), [40], observe)
    assert len(seen) == 40 * 3
    assert any(seen) == (preset_name == "lists")


def test_requests_of_one_session_are_independent(store) -> None:
    first, second = token_ids(40, seed=5), token_ids(40, seed=6)
    with csattn_session(loaded(), artifact_of(store), SearchConfig(keep=0.1, window_len=8)) as session:
        alone = logits_of(session, first, [40])
        requests = [session.request(), session.request()]
        mixed = []
        with torch.inference_mode():
            for a, b in zip(first.reshape(8, 5), second.reshape(8, 5), strict=True):
                for request, chunk in zip(requests, (a, b), strict=True):
                    ids = torch.from_numpy(chunk).long()[None]
                    mixed.append(loaded().model(ids, **{CACHE: request}).logits[0])
    assert torch.equal(torch.cat(mixed[::2]), alone)


def test_a_search_period_reuses_selections(store) -> None:
    with csattn_session(loaded(), artifact_of(store), SearchConfig(keep=0.1, search_period=4)) as session:
        request = session.request()
        with torch.inference_mode():
            loaded().model(torch.from_numpy(token_ids(16)).long()[None], **{CACHE: request})
    assert request.count.searches == 4 * 3


@pytest.fixture(scope="module")
def wide(store) -> tuple[LoadedModel, Path]:
    """A model with heads of 64, of which a sketch keeps the same share as of a real model's, and its artifact."""
    model = wrap_model(make_model("qwen3", head_dim=64), byte_tokenizer(), "tiny-wide")
    return model, build_artifact(model, token_ids(CONTEXT_LEN), preset("default"), store).path


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("rest", ["sketch", "moments"])
@pytest.mark.parametrize("selector", ["csattn", "exact"])
def test_attending_to_the_rest_reduces_the_error(wide, selector, rest, lookahead) -> None:
    (model, artifact), ids, errors = wide, token_ids(20, seed=4), []
    with csattn_session(model, artifact, SearchConfig(), "full") as session:
        want = logits_of(session, ids, [20])
    for kind in ("none", rest):
        config = SearchConfig(keep=0.05, window_len=8, lookahead=lookahead, rest=kind)
        with csattn_session(model, artifact, config, selector) as session:
            got = logits_of(session, ids, [20])
        errors.append(float((got - want).square().mean()))
    assert errors[1] < 0.4 * errors[0]


@pytest.mark.parametrize(
    ("preset_name", "selector", "rest", "sentence"),
    [
        ("default", "quest", "moments", "rest moments works only with the selectors csattn and exact, and quest"),
        ("lists", "csattn", "sketch", "rest sketch needs an index that is a sketch"),
    ],
)
def test_an_unsupported_rest_is_refused(store, preset_name, selector, rest, sentence) -> None:
    with (
        pytest.raises(ConfigError, match=sentence),
        csattn_session(loaded(), artifact_of(store, preset_name=preset_name), SearchConfig(rest=rest), selector),
    ):
        pass


def test_full_attention_has_no_rest(store) -> None:
    with csattn_session(loaded(), artifact_of(store), SearchConfig(rest="moments"), "full") as session:
        request = session.request()
        logits_of(session, token_ids(3), [3])
        assert request.count.search_bytes == request.index_bytes == 0


def test_sessions_over_one_model_are_independent(store) -> None:
    config, question = SearchConfig(keep=0.05, window_len=8, lookahead=1), token_ids(9, seed=3)
    other = build_artifact(loaded(), token_ids(CONTEXT_LEN, seed=7), preset("default"), store).path
    with csattn_session(loaded(), artifact_of(store), config) as session:
        want = logits_of(session, question, [5] + [1] * 4)
    with (
        csattn_session(loaded(), artifact_of(store), config) as session,
        csattn_session(loaded(), other, config) as beside,
    ):
        assert torch.equal(logits_of(session, question, [5] + [1] * 4), want)
        assert not torch.equal(logits_of(beside, question, [5] + [1] * 4), want)


def test_a_request_is_generated_from_once_and_can_be_continued(store) -> None:
    model, config = loaded().model, SearchConfig(keep=0.05, window_len=8)
    with csattn_session(loaded(), artifact_of(store), config) as session:
        arguments = session.continue_with(token_ids(9, seed=3))
        whole = model.generate(**arguments, max_new_tokens=8, do_sample=False)
        with pytest.raises(ConfigError, match="it has been decoded already; ask again"):
            model.generate(**arguments, max_new_tokens=8, do_sample=False)
        request = session.continue_with(token_ids(9, seed=3))
        half = model.generate(**request, max_new_tokens=4, do_sample=False)
        rest = {**request, "input_ids": half, "attention_mask": torch.ones_like(half)}
        assert torch.equal(model.generate(**rest, max_new_tokens=4, do_sample=False), whole)


def test_a_model_call_takes_a_whole_request_like_generate(store) -> None:
    model, question = loaded().model, token_ids(9, seed=3)
    with csattn_session(loaded(), artifact_of(store)) as session, torch.inference_mode():
        want = logits_of(session, question, [9])
        inputs = session.continue_with(question)
        assert torch.equal(model(**inputs).logits[0], want)
        assert inputs[CACHE].get_seq_length() == CONTEXT_LEN + 9
        with pytest.raises(ConfigError, match="it has been decoded already; ask again"):
            model(**inputs)
        positions = torch.arange(CONTEXT_LEN + 9)[None]
        assert torch.equal(model(**session.continue_with(question), position_ids=positions).logits[0], want)
        alone = session.continue_with(question)
        del alone["attention_mask"]
        assert torch.equal(model(**alone).logits[0], want)


@pytest.mark.parametrize("place", [0, 100, CONTEXT_LEN - 1])
def test_input_ids_that_differ_from_the_context_are_refused(store, place) -> None:
    model = loaded().model
    sentence = (
        f"which differ from the context's at position {place};"
        if place
        else "without the context's before them; give a whole"
    )
    with csattn_session(loaded(), artifact_of(store)) as session:
        inputs = session.continue_with(token_ids(9, seed=3))
        inputs["input_ids"][0, place] += 1
        for call in (model, model.generate):
            with pytest.raises(ConfigError, match=sentence):
                call(**inputs)
        inputs["inputs"] = inputs.pop("input_ids")
        with pytest.raises(ConfigError, match=sentence):
            model.generate(**inputs, input_ids=None)


def test_generate_with_prefill_chunk_size_gives_the_same_tokens(store) -> None:
    model, options = loaded().model, {"max_new_tokens": 4, "do_sample": False}
    with csattn_session(loaded(), artifact_of(store)) as session:
        want = model.generate(**session.continue_with(token_ids(9)), **options)
        assert torch.equal(model.generate(**session.continue_with(token_ids(9)), **options, prefill_chunk_size=4), want)


def test_input_ids_that_differ_from_the_requests_are_refused(store) -> None:
    model = loaded().model
    with csattn_session(loaded(), artifact_of(store)) as session:
        inputs = session.continue_with(token_ids(9, seed=3))
        whole_ids = model.generate(**inputs, max_new_tokens=4, do_sample=False)
        whole_ids[0, CONTEXT_LEN + 2] += 1
        inputs |= {"input_ids": whole_ids, "attention_mask": torch.ones_like(whole_ids)}
        with pytest.raises(ConfigError, match="do not follow a request of 412"):
            model.generate(**inputs, max_new_tokens=4)


def test_a_question_without_the_context_needs_a_mask_of_all_tokens(store) -> None:
    question, model = torch.from_numpy(token_ids(9, seed=3)).long()[None], loaded().model
    with csattn_session(loaded(), artifact_of(store)) as session:
        want = model.generate(**session.continue_with(token_ids(9, seed=3)), max_new_tokens=4, do_sample=False)
        options = {"attention_mask": torch.ones(1, CONTEXT_LEN + 9), "max_new_tokens": 4, "do_sample": False}
        got = model.generate(question, **{CACHE: session.request()}, **options)
        assert torch.equal(got[0], want[0, CONTEXT_LEN:])
        with pytest.raises(
            ConfigError, match="9 token ids were given to a request of a context of 400, without the context's"
        ):
            model.generate(question, **{CACHE: session.request()}, max_new_tokens=4)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"use_cache": False}, "use_cache is False; leave it out"),
        ({"prompt_lookup_num_tokens": 3}, "assisted decoding would; leave out prompt_lookup_num_tokens"),
        ({"generation_config": GenerationConfig(use_cache=False)}, "use_cache is False; leave it out"),
    ],
)
def test_unsupported_generate_options_are_refused_before_decoding(store, options, sentence) -> None:
    with csattn_session(loaded(), artifact_of(store)) as session:
        inputs = session.continue_with(token_ids(9))
        with pytest.raises(ConfigError, match=sentence):
            loaded().model.generate(**inputs, **options)
        assert inputs[CACHE].get_seq_length() == CONTEXT_LEN
        loaded().model.generate(**inputs, max_new_tokens=1)
    with (
        csattn_session(loaded(), artifact_of(store)) as session,
        pytest.raises(ConfigError, match="use_cache is False"),
    ):
        loaded().model(**session.ask("who?"), use_cache=False)


@pytest.mark.parametrize("said", [{"max_new_tokens": 4}, {"max_length": CONTEXT_LEN + 22}])
def test_an_answer_beyond_tail_capacity_is_refused_before_decoding(store, said) -> None:
    sentence = (
        "4 new tokens were requested, .* pass max_new_tokens of at most 3, or open the session with more tail_cap"
    )
    with csattn_session(loaded(), artifact_of(store), tail_capacity=20) as session:
        inputs = session.continue_with(token_ids(18))
        for options in (said, {"generation_config": GenerationConfig(**said)}):
            with pytest.raises(ContextError, match=sentence):
                loaded().model.generate(**inputs, **options)
        assert inputs[CACHE].get_seq_length() == CONTEXT_LEN
        with pytest.raises(ContextError, match="room for 0; ask a shorter question, or open"):
            loaded().model.generate(**session.continue_with(token_ids(21)))


def test_a_generate_kept_from_before_a_session_is_refused_for_its_requests(store) -> None:
    """It would skip the check for room, and fail after the last token that fits. One kept from a session does not."""
    generate = loaded().model.generate
    for _ in range(2):
        with csattn_session(loaded(), artifact_of(store), tail_capacity=20) as session:
            inputs, kept = session.continue_with(token_ids(18)), loaded().model.generate
            with pytest.raises(ConfigError, match="call the model's own"):
                generate(**inputs, max_new_tokens=4)
            assert inputs[CACHE].get_seq_length() == CONTEXT_LEN
            assert generate(torch.ones(1, 9, dtype=torch.long), max_new_tokens=2).shape[1] > 9, "no request, as ever"
            kept(**inputs, max_new_tokens=2)
            with pytest.raises(ConfigError, match="call the model's own"):
                generate(**session.continue_with(token_ids(18)), max_new_tokens=4)
    with (
        csattn_session(loaded(), artifact_of(store), tail_capacity=20) as session,
        pytest.raises(ContextError, match="pass max_new_tokens of at most 3"),
    ):
        kept(**session.continue_with(token_ids(18)), max_new_tokens=4)
    assert not {*METHODS} & {*vars(loaded().model)}


def test_the_models_last_position_limits_the_answer(store) -> None:
    question = token_ids(MAX_POSITIONS - CONTEXT_LEN - 5)
    with csattn_session(loaded(), artifact_of(store)) as session:
        inputs = session.continue_with(question)
        assert session.room_for(MAX_POSITIONS - 5, 60) == 5
        with pytest.raises(ContextError, match=r"pass max_new_tokens of at most 5$"):
            loaded().model.generate(**inputs, max_new_tokens=6)
        assert loaded().model.generate(**inputs, max_new_tokens=5, min_new_tokens=5).shape[1] == MAX_POSITIONS
        with (
            pytest.raises(ContextError, match=f"room for {MAX_POSITIONS - CONTEXT_LEN} after this context"),
            torch.inference_mode(),
        ):
            loaded().model(torch.zeros(1, 9, dtype=torch.long), **{CACHE: inputs[CACHE]})


def test_a_batch_is_refused(store) -> None:
    with csattn_session(loaded(), artifact_of(store)) as session:
        with pytest.raises(ConfigError, match="one sequence, got a batch of 2"):
            loaded().model(torch.zeros(2, 3, dtype=torch.long), **{CACHE: session.request()})
        with pytest.raises(ConfigError, match="one sequence, got a batch of 2"):
            loaded().model.generate(**session.continue_with(token_ids(3)), num_beams=2, max_new_tokens=2)


@pytest.mark.parametrize("keep", [0, 1, 5, 40, -1, torch.tensor([0, 7])])
def test_logits_to_keep_selects_logits(store, keep) -> None:
    ids = torch.from_numpy(token_ids(33)).long()[None]
    with csattn_session(loaded(), artifact_of(store)) as session, torch.inference_mode():
        whole = loaded().model(ids, **{CACHE: session.request()}).logits
        got = loaded().model(ids, **{CACHE: session.request()}, logits_to_keep=keep, return_dict=False)
    wanted = keep if isinstance(keep, torch.Tensor) else slice(-keep, None)
    assert isinstance(got, tuple)
    assert torch.equal(got[0], whole[:, wanted])
    assert whole.shape == (1, 33, 256)


def test_a_request_is_accepted_by_either_cache_argument_name(store) -> None:
    """`past_key_values` is called `cache` from transformers 5.24 on."""
    ids = torch.from_numpy(token_ids(3)).long()[None]
    with csattn_session(loaded(), artifact_of(store)) as session, torch.inference_mode():
        old, new = (loaded().model(ids, **{name: session.request()}) for name in ("past_key_values", "cache"))
        assert isinstance(session.continue_with(token_ids(3))[CACHE], RequestCache)
    assert isinstance(new[CACHE], RequestCache)
    assert torch.equal(new.logits, old.logits)


@pytest.mark.parametrize("other", [None, DynamicCache])
@pytest.mark.parametrize("name", ["past_key_values", "cache"])
@pytest.mark.parametrize("method", ["generate", "forward"])
def test_a_request_beside_another_cache_is_refused(store, other, name, method) -> None:
    """transformers takes one of them: with `cache=None`, the request was ignored, and all rows were read."""
    beside = {"past_key_values": "cache", "cache": "past_key_values"}[name]
    with csattn_session(loaded(), artifact_of(store)) as session:
        inputs = session.continue_with(token_ids(3))
        request = inputs.pop(CACHE)
        with pytest.raises(ConfigError, match="both cache and past_key_values were given"):
            getattr(loaded().model, method)(**inputs, **{name: request, beside: other and other()})
        assert not request.decoded.token_ids


def test_unsupported_model_arguments_are_refused(store) -> None:
    ids = torch.from_numpy(token_ids(3)).long()[None]
    with csattn_session(loaded(), artifact_of(store)) as session:
        for name in ("labels", "per_layer_inputs"):
            with pytest.raises(ConfigError, match=f"leave out {name}"):
                loaded().model(ids, **{CACHE: session.request()}, **{name: ids})
        for name in ("output_attentions", "output_hidden_states", "output_router_logits"):
            with pytest.raises(ConfigError, match=f"leave out {name}"):
                loaded().model(ids, **{CACHE: session.request()}, **{name: True})
        masked = session.ask("who?")
        masked["attention_mask"][0, 3] = 0
        with pytest.raises(ConfigError, match="leave out padding"):
            loaded().model.generate(**masked, max_new_tokens=1)
        with pytest.raises(ConfigError, match=r"decoded by `model.generate` or `model\(...\)`"):
            loaded().model.model(ids, **{CACHE: session.request()})


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copying_a_request_is_refused(store, make) -> None:
    with csattn_session(loaded(), artifact_of(store)) as session:
        inputs = session.continue_with(token_ids(3))
        with pytest.raises(ConfigError, match=r"a request cannot be copied, .* ask again in its session"):
            make(inputs[CACHE])
        with pytest.raises(ConfigError, match="cannot go back to fewer tokens; ask again in its session"):
            inputs[CACHE].crop(CONTEXT_LEN)
        loaded().model.generate(**inputs, max_new_tokens=1)


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copying_a_session_is_refused(store, make) -> None:
    with csattn_session(loaded(), artifact_of(store)) as session:
        with pytest.raises(ConfigError, match=r"a session cannot be copied or sent .* open one there"):
            make(session)
        assert loaded().model.generate(**session.continue_with(token_ids(3)), max_new_tokens=1) is not None


@pytest.mark.parametrize("make", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_does_not_belong_to_the_session(store, make) -> None:
    ids = torch.from_numpy(token_ids(3)).long()[None]
    with csattn_session(loaded(), artifact_of(store)) as session, torch.inference_mode():
        other = make(loaded().model)
        assert torch.equal(other(ids).logits, loaded().model(ids).logits)
        with pytest.raises(ConfigError, match="of its own model, while its session is open"):
            other(ids, **{CACHE: session.request()})


def test_ctrl_c_ends_a_request_and_not_its_session(store, monkeypatch) -> None:
    config = SearchConfig(keep=0.1, lookahead=1)
    with csattn_session(loaded(), artifact_of(store), config) as session, torch.inference_mode():
        want = logits_of(session, token_ids(9), [9])
        searcher = session.engine._searcher
        finish = searcher.finish
        with monkeypatch.context() as within:
            within.setattr(searcher, "finish", lambda: (signal.raise_signal(signal.SIGINT), finish()))
            with pytest.raises(KeyboardInterrupt):
                logits_of(session, token_ids(9), [9])
        assert torch.equal(logits_of(session, token_ids(9), [9]), want)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_request_of_an_ended_session_is_refused(store, family) -> None:
    model, path, ids = loaded(family), artifact_of(store, family), torch.from_numpy(token_ids(3)).long()[None]
    with csattn_session(model, path) as session:
        request = session.request()
    with csattn_session(model, path), pytest.raises(ConfigError, match="in an open session"):
        model.model(ids, **{CACHE: request})
    with pytest.raises(ConfigError, match="in an open session"):
        model.model(ids, **{CACHE: request})


def test_a_request_keeps_its_slot_until_it_is_freed(store) -> None:
    ids = torch.from_numpy(token_ids(3)).long()[None]
    with csattn_session(loaded(), artifact_of(store), max_requests=2) as session, torch.inference_mode():
        held = session.request()
        for _ in range(3):
            want = loaded().model(ids, **{CACHE: session.request()}).logits
        cycle = [session.request()]
        cycle.append(cycle)
        del cycle
        assert torch.equal(loaded().model(ids, **{CACHE: held}).logits, want)
        other = session.request()
        with pytest.raises(ConfigError, match="2 requests, as many as it may have; release one"):
            session.request()
        del other
        assert torch.equal(loaded().model(ids, **{CACHE: session.request()}).logits, want)


def test_a_step_beyond_tail_capacity_is_refused_and_the_request_continues(store) -> None:
    with csattn_session(loaded(), artifact_of(store), tail_capacity=20) as session, torch.inference_mode():
        arguments = session.continue_with(token_ids(18))
        assert session.room_for(CONTEXT_LEN + 18, 60) == 3
        with pytest.raises(ContextError, match="21 tokens of its own, question and answer, and there is room for 20"):
            loaded().model(torch.zeros(1, 21, dtype=torch.long), **{CACHE: arguments[CACHE]})
        whole = loaded().model.generate(**arguments, max_new_tokens=3, do_sample=False)
    assert whole.shape[1] == CONTEXT_LEN + 21


def test_a_request_is_refused_after_a_failed_step(store, monkeypatch) -> None:
    with csattn_session(loaded(), artifact_of(store)) as session, torch.inference_mode():
        request = session.request()
        with pytest.raises(ContextError, match="vocabulary"):
            loaded().model(torch.full((1, 3), 999), **{CACHE: request})
        with pytest.raises(ConfigError, match="has failed before; ask again"):
            loaded().model(torch.zeros(1, 3, dtype=torch.long), **{CACHE: request})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"selector": "quest"}, "a GPU decodes with csattn or full"),
        ({"placement": "gpu"}, "unknown placement 'gpu'; choose one of cpu, device"),
        ({"host_budget_bytes": 1}, "a host budget is for decoding on the CPU"),
    ],
)
def test_options_unsupported_by_the_placement_are_refused(store, options, sentence) -> None:
    with (
        pytest.raises(ConfigError, match=sentence),
        csattn_session(loaded(), artifact_of(store), **{"placement": "device", **options}),
    ):
        pass


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"config": {"keep": 0.02}}, r"config is a csattn.config.SearchConfig, got \{'keep': 0.02\}"),
        ({"config": {}}, "config is a csattn.config.SearchConfig"),
        ({"kv_format": "q9"}, "'q9' is not a format of keys or values; choose from float32"),
        ({"kv_format": 8}, "a KV format is a name such as q8_0, or k=q8_0,v=q4_0, got 8"),
        ({"max_requests": 0}, "max_requests must be at least 1, got 0"),
        ({"max_requests": "2"}, "max_requests must be a whole number, got '2'"),
        ({"tail_capacity": 0}, "tail_capacity must be at least 1, got 0"),
        ({"tail_capacity": 8.5}, "tail_capacity must be a whole number, got 8.5"),
    ],
)
def test_invalid_session_options_are_refused_with_the_reason(store, options, sentence) -> None:
    with pytest.raises(ConfigError, match=sentence), csattn_session(loaded(), artifact_of(store), **options):
        pass


@pytest.mark.parametrize("question", [["a", "b"], None, b"who?", 7])
def test_a_question_that_is_not_text_is_refused(store, question) -> None:
    with (
        csattn_session(loaded(), artifact_of(store)) as session,
        pytest.raises(ConfigError, match="a question must be text"),
    ):
        session.ask(question)


def test_an_ended_session_refuses_new_requests(store) -> None:
    with csattn_session(loaded(), artifact_of(store)) as session:
        pass
    with pytest.raises(ConfigError, match="has ended; open another with `csattn_session`"), session:
        pass
    with csattn_session(loaded(), artifact_of(store)) as other:
        session.__exit__(None, None, None)  # ended a second time
        loaded().model(**other.ask("who?"))
    for ask in (lambda: session.ask("who?"), lambda: session.continue_with(token_ids(3)), session.request):
        with pytest.raises(ConfigError, match="ask again in an open session"):
            ask()


def test_another_models_artifact_is_refused(store) -> None:
    other = wrap_model(make_model(seed=9), byte_tokenizer(), "other")
    with pytest.raises(ArtifactMismatchError), csattn_session(other, artifact_of(store)):
        pass


def test_another_tokenizer_is_refused(store) -> None:
    other = wrap_model(loaded().model, byte_tokenizer(chat_template=None), "tiny-llama")
    with pytest.raises(ArtifactMismatchError, match="tokenizer"), csattn_session(other, artifact_of(store)):
        pass


def test_a_question_beyond_the_models_positions_is_refused(store) -> None:
    with csattn_session(loaded(), artifact_of(store)) as session, pytest.raises(ContextError, match="positions"):
        session.continue_with(token_ids(MAX_POSITIONS - CONTEXT_LEN))


def test_an_unknown_selector_is_refused(store) -> None:
    with (
        pytest.raises(ConfigError, match="unknown selector"),
        csattn_session(loaded(), artifact_of(store), selector="x"),
    ):
        pass


def test_the_model_is_restored_when_its_sessions_end(store) -> None:
    """Sessions may end in any order."""
    model, ids = loaded().model, torch.from_numpy(token_ids(5)).long()[None]
    before = inspect.signature(model.forward)
    want = model(ids).logits
    first, second = csattn_session(loaded(), artifact_of(store)), csattn_session(loaded(), artifact_of(store))
    one, two = first.__enter__(), second.__enter__()
    assert inspect.signature(model.forward) == before
    assert torch.equal(model(ids).logits, want)
    for session in (one, two):
        model(ids, **{CACHE: session.request()})
    first.__exit__(None, None, None)
    model(ids, **{CACHE: two.request()})
    second.__exit__(None, None, None)
    assert "forward" not in model.__dict__ and "generate" not in model.__dict__
    assert torch.equal(model(ids).logits, want)


def test_an_engine_is_freed_with_its_session_without_garbage_collection(store) -> None:
    """Otherwise a loop of sessions has the files of all of them open."""
    gc.collect()
    gc.disable()
    try:
        with csattn_session(loaded(), artifact_of(store)) as session:
            logits_of(session, token_ids(3), [3])
            engine = weakref.ref(session.engine)
        del session
        assert engine() is None
    finally:
        gc.enable()


def test_a_request_of_a_session_ended_on_another_thread_is_refused(store, monkeypatch) -> None:
    """A session may end between two checks that it is open."""
    with csattn_session(loaded(), artifact_of(store)) as session:
        request = session.request()
        monkeypatch.setattr(session, "_require_open", lambda: session.__exit__(None, None, None))
        assert session.room_for(CONTEXT_LEN, 9) == 9
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="this session has ended"):
        session.feed(request, [1], 0, CONTEXT_LEN)


def test_a_request_that_another_thread_decodes_meanwhile_is_refused(store, monkeypatch) -> None:
    """Each thread finds that its tokens follow, and would wait for the other: the question was decoded twice."""
    model, find = loaded().model, session_model._new_ids

    def find_while_another_decodes(*given):
        new = find(*given)
        monkeypatch.undo()
        model(**inputs)
        return new

    with csattn_session(loaded(), artifact_of(store)) as session:
        inputs = session.continue_with(token_ids(9))
        monkeypatch.setattr(session_model, "_new_ids", find_while_another_decodes)
        with pytest.raises(ConfigError, match="another thread has decoded this request meanwhile; make one for each"):
            model(**inputs)
        assert inputs[CACHE].get_seq_length() == CONTEXT_LEN + 9


def test_concurrently_opened_sessions_share_one_patched_method(monkeypatch) -> None:
    model = make_model("llama")
    monkeypatch.setattr("workers.session_model.update_wrapper", lambda *_: time.sleep(0.05))
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda name: Method.begin_session(model, name), ["forward", "forward"])
    assert first is second
    for method in (first, second):
        assert model.forward is method
        method.end_session()
    assert "forward" not in vars(model)


def test_an_ended_session_frees_its_context(store) -> None:
    """In a notebook, the names of a session and of its requests outlive the `with` block."""
    with csattn_session(loaded(), artifact_of(store), kv_format="fp8") as session:
        request = session.request()
        logits_of(session, token_ids(3), [3])
        context = weakref.ref(session.engine.context(0).store)
    gc.collect()
    assert context() is None
    assert request.index_bytes > 0
    with pytest.raises(ConfigError, match="has ended"):
        session.room_for(CONTEXT_LEN, 9)


def test_reprs_are_one_line(store) -> None:
    with csattn_session(loaded(), artifact_of(store)) as session:
        inputs = session.continue_with(token_ids(3))
        loaded().model(**inputs)
        assert (
            repr(session) == f"<Session of tiny-llama over {session.artifact.spec.artifact_id}, 1 of 16 requests, open>"
        )
        assert repr(inputs[CACHE]) == "<RequestCache of 403 tokens, 3 of its own>"
    assert repr(session).endswith(", closed>")
    assert repr(loaded()) == "<LoadedModel tiny-llama: float32, on cpu>"


def test_a_session_can_be_shared_by_threads(store) -> None:
    questions = [token_ids(9, seed=seed) for seed in range(4)]
    with csattn_session(loaded(), artifact_of(store), SearchConfig(keep=0.1, lookahead=1)) as session:
        want = [logits_of(session, question, [9]) for question in questions]
        with ThreadPoolExecutor(4) as pool:
            got = list(pool.map(lambda question: logits_of(session, question, [2] * 4 + [1]), questions))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_chat_question_continues_the_context_token_for_token(tmp_path: Path) -> None:
    from csattn.models.prompt import choose_wrapping, context_ids

    model, text = loaded(), "the tide is high at noon. " * 12
    wrapping = choose_wrapping(model.tokenizer)
    ids = context_ids(model.tokenizer, text, wrapping)
    report = build_artifact(model, ids, preset("default"), tmp_path, notes={"wrapping": wrapping})
    with open_artifact(report.path) as artifact, csattn_session(model, artifact) as session:
        inputs = session.ask("when?")["input_ids"][0].tolist()
    messages = [{"role": "system", "content": text.strip()}, {"role": "user", "content": "when?"}]
    want = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert inputs == model.tokenizer(want, add_special_tokens=False).input_ids
    assert inputs[: len(ids)] == np.asarray(ids).tolist()
