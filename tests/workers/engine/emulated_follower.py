"""`workers.engine.gpu.follower_process` without a device: its kernels run on the CPU."""

import os
import sys
from pathlib import Path

import pytest

from tests.cuda_on_cpu.emulated import Emulator
from tests.workers.engine.emulated_engine import emulate
from workers.engine.gpu.follower_process import main

KERNELS = "CSATTN_TEST_KERNELS"  # environment variable: the directory of compiled kernels

if __name__ == "__main__":
    emulate(Emulator(Path(os.environ[KERNELS])), pytest.MonkeyPatch())
    main(*sys.argv[1:])
