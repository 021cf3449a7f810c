"""The command line: the one front door that may both build and decode."""

from workers.cli.app import main

__all__ = ["main"]
