"""What lm-eval, unmodified, says of the service: `python -m bench.lm_eval --help`."""
