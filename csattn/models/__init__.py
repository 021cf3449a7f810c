"""The language models that csattn runs: which are supported, how they are loaded, and what identifies them."""

from csattn.models.loader import LoadedModel, load_model

__all__ = ["LoadedModel", "load_model"]
