"""All processes use the same settings, by which Python's garbage collector runs less often than by default."""

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


def test_garbage_collection_is_configured_in_one_module() -> None:
    sources = {
        path: path.read_text() for package in ("workers", "index_build") for path in (ROOT / package).rglob("*.py")
    }
    setting = [path for path, source in sources.items() if re.search(r"gc\.(set_threshold|freeze)\b", source)]
    calling = [path.name for path, source in sources.items() if re.search(r"^ +reduce_gc\(\)", source, re.MULTILINE)]
    assert [path.name for path in setting] == ["garbage.py"]
    assert sorted(calling) == ["attention_actor.py", "entry.py", "probes.py", "standby.py"]


def test_reduce_gc_raises_the_threshold_and_skips_the_collection_at_exit() -> None:
    ended = subprocess.run([sys.executable, "-c", SAYS], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["10000", "True"]


def test_reduce_gc_collects_at_exit_where_nanobind_would_report_leaks() -> None:
    ended = subprocess.run([sys.executable, "-c", SAYS + NANOBIND], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["10000", "False"]
