"""How fast, how exact and how frugal learned indexers choose: `python -m bench.lightning --help`."""
