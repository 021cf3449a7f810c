"""The command line: the one front door that may both build and decode."""

from workers.cli.entry import main

__all__ = ["main"]
