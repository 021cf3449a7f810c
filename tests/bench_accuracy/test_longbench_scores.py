"""LongBench's scores on cases worked out by hand, and on some scored by the libraries that LongBench uses."""

import sys
from types import ModuleType

import pytest

from bench.accuracy.longbench_scores import (
    DATA_SETS,
    choice,
    classification,
    count,
    edit_similarity,
    qa_f1,
    qa_f1_zh,
    retrieval,
    retrieval_zh,
    rouge_l,
    rouge_l_zh,
    score_answer,
)
from bench.timing import GateError


@pytest.mark.parametrize(
    ("said", "right", "f1"),
    [
        ("The cat.", "a CAT", 1.0),  # case, articles and punctuation do not count
        ("black cat", "cat", 2 / 3),  # precision 1/2, recall 1
        ("cat cat", "cat", 2 / 3),  # a word counts as often as both texts have it
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("the", "the", 0.0),  # only articles: nothing is left to compare
        ("it's", "its", 1.0),
        ("theatre", "atre", 0.0),  # articles are whole words
    ],
)
def test_qa_f1_agrees_with_calculations_by_hand(said, right, f1):
    assert qa_f1(said, right) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("said", "right", "score"),
    [
        ("the cat sat", "the cat sat", 1.0),
        ("a b c d", "a c", 2 * (2 / 4) * 1 / (2 / 4 + 1)),
        ("b a", "a b", 0.5),  # order counts: one word of two
        ("a b. c d", "a b c d", 1.0),  # both sentences are matched against the right answer
        ("a a a b", "a b", 1.0),  # a word counts once
        ("", "a", 0.0),
        ("...", "a", 0.0),
        ("a", "", 0.0),
        ("x y", "a b", 0.0),
        ("a. ", "a", 2 * 0.5 / 1.5),  # the blank after the full stop is a sentence of one empty word
    ],
)
def test_rouge_l_agrees_with_calculations_by_hand(said, right, score):
    assert rouge_l(said, right) == pytest.approx(score, abs=1e-7)


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ("The correct answer is (B).", 1.0),
        ("The correct answer is B", 1.0),
        ("**The correct answer is (B)**, because (A) is not.", 1.0),
        ("The correct answer is A, no: The correct answer is (B).", 1.0),  # a letter in () counts first
        ("The correct answer is (A). The correct answer is (B).", 0.0),  # of these, the first
        ("The correct answer is Beta.", 1.0),  # LongBench v2's own program takes its first letter, too
        ("the correct answer is (B)", 0.0),
        ("(B)", 0.0),
        ("The correct answer is (E)", 0.0),
        ("", 0.0),
    ],
)
def test_choice_reads_the_letter_of_the_answer(said, score):
    assert choice(said, "B") == score


def test_rouge_l_unites_subsequences_of_two_sentences():
    # "a b x" has a b, and "a c y d e" has a c d e, of a b c d e: together five of seven words said, and all five wanted
    precision, recall = 5 / 7, 1.0
    want = 2 * precision * recall / (precision + recall)
    assert rouge_l("a b x. a c y d e", "a b c d e") == pytest.approx(want, abs=1e-7)


@pytest.mark.parametrize(
    ("said", "right", "rouge", "ratio"),
    [
        ("cat dog . , far on ran cat sat far a far", "far away sat far", 0.363636, 50),
        (". on the away today on mat far the ,", "on ran a today .", 0.363636, 46),
        (". away ran , cat", "mat dog mat the . cat the , , cat dog a", 0.4, 36),
        ("a , the on ran the , the . away the . the away , ran ,", "a", 0.285714, 4),
        ("far sat a , , . today far dog , mat . ,", "a ran dog sat sat on a", 0.5, 36),
        ("far away on the away . a far ran on .", "on a ran today far far on sat on", 0.5, 46),
    ],
)
def test_scores_equal_those_of_the_libraries(said, right, rouge, ratio):
    """The expected scores are from rouge 1.0.1, and fuzzywuzzy 0.18.0 without python-Levenshtein."""
    assert rouge_l(said, right) == pytest.approx(rouge, abs=1e-6)
    assert edit_similarity(said, right) == ratio / 100


@pytest.mark.parametrize(
    ("said", "score"),
    [("Food", 1.0), ("It is Food or Date", 0.5), ("Date", 0.0), ("food", 0.0), ("Food and drink, or Food", 0.5)],
)
def test_classification_divides_the_score_among_named_classes(said, score):
    assert classification(said, "Food", ["Food", "Date", "Food and drink"]) == score


def test_a_class_within_the_right_ones_name_does_not_count():
    classes = ["Food", "Food and drink", "Date"]
    assert classification("Food and drink", "Food and drink", classes) == 1.0
    assert classification("Food", "Food and drink", classes) == 0.0


def test_retrieval_and_count_score_the_share_of_right_numbers():
    assert retrieval("Paragraph 3", "Paragraph 3") == 1.0
    assert retrieval("Paragraph 3 or 4, or 3", "Paragraph 3") == pytest.approx(2 / 3)
    assert retrieval("Paragraph 13", "Paragraph 3") == 0.0
    assert retrieval("none", "Paragraph 3") == 0.0
    assert retrieval_zh("段落7", "段落7") == 1.0
    assert count("There are 12.", "12") == 1.0
    assert count("12 of 30", "12") == 0.5
    with pytest.raises(GateError, match="should name a paragraph"):
        retrieval("3", "3")


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ("return x", 1.0),
        ("\n\nreturn x\nand more", 1.0),
        ("# a comment\n```python\n// also\nreturn x", 1.0),  # the first line that is code
        ("return y", 0.88),  # 14 of 16 characters, in whole percents
        ("", 0.0),
        ("# nothing else", 0.0),
    ],
)
def test_edit_similarity_compares_the_first_line_of_code(said, score):
    assert edit_similarity(said, "return x") == score


def test_chinese_texts_are_split_into_words_by_jieba(monkeypatch):
    jieba = ModuleType("jieba")
    jieba.cut = lambda text, cut_all: iter(text.split()) if not cut_all else pytest.fail("of each stretch one word")
    monkeypatch.setitem(sys.modules, "jieba", jieba)
    assert qa_f1_zh("北京 。", "北京") == 1.0
    assert qa_f1_zh("ABC 《 北京 》 ， 上海", "abc 上海") == 4 / 6  # LongBench removes 》 and ， but keeps 《
    assert rouge_l_zh("今天 很 好", "今天 好") == pytest.approx(0.8, abs=1e-7)
    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(GateError, match="pip install jieba"):
        qa_f1_zh("北京", "北京")


def test_the_best_answer_counts_and_some_data_sets_score_the_first_line_only():
    assert score_answer(DATA_SETS["hotpotqa"], "yes\nno", ["yes"], []) == pytest.approx(2 / 3)
    assert score_answer(DATA_SETS["triviaqa"], "\nyes\nno", ["yes"], []) == 1.0
    assert score_answer(DATA_SETS["hotpotqa"], "blue", ["red", "blue"], []) == 1.0


def test_all_21_data_sets_and_the_second_version_are_known():
    assert len(DATA_SETS) == 21 + 1
    assert all(0 < data_set.max_new_tokens <= 512 for data_set in DATA_SETS.values())
