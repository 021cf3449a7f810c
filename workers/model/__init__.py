"""A decode loop of language models without Python work per kernel; attention is the caller's."""

from workers.model.attention import StepAttention
from workers.model.runner import ModelRunner, StepOutput
from workers.model.weights import take_weights

__all__ = [
    "ModelRunner",
    "StepAttention",
    "StepOutput",
    "take_weights",
]
