"""The version of csattn, and the commit that it was made of."""

import subprocess
from importlib.resources import files
from pathlib import Path

import csattn


def full_version() -> str:
    """Return `0.2.0 (commit 0123456789ab)`; in a checkout with changes, the commit ends in `-dirty`."""
    told = commit()
    return f"{csattn.__version__} (commit {told})" if told else csattn.__version__


def commit() -> str | None:
    """Return the commit in the wheel (see hatch_build.py) or of the checkout that this runs from; None if unknown."""
    told = files(csattn) / "COMMIT"
    if told.is_file():
        return told.read_text().strip()
    root = Path(csattn.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    asked = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(asked, cwd=root, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
