"""A verb that has begun before it is known which: it imports what takes seconds, then waits for its arguments."""

import json
import sys


def main() -> None:
    import workers.cli.building  # noqa: F401

    line = sys.stdin.readline()
    if not line:  # who would have asked is gone
        return
    sys.argv = ["csattn", *json.loads(line)]
    from workers.cli import main as run

    run()
