"""Streamed text: its pieces make exactly the whole text, without any part of the stop string that ends it."""

from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from csattn.models.loader import wrap_model
from tests.tiny import byte_tokenizer, make_model
from tests.workers.serving.prompting import answers, ask
from workers.serving.messages import TokenScore
from workers.serving.request import Writer
from workers.serving.text import StopFinder, TextStream, decode, token_bytes

BYTES = byte_tokenizer()


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """Like SentencePiece models: words begin with a mark, unknown bytes are tokens, the first space is stripped."""
    words = ["\u2581a", "\u2581tide", "s", ",", "\u2581", "é", "<s>", "</s>"]
    vocab = {token: i for i, token in enumerate([f"<0x{byte:02X}>" for byte in range(256)] + words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


METASPACE = metaspace_tokenizer()


def streamed(tokenizer, token_ids) -> list[str]:
    stream = TextStream(tokenizer)
    return [stream.add(token_id) for token_id in token_ids] + [stream.finish()]


@pytest.mark.parametrize("tokenizer", [BYTES, METASPACE], ids=["bytes", "metaspace"])
def test_streamed_pieces_join_to_the_decoded_text(tokenizer, rng) -> None:
    for num_tokens in (0, 1, 31, 32, 33, 200):
        for _ in range(10):
            token_ids = rng.integers(0, len(tokenizer), num_tokens).tolist()
            assert "".join(streamed(tokenizer, token_ids)) == decode(tokenizer, token_ids)


@given(st.text(max_size=80))
def test_any_text_streams_unchanged_with_a_byte_tokenizer(text) -> None:
    token_ids = BYTES(text).input_ids
    assert "".join(streamed(BYTES, token_ids)) == text


@given(st.lists(st.integers(0, 263), max_size=100))
def test_any_tokens_stream_unchanged_with_a_metaspace_tokenizer(token_ids) -> None:
    assert "".join(streamed(METASPACE, token_ids)) == decode(METASPACE, token_ids)


def test_an_incomplete_character_is_not_completed_after_many_tokens() -> None:
    tokenizer = deepcopy(BYTES)
    tokenizer.backend_tokenizer.add_special_tokens(["<quiet>"])
    quiet = tokenizer.convert_tokens_to_ids("<quiet>")
    assert quiet not in tokenizer.all_special_ids
    four = BYTES("\U00010fff").input_ids[0]  # begins a character, as EURO's first byte does
    behind_some = [*BYTES("the tide").input_ids[:7], EURO[0], *BYTES(30 * "a").input_ids, *[quiet] * 30, *EURO[1:]]
    behind_many = [*[four] * 4, *[NO_CHARACTER] * 4, *[four] * 6, *[quiet] * 8, *BYTES("\U00010618").input_ids[1:]]
    for token_ids in (behind_some, behind_many):
        assert "".join(streamed(tokenizer, token_ids)) == decode(tokenizer, token_ids)
    assert TextStream(tokenizer).skips(quiet)


def test_a_space_after_many_special_tokens_is_not_lost() -> None:
    """A decoder that strips a text's first space must not be shown a text that begins there."""
    token_ids = [256, *[262] * 50, 257]
    assert "".join(streamed(METASPACE, token_ids)) == decode(METASPACE, token_ids) == "a tide"


@pytest.mark.parametrize("before", [[262, 256], [256, 259, 0xE2, 0x82], [256, 260, 263]], ids=str)
def test_the_first_space_is_not_stripped_from_a_text_that_goes_on(before) -> None:
    stream = TextStream(METASPACE, before)
    assert [stream.add(token_id) for token_id in (257, 258)] + [stream.finish()] == [" tide", "s", ""]
    assert TextStream(METASPACE, [262, 263]).add(257) == "tide", "nothing precedes it"


def test_a_completion_goes_on_with_the_space_after_its_prompt(tmp_path: Path) -> None:
    model = wrap_model(make_model(vocab_size=len(METASPACE)), METASPACE, "tiny-metaspace")
    asked = ask(prompt=(262, 256), new=2, logit_bias=((257, 100.0),))
    assert [text for text, _ in answers(tmp_path, asked, model=model)] == [" tide tide"]


def test_a_character_is_streamed_with_its_last_byte() -> None:
    assert streamed(BYTES, BYTES("aé\u20ac").input_ids) == ["a", "", "é", "", "", "\u20ac", ""]


EURO, NO_CHARACTER = BYTES("\u20ac").input_ids, BYTES.get_vocab()["ÿ"]  # three bytes; a byte that begins no character
REPEATED = {
    "words": (BYTES, BYTES("the tide is high at noon. ").input_ids),
    "line ends": (BYTES, BYTES("\n").input_ids),
    "three bytes each": (BYTES, BYTES("\u597d").input_ids),
    "wide spaces": (BYTES, BYTES("\u3000").input_ids),
    "no character": (BYTES, [NO_CHARACTER]),
    "a part of one": (BYTES, EURO[:1]),
    "ends": (METASPACE, [262, 263]),
}


@pytest.mark.parametrize(("tokenizer", "token_ids"), REPEATED.values(), ids=REPEATED)
def test_streaming_decodes_a_bounded_number_of_tokens_at_a_time(tokenizer, token_ids) -> None:
    seen = []

    class Counting:
        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def decode(self, token_ids, **options):
            seen.append(len(token_ids))
            return tokenizer.decode(token_ids, **options)

    many = (token_ids * 400)[:999]
    assert "".join(streamed(Counting(), many)) == decode(tokenizer, many)
    assert max(seen) <= 40


@given(st.lists(st.sampled_from([*BYTES(" \nA").input_ids, *EURO, NO_CHARACTER]), max_size=200))
def test_partial_characters_stream_unchanged_with_a_byte_tokenizer(token_ids) -> None:
    assert "".join(streamed(BYTES, token_ids)) == decode(BYTES, token_ids)


@given(st.lists(st.sampled_from([0x0A, 0xE2, 0x82, 0xAC, 0xFF, *range(256, 264)]), max_size=200))
def test_partial_characters_stream_unchanged_with_a_metaspace_tokenizer(token_ids) -> None:
    assert "".join(streamed(METASPACE, token_ids)) == decode(METASPACE, token_ids)


def stopped_by_definition(text: str, stops: list[str]) -> str:
    """Read until a stop string is complete; cut off the longest one that ends there."""
    for end in range(len(text) + 1):
        if whole := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, whole))]
    return text


def found(pieces: list[str], stops: list[str]) -> list[str]:
    """Return the text that is passed on after each piece, and at the end."""
    finder, told = StopFinder(stops), []
    for piece in pieces:
        told.append(finder.add(piece))
        if finder.found:
            return told
    return [*told, finder.finish()]


@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
)
def test_stop_strings_end_the_text_across_any_token_boundaries(pieces, stops) -> None:
    text, told = "".join(pieces), found(pieces, stops)
    assert "".join(told) == stopped_by_definition(text, stops)
    seen = ""
    for at, piece in enumerate(pieces[: len(told) - 1]):
        seen += piece
        starts = [stop[:n] for stop in stops for n in range(1, len(stop)) if seen.endswith(stop[:n])]
        if stopped_by_definition(seen, stops) == seen and not any(stop in seen for stop in stops):
            assert len(seen) - len("".join(told[: at + 1])) == max(map(len, starts), default=0)


def test_only_a_possible_start_of_a_stop_string_is_held_back() -> None:
    assert found(["one ", "STO", "NE ", "STOP", "never"], ["STOP"]) == ["one ", "", "STONE ", ""]
    assert found(["a S", "T"], ["STOP"]) == ["a ", "", "ST"]
    assert found(["abc"], ["abcd", "bc"]) == ["a"]


def written(text: str, stop: str) -> tuple[list[tuple[str, str]], bool]:
    """Return text and scored tokens of each piece, one byte a token, and whether the stop string came."""
    writer, pieces = Writer(BYTES, (stop,)), []
    for token_id in BYTES(text).input_ids:
        pieces.append(writer.add(token_id, TokenScore(token_id, "", 0.0)))
        if writer.has_stopped:
            break
    pieces.append(writer.finish())
    told = [(p.text, "".join(BYTES.decode([score.token_id]) for score in p.scores)) for p in pieces if p]
    return told, writer.has_stopped


def test_scores_come_with_their_text_and_never_for_a_stop_string() -> None:
    assert written("one STONE", "STOP") == ([(c, c) for c in "one "] + [("STON", "STON"), ("E", "E")], False)
    assert written("one STOP two", "STOP") == ([(c, c) for c in "one "], True)
    assert written("a ST", "STOP") == ([("a", "a"), (" ", " "), ("ST", "ST")], False)


def test_scores_mark_tokens_without_visible_text() -> None:
    for shown in ({}, {262: "<s>"}):
        writer = Writer(METASPACE, shown=shown)
        pieces = [writer.add(token_id, TokenScore(token_id, "", 0.0)) for token_id in (256, 262, 257)]
        told = [score.is_visible for piece in (*pieces, writer.finish()) if piece for score in piece.scores]
        assert told == [True, bool(shown), True]


def test_a_hostile_stop_string_costs_no_more_than_its_length() -> None:
    stop = "a" * 20_000 + "b"
    told = found(["a" * 50] * 1000, [stop])
    assert len("".join(told)) == 50_000
    assert told[0] == ""


def test_token_bytes_returns_each_tokens_bytes() -> None:
    for token_id in range(256):
        assert token_bytes(METASPACE, token_id) == bytes([token_id])
    assert token_bytes(METASPACE, 257) == b" tide"
    assert token_bytes(METASPACE, 262) == b"<s>"
    assert token_bytes(METASPACE, 9999) == b""
    data = "é tide\n\x00\u20ac".encode()
    assert b"".join(token_bytes(BYTES, token_id) for token_id in BYTES(data.decode()).input_ids) == data
    assert np.unique([token_bytes(BYTES, token_id) for token_id in range(256)]).size == 256
