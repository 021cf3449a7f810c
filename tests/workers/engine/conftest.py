"""With several GPUs, run each test of `test_split_engine.py` in its own process: a process can join the group once."""

import os
import subprocess
import sys

import pytest
import torch

APART = "CSATTN_TEST_APART"  # set in the environment of such a process


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if pyfuncitem.path.name != "test_split_engine.py" or APART in os.environ or torch.cuda.device_count() < 2:
        return None
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", pyfuncitem.nodeid]
    subprocess.run(command, cwd=pyfuncitem.config.rootpath, env=os.environ | {APART: "1"}, check=True, timeout=300)
    return True
