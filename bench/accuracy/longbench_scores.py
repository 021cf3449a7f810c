"""LongBench's scores (arXiv:2308.14508, table 1) of one prediction against one right answer, all from 0 to 1, and
LongBench v2's (arXiv:2412.15204), which is 1 if the right one of four choices is named.

They are those of its evaluation program, including its normalisation and the behaviour of its libraries (`rouge` 1.0.1
works on sets of words; `fuzzywuzzy` 0.18 rounds to whole percents), so that figures can be compared with published
ones.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from bench.timing import gate

# Chinese punctuation: full-width forms of ASCII's, and marks of its own
_CHINESE_MARKS = {chr(ord(mark) + 0xFEE0) for mark in string.punctuation if mark != "."}
_CHINESE_MARKS |= set("｡。｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏")
_MARKS = set(string.punctuation) | _CHINESE_MARKS
V2 = "longbench-v2"  # the data set's name
LETTERS = "ABCD"  # its choices

# prediction, right answer, all classes of the data set -> score
Score = Callable[[str, str, Sequence[str]], float]


@dataclass(frozen=True, slots=True)
class DataSet:
    """How predictions for one data set are made and scored."""

    score: Score
    max_new_tokens: int
    few_shot: bool = False  # the prompt has examples: no chat template, and only an answer's first line counts
    is_code: bool = False  # also without a chat template


def score_answer(data_set: DataSet, prediction: str, answers: Sequence[str], all_classes: Sequence[str]) -> float:
    """Return the best score against any of the right answers."""
    if data_set.few_shot:
        prediction = prediction.lstrip("\n").split("\n")[0]
    return max(data_set.score(prediction, answer, all_classes) for answer in answers)


def qa_f1(prediction: str, answer: str, all_classes: Sequence[str] = ()) -> float:
    """F1 of the words, without case, punctuation and articles."""
    return _f1(_normalised(prediction).split(), _normalised(answer).split())


def qa_f1_zh(prediction: str, answer: str, all_classes: Sequence[str] = ()) -> float:
    """F1 of the Chinese words, without punctuation."""
    return _f1(_chinese_words(prediction), _chinese_words(answer))


def rouge_l(prediction: str, answer: str, all_classes: Sequence[str] = ()) -> float:
    """ROUGE-L's F1 over whole summaries, of the words in longest common subsequences of any two sentences."""
    said, wanted = _sentences(prediction), _sentences(answer)
    if not said or not wanted:
        return 0.0
    common = {word for right in wanted for own in said for word in _common_words(right, own)}
    precision = len(common) / len({word for sentence in said for word in sentence})
    recall = len(common) / len({word for sentence in wanted for word in sentence})
    return 2 * precision * recall / (precision + recall + 1e-8)


def rouge_l_zh(prediction: str, answer: str, all_classes: Sequence[str] = ()) -> float:
    return rouge_l(" ".join(_cut(prediction)), " ".join(_cut(answer)))


def classification(prediction: str, answer: str, all_classes: Sequence[str]) -> float:
    """Return 1 / (number of classes that the prediction names) if the right one is among them, else 0.

    Classes whose names are part of the right one's name are not counted.
    """
    named = [name for name in all_classes if name in prediction]
    named = [name for name in named if name == answer or name not in answer]
    return 1.0 / len(named) if answer in named else 0.0


def retrieval(prediction: str, answer: str, all_classes: Sequence[str] = ()) -> float:
    """Share of the numbers in the prediction that are the right paragraph's number."""
    return _share_of_numbers(prediction, _paragraph(answer, r"Paragraph (\d+)"))


def retrieval_zh(prediction: str, answer: str, all_classes: Sequence[str] = ()) -> float:
    return _share_of_numbers(prediction, _paragraph(answer, r"段落(\d+)"))


def count(prediction: str, answer: str, all_classes: Sequence[str] = ()) -> float:
    """Share of the numbers in the prediction that are the right one."""
    return _share_of_numbers(prediction, answer)


def edit_similarity(prediction: str, answer: str, all_classes: Sequence[str] = ()) -> float:
    """Similarity of the first line without comment signs or backquotes to the right one, in whole percents, 0 to 1."""
    lines = prediction.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * SequenceMatcher(None, code, answer).ratio()) / 100


def choice(prediction: str, answer: str, all_classes: Sequence[str] = ()) -> float:
    """Return 1 if the prediction says, as its prompt asks, that the right letter is correct; one in () counts first."""
    plain = prediction.replace("*", "")
    said = re.search(rf"The correct answer is \(([{LETTERS}])\)", plain)
    said = said or re.search(rf"The correct answer is ([{LETTERS}])", plain)
    return float(said is not None and said[1] == answer)


DATA_SETS: dict[str, DataSet] = {
    "narrativeqa": DataSet(qa_f1, 128),
    "qasper": DataSet(qa_f1, 128),
    "multifieldqa_en": DataSet(qa_f1, 64),
    "multifieldqa_zh": DataSet(qa_f1_zh, 64),
    "hotpotqa": DataSet(qa_f1, 32),
    "2wikimqa": DataSet(qa_f1, 32),
    "musique": DataSet(qa_f1, 32),
    "dureader": DataSet(rouge_l_zh, 128),
    "gov_report": DataSet(rouge_l, 512),
    "qmsum": DataSet(rouge_l, 512),
    "multi_news": DataSet(rouge_l, 512),
    "vcsum": DataSet(rouge_l_zh, 512),
    "trec": DataSet(classification, 64, few_shot=True),
    "triviaqa": DataSet(qa_f1, 32, few_shot=True),
    "samsum": DataSet(rouge_l, 128, few_shot=True),
    "lsht": DataSet(classification, 64, few_shot=True),
    "passage_count": DataSet(count, 32),
    "passage_retrieval_en": DataSet(retrieval, 32),
    "passage_retrieval_zh": DataSet(retrieval_zh, 32),
    "lcc": DataSet(edit_similarity, 64, is_code=True),
    "repobench-p": DataSet(edit_similarity, 64, is_code=True),
    V2: DataSet(choice, 128),
}


def _f1(said: Sequence[str], wanted: Sequence[str]) -> float:
    common = (Counter(said) & Counter(wanted)).total()
    return 2 * common / (len(said) + len(wanted)) if common else 0.0


def _normalised(text: str) -> str:
    plain = "".join(char for char in text.lower() if char not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def _chinese_words(text: str) -> list[str]:
    words = ("".join(c for c in word.lower() if c not in _MARKS and not c.isspace()) for word in _cut(text))
    return [word for word in words if word]


def _cut(text: str) -> list[str]:
    """Split Chinese text into words."""
    try:
        import jieba  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        gate(False, "scores of Chinese answers need jieba, which is not installed; run `pip install jieba`")
    return list(jieba.cut(text, cut_all=False))


def _sentences(text: str) -> list[list[str]]:
    """Split a text at full stops, and each sentence into words; a blank sentence has one empty word."""
    return [" ".join(sentence.split()).split(" ") for sentence in text.split(".") if sentence]


def _common_words(a: Sequence[str], b: Sequence[str]) -> list[str]:
    """Return the words of a longest common subsequence, last word first; of several, the one that is first in b."""
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, word in enumerate(a, start=1):
        for j, other in enumerate(b, start=1):
            longer = max(table[i - 1][j], table[i][j - 1])
            table[i][j] = table[i - 1][j - 1] + 1 if word == other else longer
    i, j, found = len(a), len(b), []
    while i and j:
        if a[i - 1] == b[j - 1]:
            found.append(a[i - 1])
            i, j = i - 1, j - 1
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found


def _share_of_numbers(prediction: str, number: str) -> float:
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(number) / len(numbers) if numbers else 0.0


def _paragraph(answer: str, pattern: str) -> str:
    found = re.search(pattern, answer)
    gate(found is not None, f"the right answer of a retrieval question should name a paragraph, got {answer!r}")
    assert found is not None
    return found[1]
