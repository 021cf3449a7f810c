"""Imported by the server that forks builds: they find the classes of their model, which take longer than a build."""

from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["LlamaConfig", "LlamaForCausalLM"]
