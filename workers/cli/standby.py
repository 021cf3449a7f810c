"""A process that waits for builds: it imports slow libraries in advance, and loads a model once for all of them."""

import json
import sys

_GRACE_S = 1.0  # for an idle process to end by itself


def main() -> None:
    """Run one build for each line of stdin, a JSON list of arguments.

    The process ends with the first build that fails, and when stdin is closed, even during a build: a service that was
    killed is restarted, and begins its builds anew.
    """
    from workers.child import end_with
    from workers.cli.entry import run
    from workers.garbage import reduce_gc

    end_with(sys.stdin.fileno(), _GRACE_S)
    reduce_gc()
    import torch

    import index_build.capture  # noqa: F401  # imports transformers, which takes longest
    from workers.cli import building
    from workers.serving.context_build import BUILT

    building.keep_model()
    for line in sys.stdin:
        sys.argv = ["csattn", *json.loads(line)]
        run()
        torch.cuda.empty_cache()  # frees what the build has left; does nothing without a GPU
        for stream in (sys.stdout, sys.stderr):
            print(BUILT, file=stream, flush=True)
