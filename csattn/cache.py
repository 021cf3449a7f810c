"""The directory of files that can be made again."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return $CSATTN_CACHE, or else, also if it is empty, ~/.cache/csattn; the directory need not exist."""
    return Path(os.environ.get("CSATTN_CACHE") or "~/.cache/csattn").expanduser()
