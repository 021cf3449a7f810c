"""The texts on which predictions are measured, one of each kind."""

import _pydecimal
import argparse
import hashlib
import pydoc_data.topics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.accuracy import odd
from bench.timing import gate

_HERE = Path(__file__).parent.parent / "texts"


@dataclass(frozen=True, slots=True)
class Text:
    """A text in a file, or made by a function; `bench/texts/README.md` has the sources."""

    kind: str
    path: Path
    make: Callable[[], str] | None = None

    def content(self) -> str:
        return self.path.read_bytes().decode() if self.make is None else self.make()


def _topics() -> str:
    return "\n\n".join(pydoc_data.topics.topics.values())


TEXTS = {
    "novel": Text("a novel, in English", _HERE / "novel.txt"),
    "speech": Text("a speech, in English", _HERE / "speech.txt"),
    "code": Text("Python, from the standard library", Path(argparse.__file__)),
    "dialogue": Text("speakers in turn, in English verse", _HERE / "dialogue.txt"),
    "spanish": Text("a narrative, in Spanish", _HERE / "spanish.txt"),
    # tens of thousands of tokens each
    "decimal": Text("Python, one long module of the standard library", Path(_pydecimal.__file__)),
    "manual": Text("a technical manual, Python's language reference", Path(pydoc_data.topics.__file__), _topics),
} | {
    name: Text("no prose: see `bench.accuracy.odd`", Path(odd.__file__), partial(odd.odd_text, name))
    for name in odd.ODD
}


@dataclass(frozen=True, slots=True)
class Cut:
    """A text in two parts: the context that is prefilled, and the tokens that are then predicted."""

    sha256: str  # of the text
    context: NDArray[np.int32]  # [context_len] token ids
    following: NDArray[np.int32]  # [eval_len + 1]: each predicts the next; the last one is only a target


def named_texts(names: str) -> list[str]:
    """Split names separated by commas; `odd` stands for all texts of `bench.accuracy.odd`."""
    return [name for given in names.split(",") for name in (odd.ODD if given == "odd" else [given])]


def find_text(name: str) -> Text:
    """Return a text of `TEXTS` by its name, or any file by its path."""
    if name not in TEXTS:
        gate(Path(name).is_file(), f"{name!r} is neither a text ({', '.join(TEXTS)}) nor a file")
        return Text("a file", Path(name))
    return TEXTS[name]


def cut_text(text: Text, tokenizer: Any, context_len: int, eval_len: int) -> Cut:
    """Return the first context_len + eval_len + 1 tokens of a text. Raises GateError if it has fewer."""
    ids = tokenize(text, tokenizer)
    needed = context_len + eval_len + 1
    gate(
        len(ids) >= needed,
        f"{text.path} has {len(ids)} tokens, context and evaluation need {needed}; give a longer text, or a smaller "
        "--context-len or --eval-len",
    )
    return Cut(sha256_of(text), ids[:context_len], ids[context_len:needed])


def tokenize(text: Text, tokenizer: Any) -> NDArray[np.int32]:
    return np.asarray(tokenizer(text.content()).input_ids, dtype=np.int32)


def sha256_of(text: Text) -> str:
    return hashlib.sha256(text.content().encode()).hexdigest()
