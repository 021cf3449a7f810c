"""What clients are told of files: their names in the store. Where it lies is its operator's business."""

import re
from pathlib import Path


def by_names_in_store(why: str, store: Path) -> str:
    """The store's path is taken out where it is a whole one, as it was given or in full."""
    given, *full = (str(place).rstrip("/") for place in (store, store.absolute(), store.resolve()))
    below = "|".join(re.escape(place) for place in (given, *full) if place)
    alone = "|".join(re.escape(place) for place in (given, *full) if "/" in place)  # else it is a word as any other
    why = re.sub(rf"(?<![\w./~-])(?:{below})/", "", why) if below else why
    return re.sub(rf"(?<![\w./~-])(?:{alone})(?![\w/~+-]|\.\w)", "the store", why) if alone else why
