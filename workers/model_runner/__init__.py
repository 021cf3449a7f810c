"""A decode loop of language models without Python work per kernel; attention is the caller's."""

from workers.model_runner.attention import StepAttention
from workers.model_runner.runner import ModelRunner, StepOutput
from workers.model_runner.shapes import shape_named
from workers.model_runner.weights import random_weights, take_weights

__all__ = [
    "ModelRunner",
    "StepAttention",
    "StepOutput",
    "random_weights",
    "shape_named",
    "take_weights",
]
