"""How fast a decode step runs on a GPU: `python -m bench.decode --help`."""
