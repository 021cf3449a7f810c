"""Preloaded by the server that forks builds: importing the classes of their model takes longer than a build."""

from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["LlamaConfig", "LlamaForCausalLM"]
