"""The directory of files that can be made again."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return $CSATTN_CACHE, or else ~/.cache/csattn; the directory need not exist."""
    return Path(os.environ.get("CSATTN_CACHE", "~/.cache/csattn")).expanduser()
