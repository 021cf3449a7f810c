"""Builds that are asked for while they run: what takes seconds is imported before, and a model is loaded once."""

import json
import sys

_GRACE_S = 1.0  # for one that builds nothing to end by itself


def main() -> None:
    """A line has the arguments of one; the process ends with the first that fails, or when no more can come: also
    while it builds, for a service that was killed is started again, and begins its builds anew."""
    from workers.child import end_with
    from workers.cli.entry import run
    from workers.garbage import spare_garbage

    end_with(sys.stdin.fileno(), _GRACE_S)
    spare_garbage()
    import torch

    import index_build.capture  # noqa: F401  # with it transformers, which takes longest
    from workers.cli import building
    from workers.serving.context_build import BUILT

    building.keep_model()
    for line in sys.stdin:
        sys.argv = ["csattn", *json.loads(line)]
        run()
        torch.cuda.empty_cache()  # of what the build has left; nothing without a GPU
        for stream in (sys.stdout, sys.stderr):
            print(BUILT, file=stream, flush=True)
