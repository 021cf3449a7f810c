"""RULER's tasks: contexts have exactly the given length, depend on the seed alone, and hide answers at their depths."""

import re
from random import Random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bench.accuracy.fitting import fit
from bench.accuracy.ruler import NOISE, NUM_COMMON, NUM_HOPS, TASKS, novel_sentences, string_match, vocabulary
from bench.timing import GateError

DEPTHS = [0.0, 0.25, 1.0]


def byte_count(text: str) -> int:
    return len(text.encode())


@pytest.fixture(scope="module")
def merging() -> Tokenizer:
    """A tokenizer whose tokens are parts of words, as in real models."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([" ".join(novel_sentences(40)), NOISE], trainer)
    return tokenizer


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [1501, 2048])
def test_texts_have_exactly_the_requested_number_of_tokens(task, length, merging):
    def count(text: str) -> int:
        return len(merging.encode(text).ids)

    for haystack in TASKS[task].make(Random(7), DEPTHS, length):
        assert byte_count(fit(haystack.text, byte_count, 3 * length)) == 3 * length
        assert count(fit(haystack.text, count, length)) == length


@pytest.mark.parametrize("length", range(2040, 2065))  # a range longer than a unit of text
def test_every_length_can_be_reached_with_padding(length):
    """Words are tokens here, and any padding adds at least two tokens, though only one may be missing."""

    def count(text: str) -> int:
        return len(re.findall(r"\s*\n\s*|\S+", text))

    (haystack,) = TASKS["passkey"].make(Random(7), [0.5], length)
    assert count(fit(haystack.text, count, length)) == length


def test_a_task_depends_on_its_seed_only():
    for task in TASKS.values():
        made = [task.make(Random(seed), DEPTHS, 4096) for seed in ("a", "a", "b")]
        texts = [[haystack.text(30, "") for haystack in haystacks] for haystacks in made]
        assert texts[0] == texts[1] != texts[2]
        assert [h.questions for h in made[0]] == [h.questions for h in made[1]]


def test_answers_are_placed_at_their_depths():
    single = [(h, h.questions) for h in TASKS["passkey"].make(Random(1), DEPTHS, 4096)]
    several = [(h, h.questions) for h in TASKS["multikey"].make(Random(1), DEPTHS, 4096)]
    assert [len(questions) for _, questions in single + several] == [1, 1, 1, len(DEPTHS)]
    for haystack, questions in single + several:
        lines = haystack.text(100, "").splitlines()[2:]
        for question in questions:
            places = [i for i, line in enumerate(lines) if question.answers[0] in line]
            assert len(places) == 1 and places[0] / len(lines) == pytest.approx(question.depth, abs=0.03)
            name = question.text.split(" for ")[1].split(" in ")[0]
            assert f"for {name} is: {question.answers[0]}." in lines[places[0]]


def test_chains_are_complete_and_in_order():
    (haystack,) = TASKS["tracking"].make(Random(3), [], 4096)
    (question,) = haystack.questions
    text = haystack.text(50, "").split("\n\n", 1)[1]  # after the example
    assert len(question.answers) == NUM_HOPS + 1 == len(set(question.answers))
    value = question.text.split("value ")[1].split()[0]
    links = [line for line in text.splitlines() if line.startswith("VAR")]
    assert links[0] == f"VAR {question.answers[0]} = {value}."
    assert links[1:] == [
        f"VAR {question.answers[i + 1]} = VAR {question.answers[i]}." for i in range(len(question.answers) - 1)
    ]


@pytest.mark.parametrize(("length", "often", "seldom"), [(2048, 6, 1), (4096, 30, 3)])
def test_common_words_are_the_most_common(length, often, seldom):
    (haystack,) = TASKS["common_words"].make(Random(3), [], length)
    (question,) = haystack.questions
    listed = haystack.text(40, "").splitlines()[-1].split()
    assert listed[::2] == [f"{i}." for i in range(1, len(listed) // 2 + 1)]
    words = listed[1::2]
    counts = {word: words.count(word) for word in words}
    assert sorted(word for word in counts if counts[word] == often) == sorted(question.answers)
    assert len(question.answers) == NUM_COMMON and set(counts.values()) == {often, seldom}
    assert len(counts) == 40 + NUM_COMMON


def test_more_words_than_the_vocabulary_stay_distinct():
    (haystack,) = TASKS["common_words"].make(Random(3), [], 2048)
    num_words = 2 * len(vocabulary())
    words = haystack.text(num_words, "").splitlines()[-1].split()[1::2]
    assert len(set(words)) == num_words + NUM_COMMON


def test_unreachable_lengths_are_refused():
    (haystack,) = TASKS["multikey"].make(Random(1), [0.5], 64)
    with pytest.raises(GateError, match="64 tokens are too few, the task alone takes"):
        fit(haystack.text, byte_count, 64)
    with pytest.raises(GateError, match="no padding makes the text 501 tokens long"):
        fit(lambda units, padding: "x" * 10 * units + padding, lambda text: 2 * len(text), 501)


def test_the_score_is_the_share_of_answers_in_the_output():
    assert string_match("They are: abc, DEF.", ["ABC", "def", "ghi", "j"]) == 0.5
    assert string_match("1234567", ["1234567"]) == 1.0
    assert string_match("", ["1"]) == 0.0
