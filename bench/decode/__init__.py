"""How fast a step decodes on a GPU: `python -m bench.decode --help`."""
