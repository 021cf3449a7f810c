"""Request bodies that are too deep, too wide or not JSON are refused before their objects are built."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.api.body import outline, parse
from workers.serving.messages import BadRequestError
from workers.settings import LimitSettings

LIMITS = LimitSettings(max_json_depth=5, max_json_values=100)


def depth_of(value: Any) -> int:
    """Return the nesting depth, by its definition."""
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


def num_values_of(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + sum(map(num_values_of, value)) if isinstance(value, list) else 1


tricky = st.text(alphabet='\\"{}[],:a\u00e9\n', max_size=8)
values = st.recursive(
    st.none() | st.integers() | tricky,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(tricky, inner, max_size=4),
    max_leaves=20,
)


@given(values, st.booleans(), st.sampled_from([1, 2, 7, 1000]))
def test_outline_equals_the_parsed_values_depth_and_bounds_its_size(value: Any, ascii_only: bool, stretch: int) -> None:
    depth, at_most = outline(json.dumps(value, ensure_ascii=ascii_only).encode(), stretch)
    assert depth == depth_of(value)
    assert num_values_of(value) <= at_most <= 2 * num_values_of(value)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON: expecting property name"),
        (b"nul", "not JSON"),
        (b'{"a": 1} x', "not JSON: extra data"),
        (b'{"a": "\x01"}', "not JSON: invalid control character"),
        (b"\xff\xfe{}", "not UTF-8: byte 0"),
        ("{}".encode("utf-16"), "not UTF-8"),
        (b'{"a": NaN}', "holds NaN"),
        (b'{"a": -Infinity}', "holds -Infinity"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too long"),
        (b"[" * 6 + b"]" * 6, "nests 6 levels deep, wanted at most 5"),
        (b"[" * 1_000_000, "nests 1000000 levels"),
        (b'{"a":' * 1000, "nests 1000 levels"),
        (b"[" + b"0," * 99 + b"0]", "holds 101 values, wanted at most 100"),
    ],
)  # fmt: skip
def test_malformed_bodies_are_refused_with_a_short_reason(body: bytes, words: str) -> None:
    with pytest.raises(BadRequestError, match=words) as refused:
        parse(body, LIMITS)
    assert len(refused.value.message) < 200


def test_brackets_within_strings_do_not_count_as_nesting() -> None:
    for body in (b"[[[[[]]]]]", b'{"a": "[[[[[[[["}', rb'{"a": "\"[[[[[[[[", "b": "\\"}', b'  {"a": 1.5e3}'):
        assert parse(body, LIMITS) == json.loads(body)


def test_as_many_values_as_the_limit_are_read() -> None:
    assert parse(b"[" + b"0," * 98 + b"0]", LIMITS) == [0] * 99


def test_a_byte_order_mark_before_a_body_is_skipped() -> None:
    assert parse(b'\xef\xbb\xbf{"a": "\xef\xbb\xbf"}', LIMITS) == {"a": "\ufeff"}
