"""Names of files in messages to clients: relative to the store, whose path only its operator should see."""

import re
from pathlib import Path


def by_names_in_store(why: str, store: Path) -> str:
    """Remove the store's path from a message, as it was given, absolute or resolved, where it is a whole path."""
    given, *full = (str(place).rstrip("/") for place in (store, store.absolute(), store.resolve()))
    below = "|".join(re.escape(place) for place in (given, *full) if place)
    alone = "|".join(re.escape(place) for place in (given, *full) if "/" in place)  # without "/", it may be any word
    why = re.sub(rf"(?<![\w./~-])(?:{below})/", "", why) if below else why
    return re.sub(rf"(?:the store )?(?<![\w./~-])(?:{alone})(?![\w/~+-]|\.\w)", "the store", why) if alone else why
