"""Speed, exactness and memory of learned indexers: `python -m bench.lightning --help`."""
