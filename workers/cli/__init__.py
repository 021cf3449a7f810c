"""The command line, the only package that may both build and decode."""

import sys

try:
    from workers.cli.entry import main
except KeyboardInterrupt:  # Ctrl-C before there is anything to interrupt
    sys.exit(130)

__all__ = ["main"]
