"""Texts of exactly as many tokens as are wanted, whatever the tokenizer."""

from collections.abc import Callable
from functools import partial

from bench.timing import gate

# what was repeated to hide a passkey in (arXiv:2305.16300), and in RULER's noise (arXiv:2404.06654)
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_LONGEST = 64  # characters of a token
_NEARBY = 100  # characters: a few words, each of which may be cut into tokens in its own way


def fit(make: Callable[[int, str], str], count: Callable[[str], int], length: int) -> str:
    """The text of as many units as fit into `length` tokens, padded to exactly that.

    make: the text of so many units, after some padding; more units are more tokens. count: tokens of a text.
    Raises GateError when not even the text without units fits, or none has that length.
    """
    shortest = count(make(0, ""))
    gate(shortest <= length, f"{length} tokens are too few, the task alone takes {shortest}; give a larger length")
    most = _last_that_fits(lambda num_units: count(make(num_units, "")) <= length, length)
    for num_units in (most, max(0, most - 1)):  # with one unit less where too little is missing to be made up for
        text = _pad(partial(make, num_units), count, length)
        if text is not None:
            return text
    gate(False, f"no padding makes the text {length} tokens long with this tokenizer; give another length")
    raise AssertionError


def _pad(make: Callable[[str], str], count: Callable[[str], int], length: int) -> str | None:
    """The text with the padding that makes it `length` tokens long; None when there is none."""
    missing = length - count(make(""))

    def padded(num_chars: int) -> str:
        endless = (NOISE + " ") * (1 + num_chars // len(NOISE))
        return make(endless[len(endless) - num_chars :])

    # One character more may be a token less, but over a few words that evens out.
    about = _last_that_fits(lambda num_chars: count(padded(num_chars)) <= length, _LONGEST * missing)
    for distance in range(_NEARBY):
        for num_chars in (about + distance, max(0, about - distance)):
            text = padded(num_chars)
            if count(text) == length:
                return text
    return None


def _last_that_fits(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to the limit that fits, when 0 does and none does that follows one that does not."""
    few, many = 0, 1
    while many <= limit and fits(many):
        few, many = many, 2 * many
    many = min(many, limit + 1)
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if fits(middle) else (few, middle)
    return few
