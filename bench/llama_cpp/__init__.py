"""Comparison with llama.cpp on a CPU: `python -m bench.llama_cpp --help`."""
