"""The page table: pages are shared by prefix, copied when a shared one is written, and never lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.pages import fuzz
from offload.errors import OutOfPagesError, UnknownSequenceError
from offload.pages import PageTable, Write


def table_with(num_rows: int, num_pages: int = 8, page_size: int = 4) -> tuple[PageTable, int]:
    table = PageTable(num_pages, page_size)
    sequence = table.new_sequence()
    table.append(sequence, num_rows)
    return table, sequence


@pytest.mark.parametrize("num_rows", [0, 1, 3, 4, 5, 8, 31, 32])
def test_pages_are_taken_as_rows_come(num_rows: int) -> None:
    table, sequence = table_with(num_rows)
    assert len(table.pages(sequence)) == -(-num_rows // 4)
    assert table.num_free == 8 - -(-num_rows // 4)
    table.check()


@given(st.lists(st.integers(0, 9), max_size=6))
def test_rows_in_any_portions_take_the_same_pages(portions: list[int]) -> None:
    table, one = PageTable(40, 4), PageTable(40, 4)
    sequence, whole = table.new_sequence(), one.new_sequence()
    filled = [w for portion in portions for w in table.append(sequence, portion)]
    one.append(whole, sum(portions))
    assert table.pages(sequence) == one.pages(whole)
    rows = [(w.page, w.first_row + i) for w in filled for i in range(w.num_rows)]
    pages = table.pages(sequence)
    assert rows == [(pages[row // 4], row % 4) for row in range(sum(portions))]
    table.check()


def test_a_fork_takes_no_page() -> None:
    table, first = table_with(6)
    second = table.fork(first)
    assert table.pages(second) == table.pages(first)
    assert table.num_free == 6
    table.check()


def test_writing_a_shared_partial_page_copies_it_for_the_writer_alone() -> None:
    table, first = table_with(6)
    second = table.fork(first)
    shared = table.pages(first)[1]
    writes = table.append(second, 1)
    assert writes == [Write(table.pages(second)[1], first_row=2, num_rows=1, copied_from=shared)]
    assert table.pages(first)[1] == shared != table.pages(second)[1]
    assert table.pages(first)[0] == table.pages(second)[0]
    assert table.append(first, 1)[0].copied_from is None  # nobody shares it any more
    table.check()


def test_a_shared_full_page_is_never_copied() -> None:
    table, first = table_with(8)
    second = table.fork(first)
    assert all(write.copied_from is None for write in [*table.append(first, 2), *table.append(second, 2)])
    assert table.pages(first)[:2] == table.pages(second)[:2]
    assert table.pages(first)[2] != table.pages(second)[2]
    table.check()


@pytest.mark.parametrize("num_rows", [0, 1, 3, 4, 5, 8, 10])
def test_a_prefix_of_any_length_can_be_shared(num_rows: int) -> None:
    table, first = table_with(10)
    prefix = table.fork(first, num_rows)
    table.check()
    assert table.num_rows(prefix) == num_rows
    assert table.pages(prefix) == table.pages(first)[: -(-num_rows // 4)]
    table.append(prefix, 3)
    table.check()
    assert table.num_rows(first) == 10


def test_a_prefix_outlives_the_sequence_it_came_from_and_may_then_be_written_in_place() -> None:
    table, first = table_with(7)
    prefix = table.fork(first, 2)
    assert table.free(first) == [1]
    assert table.append(prefix, 1) == [Write(0, first_row=2, num_rows=1)]
    assert sorted(table.free(prefix)) == [0]
    table.check()
    assert table.num_free == 8


def test_too_many_rows_change_nothing() -> None:
    table, first = table_with(30)
    second = table.fork(first)
    for sequence, num_rows in ((first, 99), (second, 3)):
        before = table.pages(sequence), table.num_rows(sequence), table.num_free
        with pytest.raises(OutOfPagesError, match=r"pages of 4 rows and 0 of 8 are free"):
            table.append(sequence, num_rows)
        assert (table.pages(sequence), table.num_rows(sequence), table.num_free) == before
        table.check()


def test_a_sequence_that_is_not_there_is_a_sentence() -> None:
    table, sequence = table_with(3)
    table.free(sequence)
    for call in (table.free, table.pages, table.num_rows, table.fork):
        with pytest.raises(UnknownSequenceError, match="there is no sequence 1"):
            call(sequence)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda table: table._references.__setitem__(0, 2),
        lambda table: table._free.append(0),
        lambda table: table._free.pop(),
        lambda table: table._before.__setitem__(1, 1),
        lambda table: setattr(table._sequences[1], "num_rows", 99),
        lambda table: table._sequences.clear(),
    ],
)
def test_check_finds_what_is_wrong(spoil) -> None:
    table, _ = table_with(6)
    table.check()
    spoil(table)
    with pytest.raises(AssertionError):
        table.check()


def test_the_table_says_what_is_used() -> None:
    assert repr(table_with(6)[0]) == "<PageTable 2/8 pages used, 1 sequences>"


@pytest.mark.parametrize("seed", [0, 1])
def test_random_operations_lose_nothing(seed: int, tmp_path) -> None:
    """100 000 of them: `python -m bench.pages`."""
    result = fuzz(1500, seed, tmp_path)
    assert min(result["done"].values()) > 5
    assert set(result["done"]) == {"append", "begin", "demote", "fork", "free", "pin", "promote", "refused", "unpin"}
    assert not list(tmp_path.iterdir())
