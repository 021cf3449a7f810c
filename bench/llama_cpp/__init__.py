"""llama.cpp beside csattn on a CPU: `python -m bench.llama_cpp --help`."""
