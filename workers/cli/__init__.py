"""The command line, the only package that may both build and decode."""

from workers.cli.entry import main

__all__ = ["main"]
