"""The language models this project decodes with: which are supported, how they load, what identifies them."""

from csattn.models.loader import LoadedModel, load_model

__all__ = ["LoadedModel", "load_model"]
