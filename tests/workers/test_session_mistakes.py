"""Invalid inputs to a session are refused with the reason, before anything is computed."""

import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from csattn.artifact import Artifact, open_artifact
from csattn.config import SearchConfig, preset
from csattn.errors import ConfigError, ContextError, CsattnError
from csattn.models.attending_cache import CACHE
from index_build.pipeline import build_artifact, build_context
from offload.errors import TierError
from tests.tiny import loaded, token_ids
from workers.engine.cpu.engine import CpuEngine
from workers.engine.opening import open_engine
from workers.session import Session, csattn_session

CONTEXT_LEN = 400
USE = Path(__file__).parents[2] / "docs" / "use.md"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> Iterator[Artifact]:
    path = build_artifact(loaded(), token_ids(CONTEXT_LEN), preset("default"), tmp_path_factory.mktemp("store")).path
    with open_artifact(path) as opened:
        yield opened


@pytest.fixture(scope="module")
def session(artifact) -> Iterator[Session]:
    with csattn_session(loaded(), artifact) as opened:
        yield opened


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        (np.array([1.9, 2.7], np.float32), r"whole numbers in one row, .* got float32 of shape \(2,\)"),
        (np.array([np.nan]), "got float64"),
        (np.array([True, False]), "got bool"),
        (np.array([[1, 2]]), r"got int64 of shape \(1, 2\)"),
        (torch.tensor([[1, 2]]), r"got int64 of shape \(1, 2\)"),
        (np.int64(3), r"of shape \(\)"),
        (None, r"got object of shape \(\)"),
        ("abc", r"got <U3 of shape \(\)"),
        ([[1], [2, 3]], "whole numbers in one row: "),
        ([1, None], "got object"),
        ([], "give at least one token"),
        (np.zeros(0, np.int32), "give at least one token"),
    ],
)
def test_invalid_token_ids_are_refused_with_the_reason(session, ids, sentence) -> None:
    with pytest.raises(ConfigError, match=sentence):
        session.continue_with(ids)


@pytest.mark.parametrize("far", [-1, 256, 1 << 31, 1 << 63])
def test_token_ids_outside_the_vocabulary_are_refused(session, far) -> None:
    with pytest.raises(ContextError, match=f"token id {far} is not in the model's vocabulary of 256"):
        session.continue_with(np.array([far], np.uint64 if far > 0 else np.int64))


@pytest.mark.parametrize("kind", [list, np.uint8, np.int64, np.uint64, torch.tensor])
def test_token_ids_may_be_a_list_array_or_tensor(session, kind) -> None:
    ids = [3, 1, 4]
    given = np.array(ids, kind) if isinstance(kind, type) and issubclass(kind, np.integer) else kind(ids)
    got = session.continue_with(given)["input_ids"]
    assert got.dtype == torch.long and got[0].tolist() == [*token_ids(CONTEXT_LEN).tolist(), *ids]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (lambda: loaded().model, "what `load_model` returned, got a LlamaForCausalLM; give that"),
        (lambda: "smollm2", "what `load_model` returned, got a str"),
        (lambda: None, "what `load_model` returned, got a NoneType"),
    ],
)
def test_a_model_that_is_not_a_loaded_model_is_refused(artifact, given, sentence) -> None:
    with pytest.raises(ConfigError, match=sentence), csattn_session(given(), artifact):
        pass


@pytest.mark.parametrize("given", [None, 5, b"/tmp"])
def test_an_argument_that_is_no_artifact_or_path_is_refused(given) -> None:
    with pytest.raises(ConfigError, match=f"or its directory or URL as text, got {given!r}"):
        csattn_session(loaded(), given).__enter__()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kv_codec": "q8_0"}, "no option kv_codec .*: did you mean kv_format"),
        ({"keep": 0.1}, r"no option keep .*: it belongs in config=SearchConfig\(keep=...\)"),
        ({"window_len": 64}, r"SearchConfig\(window_len=...\)"),
        ({"host_budget": 1 << 20}, "did you mean host_budget_bytes"),
        ({"threads": 2}, "did you mean num_threads"),
        ({"num_slots": 2}, "did you mean max_requests"),
        (
            {"wrong": 1},
            "leave it out; the options are host_budget_bytes, kv_format, max_requests, num_devices, num_threads, "
            "placement",
        ),
        ({"slot_share": 0.1}, "it is for a placement on a GPU, one of device, hybrid, host; leave it out"),
        ({"slot_shares": 0.1, "placement": "hybrid"}, "did you mean slot_share"),
        ({"module": "x", "placement": "hybrid"}, "no option module"),
        ({"module_": "x", "placement": "hybrid", "num_devices": 2}, "slot_share, tail_capacity$"),
        ({"devices": 2}, "did you mean num_devices"),
        ({"devices": 2, "placement": "hybrid"}, "did you mean num_devices"),
        ({"num_threads": "2"}, "num_threads must be a whole number, got '2'"),
        ({"num_threads": 1.5}, "num_threads must be a whole number, got 1.5"),
        ({"num_threads": -1}, "num_threads must be at least 1, got -1"),
        ({"num_threads": 0}, "num_threads must be at least 1, got 0"),
        ({"num_threads": 10**6}, "num_threads must be at most 4096, got 1000000; one for each CPU is enough"),
        ({"num_devices": "2"}, "num_devices must be a whole number, got '2'"),
        (
            {"host_budget_bytes": "much"},
            "host_budget_bytes: 'much' is not a size; give a number of bytes, or one with a unit",
        ),
        ({"host_budget_bytes": 1.5}, "host_budget_bytes must be a whole number, got 1.5"),
    ],
)
def test_unknown_or_invalid_options_are_refused_with_a_hint(artifact, options, sentence) -> None:
    with pytest.raises(ConfigError, match=sentence), csattn_session(loaded(), artifact, **options):
        pass


def test_memory_errors_are_csattn_errors(artifact) -> None:
    """An `except CsattnError` around a session also catches errors of `offload`."""
    with (
        pytest.raises(CsattnError, match="budget") as refused,
        csattn_session(loaded(), artifact, SearchConfig(keep=0.1), host_budget_bytes="1KiB"),
    ):
        pass
    assert isinstance(refused.value, TierError)


def test_a_host_budget_may_be_given_with_a_unit(artifact) -> None:
    with csattn_session(loaded(), artifact, SearchConfig(keep=0.1), host_budget_bytes="4MiB") as session:
        assert session.engine._host_budget.num_bytes == 4 << 20


@pytest.mark.parametrize(
    ("question", "sentence"),
    [
        ("", "a question holds no text; give one that is not empty"),
        (" \n", "a question holds no text"),
        ("a\ud800", r"a question is not UTF-8 text \(character 1\): it has half a surrogate pair"),
        (["who?"], "a question must be text, got a value of type list; give a str"),
    ],
)
def test_a_question_without_text_is_refused(session, question, sentence) -> None:
    with pytest.raises(ConfigError, match=sentence):
        session.ask(question)


@pytest.mark.parametrize(
    ("prompt_len", "max_new_tokens", "sentence"),
    [
        (None, 5, "prompt_len, the context included, must be a whole number, got None"),
        (-5, 10, "the context included, must be at least 400, got -5"),
        (CONTEXT_LEN - 1, 10, "must be at least 400, got 399"),
        (CONTEXT_LEN + 9, 2.5, "max_new_tokens must be a whole number, got 2.5"),
        (CONTEXT_LEN + 9, -1, "max_new_tokens must be at least 0, got -1"),
    ],
)
def test_room_for_refuses_invalid_lengths(session, prompt_len, max_new_tokens, sentence) -> None:
    with pytest.raises(ConfigError, match=sentence):
        session.room_for(prompt_len, max_new_tokens)


@pytest.mark.parametrize("name", ["max_new_tokens", "max_length"])
def test_generate_refuses_a_length_that_is_not_a_whole_number(session, name) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a whole number, got '5'"):
        loaded().model.generate(**session.continue_with(token_ids(9)), **{name: "5"})


def test_a_max_length_below_the_prompts_is_refused_by_transformers(session) -> None:
    with pytest.raises(ValueError, match="max_length"):
        loaded().model.generate(**session.continue_with(token_ids(9)), max_length=20)


@pytest.mark.parametrize("name", ["paged", "static"])
def test_cache_implementation_with_a_request_is_refused(session, name, monkeypatch) -> None:
    """With `paged`, transformers would ignore the request."""
    model = loaded().model
    said = {"cache_implementation": name}
    for options in (said, {"generation_config": GenerationConfig(**said)}):
        with pytest.raises(ConfigError, match="cache_implementation asks for another; leave it out"):
            model.generate(**session.continue_with(token_ids(9)), **options)
    monkeypatch.setattr(model.generation_config, "cache_implementation", name)
    with pytest.raises(ConfigError, match="cache_implementation asks for another; leave it out"):
        model.generate(**session.continue_with(token_ids(9)))
    monkeypatch.setattr(model.generation_config, "cache_implementation", "hybrid")  # transformers ignores this default
    model.generate(**session.continue_with(token_ids(9)), max_new_tokens=1)


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ("reset", "cannot go back to fewer tokens; ask again"),
        ("reorder_cache", "is one sequence, without beams and batches"),
        ("batch_repeat_interleave", "is one sequence"),
        ("batch_select_indices", "is one sequence"),
    ],
)
def test_cache_methods_unsupported_by_requests_are_refused(session, method, sentence) -> None:
    given = [] if method == "reset" else [torch.tensor([0])]
    with pytest.raises(ConfigError, match=sentence):
        getattr(session.request(), method)(*given)


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        (None, "got a value of type NoneType"),
        ([[1, 2]], "got a value of type list; give what `session.ask` returns"),
        (torch.tensor([1, 2, 3]), r"\[1, num_tokens\], got torch.int64 of shape \(3,\)"),
        (torch.tensor([[1.5, 2.0]]), r"got torch.float32 of shape \(1, 2\)"),
    ],
)
def test_input_ids_that_are_not_one_sequence_are_refused(session, ids, sentence) -> None:
    request = session.request()
    for call in (loaded().model, loaded().model.generate)[: 1 if ids is None else 2]:
        with pytest.raises(ConfigError, match=sentence):
            call(ids, **{CACHE: request})


@pytest.mark.parametrize("mask", [torch.zeros(1, 1, 409, 409, dtype=torch.bool), {"full_attention": None}])
def test_a_mask_that_is_not_over_tokens_is_refused(session, mask) -> None:
    inputs = {**session.continue_with(token_ids(9)), "attention_mask": mask}
    with pytest.raises(ConfigError, match="attends to all of its tokens; leave out padding and its mask"):
        loaded().model(**inputs)


def test_the_mask_that_generate_makes_for_pad_tokens_is_refused(session) -> None:
    inputs = session.continue_with(token_ids(9))
    del inputs["attention_mask"]
    pad = int(inputs["input_ids"][0, 3])
    with pytest.raises(ConfigError, match=r"or give the attention_mask of `session.ask` \(without one, `generate`"):
        loaded().model.generate(**inputs, pad_token_id=pad, max_new_tokens=1)


def test_a_request_that_is_not_unpacked_is_refused(session) -> None:
    for call in (loaded().model, loaded().model.generate):
        with pytest.raises(ConfigError, match=r"given as one of them; write `\*\*request`"):
            call(session.continue_with(token_ids(9)))


@pytest.mark.parametrize("shape", [(1, 5), (3, CONTEXT_LEN + 9), (1, 900)])
def test_a_mask_of_the_wrong_shape_is_refused(session, shape) -> None:
    inputs = {**session.continue_with(token_ids(9)), "attention_mask": torch.ones(shape)}
    sentence = f"mask of shape {shape} does not belong to 409 token ids of one sequence; leave it out, or give ones of"
    for call in (loaded().model, loaded().model.generate):
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            call(**inputs)


@pytest.mark.parametrize(
    ("positions", "got"),
    [([[*range(CONTEXT_LEN + 9)]], "a value of type list"), (torch.arange(409.0)[None], r"torch.float32 of shape")],
)
def test_position_ids_that_are_not_whole_numbers_are_refused(session, positions, got) -> None:
    with pytest.raises(ConfigError, match=f"must be a tensor of whole numbers .*, got {got}.*; leave them out"):
        loaded().model(**session.continue_with(token_ids(9)), position_ids=positions)


@pytest.mark.parametrize(
    ("keep", "got"),
    [
        (None, "None"),
        ([1], r"\[1\]"),
        (-9, "-9"),
        (torch.tensor([0, 9]), r"\[0, 9\]"),
        (torch.tensor([0.5]), r"\[0.5\]"),
        (torch.tensor(3), "3"),
    ],
)
def test_invalid_logits_to_keep_is_refused_before_decoding(session, keep, got) -> None:
    inputs = session.continue_with(token_ids(9))
    with pytest.raises(ConfigError, match=f"logits_to_keep must be .* below 9 in one row, got {got}; leave it out"):
        loaded().model(**inputs, logits_to_keep=keep)
    assert inputs[CACHE].get_seq_length() == CONTEXT_LEN


@pytest.mark.parametrize(
    "positions",
    [
        [[*range(CONTEXT_LEN), *range(9)]],  # two sequences in one row
        [[*range(CONTEXT_LEN), *range(CONTEXT_LEN + 50, CONTEXT_LEN + 59)]],
        [[*range(CONTEXT_LEN)]],
        [[*range(CONTEXT_LEN + 9)], [*range(1, CONTEXT_LEN + 10)]],
        [[]],
    ],
)
def test_position_ids_that_are_not_consecutive_are_refused(session, positions) -> None:
    with pytest.raises(ConfigError, match="not those of 409 tokens in one sequence, one after another; leave them out"):
        loaded().model(**session.continue_with(token_ids(9)), position_ids=torch.tensor(positions, dtype=torch.long))


def test_an_artifacts_place_may_be_a_path_or_text(artifact) -> None:
    for place in (Path(artifact.path), str(artifact.path)):
        with csattn_session(loaded(), place) as session:
            assert session.artifact.spec == artifact.spec


def test_the_documented_options_exist() -> None:
    table = USE.read_text().split("## The options that matter\n")[1].split("\n## ")[0]
    named = re.findall(r"^\|[^|]*\| `(?:(\w+)\()?(\w+)=\)?`", table, re.MULTILINE)
    takes = {"SearchConfig": [SearchConfig], "build_context": [build_context], "": [open_engine, CpuEngine]}
    assert len(named) == len(re.findall(r"^\| ", table, re.MULTILINE)) - 1
    for owner, name in named:
        assert any(name in inspect.signature(one).parameters for one in takes[owner]), name


@pytest.mark.parametrize("use", ["ask", "generate", "end"])
def test_a_session_that_is_used_within_its_own_step_is_refused(artifact, use) -> None:
    """An observer would wait for the step that waits for it."""

    def observe(seen: object) -> None:
        uses[use]()

    with csattn_session(loaded(), artifact) as session:
        uses = {
            "ask": lambda: session.ask("who?"),
            "generate": lambda: loaded().model.generate(**other, max_new_tokens=1),
            "end": lambda: session.__exit__(None, None, None),
        }
        other = session.continue_with([1])
        with pytest.raises(ConfigError, match="used from within one of its steps, by an observer or a selector"):
            loaded().model(**session.continue_with([1], observe))
        loaded().model.generate(**other, max_new_tokens=1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_session_is_refused_in_a_forked_process_which_may_open_another(session, artifact) -> None:
    """The threads that make segments of own rows are missing there: a long question would wait for them for ever."""
    request, generate = session.continue_with([1]), loaded().model.generate
    child = os.fork()
    if child == 0:
        exit_code = 1
        try:
            for refused in (lambda: session.continue_with([1]), lambda: generate(**request, max_new_tokens=2)):
                with pytest.raises(ConfigError, match="open another session in this process"):
                    refused()
            with csattn_session(loaded(), artifact) as own:
                generate(**own.continue_with([1]), max_new_tokens=2)
            exit_code = 0
        finally:
            os._exit(exit_code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    generate(**request, max_new_tokens=2)
