"""Cases of `python -m bench.accuracy selectors`, all counted alike: as over KV of 16 bits, which codes are beside."""

from pathlib import Path

from bench.records import Case, load_cases

# Raise it when the same measurement means something else than before: older figures are then not taken for it.
VERSION = 3
_OF = ("model", "text_sha256", "context_len", "eval_len", "contender", "keep")
# Version 2 counted, whether it was used or not, what predicts queries a layer ahead, and what attention to the rest
# reads among what a search does. It measured SmolLM2-135M: 30 layers, 9 query heads on 3 KV heads of 64 dimensions.
_LISTS = 30 * 3
_PQCACHE_CODES = 2  # bytes a key
_PREDICTOR_BYTES = 29 * 9 * (64 + 1) * 64 * 4  # none after the last layer


def selector_cases(path: Path) -> list[Case]:
    """The newest of each kind, in version 3's terms; what can no longer be told in them is left out.

    They were measured over KV in float32, whose keys some methods search, and rows of which all fetch.
    """
    newest: dict[tuple[object, ...], Case] = {}
    for case in sorted(load_cases(path), key=lambda case: int(case.get("version", 0))):
        if (counted := _counted(case)) is not None:
            newest[tuple(case.get(name) for name in _OF)] = _in_16_bits(counted)
    return list(newest.values())


def _counted(case: Case) -> Case | None:
    """A case of version 2: figures that have been added up are taken apart again."""
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
    """Half of the bytes of rows, of keys that are searched, and of what is made of keys as wide as they are."""
    index, search = case["index_bytes_per_key"], case["search_bytes_per_step"]
    name = case["contender"].partition("+")[0]
    if name in ("exact", "sparq", "quest"):
        index, search = index / 2, search / 2
    elif name == "pqcache":  # two codes a key, which stay, and centroids; a search reads both
        halved = (index + _PQCACHE_CODES) / 2
        index, search = halved, search * halved / index
    return {
        **case,
        "moved_bytes_per_step": case["moved_bytes_per_step"] / 2,
        "index_bytes_per_key": index,
        "search_bytes_per_step": search,
    }
