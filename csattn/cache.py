"""Where this project keeps what can be made again."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """$CSATTN_CACHE, else ~/.cache/csattn; it need not exist yet."""
    return Path(os.environ.get("CSATTN_CACHE", "~/.cache/csattn")).expanduser()
