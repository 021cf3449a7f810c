"""Makes texts of an exact number of tokens, with any tokenizer."""

from collections.abc import Callable
from functools import partial

from bench.timing import gate

# the filler that hides a passkey (arXiv:2305.16300), also RULER's noise (arXiv:2404.06654)
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_LONGEST = 64  # most characters of padding for each missing token
_NEARBY = 100  # characters: a few words, each of which may be cut into tokens in its own way


def fit(make: Callable[[int, str], str], count: Callable[[str], int], length: int) -> str:
    """Return the text with as many units as fit into `length` tokens, padded to exactly `length`.

    make(num_units, padding): a text of that many units after the padding; more units must be more tokens.
    count: the number of tokens of a text. Raises GateError when even the text without units is too long, or when no
    padding gives the exact length.
    """
    shortest = count(make(0, ""))
    gate(shortest <= length, f"{length} tokens are too few, the task alone takes {shortest}; give a larger length")
    most = _last_that_fits(lambda num_units: count(make(num_units, "")) <= length, length)
    for num_units in (most, max(0, most - 1)):  # one unit less leaves more to pad, if no padding fits the small gap
        text = _pad(partial(make, num_units), count, length)
        if text is not None:
            return text
    gate(False, f"no padding makes the text {length} tokens long with this tokenizer; give another length")
    raise AssertionError


def _pad(make: Callable[[str], str], count: Callable[[str], int], length: int) -> str | None:
    """Return the text with the padding that makes it `length` tokens long; None if none does."""
    missing = length - count(make(""))

    def padded(num_chars: int) -> str:
        endless = (NOISE + " ") * (1 + num_chars // len(NOISE))
        return make(endless[len(endless) - num_chars :])

    # One more character may mean one token less, but this evens out over a few words.
    about = _last_that_fits(lambda num_chars: count(padded(num_chars)) <= length, _LONGEST * missing)
    for distance in range(_NEARBY):
        for num_chars in (about + distance, max(0, about - distance)):
            text = padded(num_chars)
            if count(text) == length:
                return text
    return None


def _last_that_fits(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest number up to `limit` that fits. 0 must fit, and fits must be monotonic."""
    few, many = 0, 1
    while many <= limit and fits(many):
        few, many = many, 2 * many
    many = min(many, limit + 1)
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if fits(middle) else (few, middle)
    return few
