"""Scores of the service by an unmodified lm-eval: `python -m bench.lm_eval --help`."""
