"""How a module of this project is run as a process of its own."""

import os
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]


def module_command(module: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """The command, and the environment in which it finds the packages where this process has them."""
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return [sys.executable, "-P", "-m", module, *arguments], os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
