"""Stages are compiled by several processes, and by this one alone if another fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
STAGE = """
import sys
{guard}
def stage(a, b, c, d):
    return a + {number} * b
"""
RUN = """
import ctypes, time
from csattn.cpu import compile_together as module
from csattn.cpu.addresses import compiled_address, is_uncached
from near import one, three, two

def compiled_slowly(stage):
    time.sleep(4)  # meanwhile the other process has compiled what is left
    return compiled_address(stage)

module.compiled_address = compiled_slowly
stages = [one.stage, two.stage, three.stage, two.stage]
module.compile_together(stages, 2)
print(sum(map(is_uncached, stages)))
for stage in stages:
    print(ctypes.CFUNCTYPE(*[ctypes.c_int64] * 5)(compiled_address(stage))(100, 1, 0, 0))
"""


def run(folder: Path, guard: str = "", cache: str = "cache") -> tuple[list[int], set[str]]:
    """Return what a process prints that compiles three stages, and the ids of the processes that compiled them."""
    (folder / "csattn").symlink_to(ROOT / "csattn")
    (folder / "near").mkdir()
    for number, name in enumerate(("one", "two", "three"), 1):
        (folder / "near" / f"{name}.py").write_text(STAGE.format(guard=guard, number=number))
    environment = {**os.environ, "PYTHONPATH": str(folder), "NUMBA_CACHE_DIR": str(folder / cache)}
    command = [sys.executable, "-P", "-c", RUN]
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=True)
    assert not done.stderr, "what the other process writes is not for users"
    files = (folder / cache).rglob("*.nbc")
    return [int(line) for line in done.stdout.split()], {file.name.split(".")[-2] for file in files}


def test_another_process_compiles_stages_too(tmp_path: Path) -> None:
    printed, processes = run(tmp_path)
    assert printed == [0, 101, 102, 103, 102] and len(processes) == 2


@pytest.mark.parametrize("failure", ["raise SystemExit(3)", "import no_such_module"])
def test_stages_are_compiled_although_the_other_process_fails(tmp_path: Path, failure: str) -> None:
    in_the_other = "if sys.argv[0].endswith('compile_together.py'):"
    printed, processes = run(tmp_path, f"{in_the_other} {failure}")
    assert printed[1:] == [101, 102, 103, 102] and len(processes) == 1
