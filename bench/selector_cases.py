"""Cases of `python -m bench.accuracy selectors`, with all bytes counted in the same way: as over 16-bit KV."""

from pathlib import Path

from bench.records import Case, load_cases

# Raise it whenever the meaning of a measured figure changes, so that older figures are not mistaken for new ones.
VERSION = 3
_OF = ("model", "text_sha256", "context_len", "eval_len", "contender", "keep")
# Version 2 counted the predictor of queries a layer ahead as index, whether it was used or not, and the bytes that
# attention to the rest reads as the search's. It measured SmolLM2-135M: 30 layers, 9 query heads and 3 KV heads of 64
# dimensions.
_LISTS = 30 * 3
_PQCACHE_CODES = 2  # bytes a key
_PREDICTOR_BYTES = 29 * 9 * (64 + 1) * 64 * 4  # none after the last layer


def selector_cases(path: Path) -> list[Case]:
    """Return the newest case for each key, converted to version 3; cases that cannot be converted are left out.

    Bytes were measured over float32 KV, whose keys some methods search and whose rows all methods fetch, and are
    converted to 16 bits.
    """
    newest: dict[tuple[object, ...], Case] = {}
    for case in sorted(load_cases(path), key=lambda case: int(case.get("version", 0))):
        if (counted := _counted(case)) is not None:
            newest[tuple(case.get(name) for name in _OF)] = _in_16_bits(counted)
    return list(newest.values())


def _counted(case: Case) -> Case | None:
    """Return the case with version 3's figures, separating those that version 2 had added up; None if impossible."""
    if case.get("version") == VERSION:
        return case
    if case.get("version") != 2 or "+" in case["contender"]:
        return None
    index, rest = case["index_bytes_per_key"], 0.0
    if case["contender"] in ("default", "lists", "paper"):
        index -= _PREDICTOR_BYTES / _LISTS / case["context_len"]
    if case["contender"] == "default":  # a token reads all of the sketch for the rest
        rest = index * _LISTS * case["context_len"]
    search = case["search_bytes_per_step"] - rest
    return {**case, "index_bytes_per_key": index, "search_bytes_per_step": search, "rest_bytes_per_step": rest}


def _in_16_bits(case: Case) -> Case:
    """Halve the bytes of rows, of keys that are searched, and of index data as wide as keys."""
    index, search = case["index_bytes_per_key"], case["search_bytes_per_step"]
    name = case["contender"].partition("+")[0]
    if name in ("exact", "sparq", "quest"):
        index, search = index / 2, search / 2
    elif name == "pqcache":  # two byte codes a key, not halved, and centroids; a search reads both
        halved = (index + _PQCACHE_CODES) / 2
        index, search = halved, search * halved / index
    return {
        **case,
        "moved_bytes_per_step": case["moved_bytes_per_step"] / 2,
        "index_bytes_per_key": index,
        "search_bytes_per_step": search,
    }
