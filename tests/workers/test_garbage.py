"""Processes collect garbage less often than by default, all with the same settings."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SAYS = """
import atexit, gc
from workers.garbage import reduce_gc
atexit.register(lambda: print(gc.get_threshold()[0], gc.get_freeze_count() > 1000))
reduce_gc()
reduce_gc()
"""
# a class like those of libraries built with nanobind
NANOBIND = 'kept = type("nb_type_0", (type,), {"__module__": "nanobind"})'


def test_there_is_one_place_that_says_how() -> None:
    sources = {
        path: path.read_text() for package in ("workers", "index_build") for path in (ROOT / package).rglob("*.py")
    }
    setting = [path for path, source in sources.items() if re.search(r"gc\.(set_threshold|freeze)\b", source)]
    calling = [path.name for path, source in sources.items() if re.search(r"^ +reduce_gc\(\)", source, re.MULTILINE)]
    assert [path.name for path in setting] == ["garbage.py"]
    assert sorted(calling) == ["attention_actor.py", "entry.py", "probes.py", "standby.py"]


def test_it_is_looked_for_less_and_no_more_at_the_end() -> None:
    ended = subprocess.run([sys.executable, "-c", SAYS], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["10000", "True"]


def test_it_is_looked_for_at_the_end_where_nanobind_would_tell_of_leaks() -> None:
    ended = subprocess.run([sys.executable, "-c", SAYS + NANOBIND], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["10000", "False"]
