"""A process that runs steps on two devices until a test kills it, or kills the other device's process."""

import os
import sys
from pathlib import Path

import pytest

from csattn.artifact import open_artifact
from tests.cuda_on_cpu.emulated import Emulator
from tests.workers.engine.emulated_engine import emulate
from tests.workers.engine.emulated_follower import KERNELS
from tests.workers.engine.test_split_engine import CONFIG, two
from workers.serving.step_engine import StepRow

if __name__ == "__main__":
    emulate(Emulator(Path(os.environ[KERNELS])), pytest.MonkeyPatch())
    engine = two("hybrid", tail_capacity=500)
    with open_artifact(Path(sys.argv[1])) as artifact:
        engine.add_context(0, artifact)
        engine.open(0, 0, CONFIG, "csattn")
        engine.step([StepRow(0, 1)])
        print(*(child.pid for child in engine._followers._children), flush=True)
        while True:
            engine.step([StepRow(0, 1)])
