"""How well a model predicts, finds and answers when it reads a few percent of its context.

    python -m bench.accuracy selectors [--texts ...] [--selectors all] [--keep 0.05,0.02] [--json FILE]
    python -m bench.accuracy long [--texts ...] [--context-len 32K] [--stretch 4] [--device cuda] [--json FILE]
    python -m bench.accuracy tasks [--tasks ...] [--lengths ...] [--question sparse|dense] [--json FILE]
    python -m bench.accuracy why [--texts ...] [--ways ...] [--seconds 280] [--json FILE] [--plot FILE]
    python -m bench.accuracy rest [--texts ...] [--json FILE]
    python -m bench.accuracy longbench FILE ... --prompts FILE [--question sparse|dense] [--json FILE]

`selectors` compares selectors by how well the model predicts texts. `long` does so for long contexts, on any device,
and also measures low-bit KV. `why` turns the published method into `default`, one change at a time. `rest` compares
the attention mass of the rows not chosen, as the codes estimate it, with the exact one. `tasks` finds things hidden in
contexts. `longbench` answers the questions of the data set of that name.
"""

import argparse
import sys

from bench.accuracy import long, longbench, rest, selectors, tasks, why
from bench.timing import GateError
from csattn.errors import CsattnError

COMMANDS = {"selectors": selectors, "long": long, "tasks": tasks, "longbench": longbench, "why": why, "rest": rest}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.accuracy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=(module.__doc__ or "").splitlines()[0]))
    arguments = parser.parse_args()
    try:
        COMMANDS[arguments.command].run(arguments)
    except (CsattnError, GateError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
