"""What ends an answer and what must not: the model's end token, stop tokens, stop strings, a grammar."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chat_models import chat_model
from tests.tiny import byte_tokenizer
from tests.workers.serving.artifacts import build, text_of
from tests.workers.serving.requests import alone, make_request, make_scheduler, read, run
from tests.workers.serving.test_tools import saying
from workers.serving.contexts import name_artifact
from workers.serving.messages import Done, Piece, Usage
from workers.serving.request import Writer
from workers.serving.sampling import allowed_without

TWO = chat_model("hermes").tokenizer("2").input_ids[0]


def ended(store: Path, stop_ids: set[int], **sampling: Any) -> tuple[list[int], str, Done]:
    scheduler, _, _ = make_scheduler(store)
    scheduler._stop_ids = stop_ids
    request = make_request(scheduler, **sampling)
    run(scheduler)
    text, last = read(request)
    assert isinstance(last, Done) and last.new_tokens == len(request.token_ids)
    return request.token_ids, text, last


def test_ignore_eos_generates_past_the_end_token(built: Path) -> None:
    ids, text = alone(built, {"max_new_tokens": 20})
    got, told, last = ended(built, {ids[6]}, max_new_tokens=20, ignore_eos=True)
    assert (got, told, last.reason) == (ids, text, "length")


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_stop_token_ends_the_answer_before_it(built: Path, ignore_eos: bool) -> None:
    ids, text = alone(built, {"max_new_tokens": 20})
    first = ids.index(ids[6])
    got, told, last = ended(built, {ids[6]}, max_new_tokens=20, ignore_eos=ignore_eos, stop_token_ids=(ids[6], 9999))
    assert got == ids[: first + 1] and text.startswith(told.rstrip("\ufffd"))
    assert last.reason == "stop" and len(told.encode()) < len(text.encode())


@pytest.mark.parametrize("stops", ["model", "client"])
@pytest.mark.parametrize("min_tokens", [0, 1, 7, 19, 20, 1000])
def test_no_end_or_stop_token_comes_before_min_tokens(built: Path, min_tokens: int, stops: str) -> None:
    ids = alone(built, {"max_new_tokens": 20})[0]
    common = {max(set(ids), key=ids.count)}
    more = {"stop_token_ids": tuple(common)} if stops == "client" else {}
    got, _, last = ended(built, common if stops == "model" else set(), max_new_tokens=20, min_tokens=min_tokens, **more)
    assert not common & set(got[:min_tokens])
    assert len(got) > min(min_tokens, 19) and (last.reason == "stop") == (got[-1] in common)


def test_stop_strings_are_searched_only_after_min_tokens() -> None:
    """A token is a byte here."""
    tokenizer = byte_tokenizer()
    for min_tokens, told in (
        (0, "one "),
        (4, "one "),
        (5, "one two "),
        (8, "one two "),
        (9, "one two two"),
        (99, "one two two"),
    ):
        writer, said = Writer(tokenizer, ("two",), min_tokens=min_tokens), ""
        for token_id in tokenizer("one two two").input_ids:
            piece = None if writer.has_stopped else writer.add(token_id, None)
            said += piece.text if piece else ""
        piece = writer.finish()
        assert (said + (piece.text if piece else ""), writer.has_stopped) == (told, min_tokens < 9), min_tokens


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("ends")
    name_artifact(store, "hermes", build(store, text_of("heron"), model=chat_model("hermes")), "float32")
    return store


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "1"),
        ({"min_tokens": 1}, "1"),
        ({"min_tokens": 2}, "12"),
        ({"min_tokens": 100}, "12"),  # nothing but the end may follow
        ({"ignore_eos": True}, "12"),
        ({"ignore_eos": True, "stop_token_ids": (TWO,)}, "1"),
        ({"min_tokens": 5, "stop_token_ids": (TWO,)}, "1"),  # nothing but the stop token may follow
    ],
)
def test_an_answer_ends_where_its_grammar_allows_only_the_end(store: Path, more: dict[str, Any], said: str) -> None:
    pieces, done = saying(store, "hermes", "1", schema={"enum": [1, 12]}, **more)
    assert ("".join(piece.text for piece in pieces), done.reason) == (said, "stop")


def test_pieces_report_usage_only_if_requested(store: Path) -> None:
    pieces, done = saying(store, "hermes", "No.", reports_usage=True)
    assert [piece.usage and piece.usage.new_tokens for piece in pieces] == [1, 2, 3]
    used = pieces[0].usage
    assert isinstance(used, Usage) and (used.context_tokens, used.question_tokens) == (
        done.context_tokens, done.question_tokens,
    )  # fmt: skip
    pieces, _ = saying(store, "hermes", "No.")
    assert pieces == [Piece("N"), Piece("o"), Piece(".")]


@given(st.sets(st.integers(0, 9)), st.lists(st.booleans(), min_size=7, max_size=7))
def test_allowed_without_removes_tokens_unless_none_would_remain(token_ids: set[int], mask: list[bool]) -> None:
    """The mask is unchanged if nothing would be left of it."""
    before = set(np.flatnonzero(mask).tolist())
    after = set(np.flatnonzero(allowed_without(np.array(mask), token_ids)).tolist())
    assert after == (before - token_ids or before)
