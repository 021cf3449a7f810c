"""Tasks of finding things in long contexts, in the forms of RULER (arXiv:2404.06654); the texts are our own.

Passkey: one magic number in noise. Multikey: several numbers in a novel, under different names, and a question for
each. Tracking: a chain of variables, hidden in noise, that all have one value. Common words: the words that a list has
most often.
"""

import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from random import Random

from bench.accuracy.fitting import NOISE
from bench.accuracy.texts import TEXTS

NUM_HOPS = 4  # assignments from one variable to the next in a chain
NUM_COMMON = 10  # number of the words that are listed most often
_SHORT = 4096  # tokens; in shorter contexts, each word is listed fewer times


@dataclass(frozen=True, slots=True)
class Question:
    """One question about a context; `answers` are strings that the answer should contain."""

    text: str
    answer_start: str  # the given beginning of the model's answer
    answers: tuple[str, ...]
    depth: float | None  # the answer's place in the context, from 0 to 1; None: it has no single place


@dataclass(frozen=True, slots=True)
class Haystack:
    """A context of any length, and the questions about it."""

    text: Callable[[int, str], str]  # number of units, padding before them -> text: see `fit`
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class Task:
    make: Callable[[Random, Sequence[float], int], list[Haystack]]  # rng, depths, length in tokens -> haystacks
    max_new_tokens: int


def passkey(rng: Random, depths: Sequence[float], length: int) -> list[Haystack]:
    """Return one haystack for each depth, with a number there."""
    return [_numbers(rng, [depth], noise) for depth in depths]


def multikey(rng: Random, depths: Sequence[float], length: int) -> list[Haystack]:
    """Return one haystack with a number at each depth, and a question for each."""
    return [_numbers(rng, depths, novel_sentences)]


def tracking(rng: Random, depths: Sequence[float], length: int) -> list[Haystack]:
    """Return one haystack with a chain of variables, after an example."""
    example, example_question = _chain(rng, 3)
    chain, question = _chain(rng, 5)
    solved = f"{example(4)}\n{example_question.text}\n{example_question.answer_start}"
    solved += f" {' '.join(example_question.answers)}"

    def text(num_units: int, padding: str) -> str:
        head = "Track the variables whose values are assigned somewhere in the text."
        return f"{head}\n{solved}\n\n{head}\n{padding}\n{chain(num_units)}"

    return [Haystack(text, (question,))]


def common_words(rng: Random, depths: Sequence[float], length: int) -> list[Haystack]:
    """Return one haystack with a numbered list of words, after an example."""
    often, seldom = (6, 1) if length < _SHORT else (30, 3)
    words = rng.sample(vocabulary(), len(vocabulary()))
    example, common, rest = words[:20], words[20 : 20 + NUM_COMMON], words[20 + NUM_COMMON :]
    seed = rng.random()
    question = "Which 10 words are most common in the list above?"
    start = "The 10 words that are listed most often are:"
    solved = _listed(example[:NUM_COMMON], 3, example[NUM_COMMON:], 1, seed)
    solved += f"\n{question}\n{start} {_numbered(example[:NUM_COMMON])}"

    def text(num_units: int, padding: str) -> str:
        head = "This is a numbered list of words, some of which are more common than others."
        listed = _listed(common, often, [_uncommon(rest, i) for i in range(num_units)], seldom, seed)
        return f"{head}\n{solved}\n\n{padding}\n{head}\n{listed}"

    return [Haystack(text, (Question(question, start, tuple(common), None),))]


TASKS = {
    "passkey": Task(passkey, 24),
    "multikey": Task(multikey, 24),
    "tracking": Task(tracking, 40),
    "common_words": Task(common_words, 100),
}


def string_match(prediction: str, answers: Sequence[str]) -> float:
    """Return RULER's score: the share of the answers that the prediction contains, ignoring case."""
    return sum(answer.lower() in prediction.lower() for answer in answers) / len(answers)


def noise(num_units: int) -> list[str]:
    return [NOISE] * num_units


def novel_sentences(num_units: int) -> list[str]:
    """Return the first num_units sentences of the novel, repeating it after its end."""
    sentences = _novel_sentences()
    return [sentences[i % len(sentences)] for i in range(num_units)]


@cache
def _novel_sentences() -> list[str]:
    return re.split(r"(?<=[.!?;])\s+", TEXTS["novel"].path.read_text(encoding="utf-8").strip())


@cache
def vocabulary() -> list[str]:
    """Return the novel's words of four to eight lower-case letters, in alphabetical order."""
    return sorted(set(re.findall(r"\b[a-z]{4,8}\b", TEXTS["novel"].path.read_text(encoding="utf-8"))))


def _numbers(rng: Random, depths: Sequence[float], haystack: Callable[[int], list[str]]) -> Haystack:
    """Return a haystack with a number at each depth, and a question for each."""
    names = ["-".join(rng.sample(vocabulary(), 2)) for _ in depths]
    numbers = [str(number) for number in rng.sample(range(10**6, 10**7), len(depths))]
    needles = [
        f"One of the special magic numbers for {name} is: {number}."
        for name, number in zip(names, numbers, strict=True)
    ]

    def text(num_units: int, padding: str) -> str:
        lines = haystack(num_units)
        for depth, needle in sorted(zip(depths, needles, strict=True), reverse=True):
            lines.insert(round(depth * num_units), needle)
        head = "Special magic numbers are hidden in this text. Remember them: you will be asked about one."
        return f"{head}\n{padding}\n" + "\n".join(lines)

    return Haystack(
        text,
        tuple(
            Question(
                f"What is the special magic number for {name} in the text above?",
                f"The special magic number for {name} in the text above is",
                (number,),
                depth,
            )
            for name, number, depth in zip(names, numbers, depths, strict=True)
        ),
    )


def _chain(rng: Random, name_len: int) -> tuple[Callable[[int], str], Question]:
    """Return a function from units of noise to text with a chain of variables, and the question for all of them."""
    names: list[str] = []
    while len(names) < NUM_HOPS + 1:
        name = "".join(rng.choices(string.ascii_uppercase, k=name_len))
        names += [] if name in names else [name]
    value = str(rng.randrange(10_000, 100_000))
    links = [f"VAR {names[0]} = {value}."]
    links += [f"VAR {after} = VAR {before}." for before, after in pairwise(names)]
    places = sorted(rng.random() for _ in links)

    def text(num_units: int) -> str:
        lines = noise(num_units)
        for place, link in reversed(list(zip(places, links, strict=True))):
            lines.insert(int(place * (num_units + 1)), link)
        return "\n".join(lines)

    question = f"Which variables have the value {value} in the text above?"
    start = f"By the assignments in the text above, {len(names)} variables have the value {value}. They are:"
    return text, Question(question, start, tuple(names), None)


def _uncommon(words: Sequence[str], number: int) -> str:
    """Return a distinct word for each number; when the words run out, two are joined into one."""
    rounds, place = divmod(number, len(words))
    return words[place] if not rounds else words[place] + words[(place + rounds) % len(words)]


def _listed(common: Sequence[str], often: int, uncommon: Sequence[str], seldom: int, seed: float) -> str:
    words = [*common] * often + [*uncommon] * seldom
    Random(seed).shuffle(words)
    return _numbered(words)


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, start=1))
