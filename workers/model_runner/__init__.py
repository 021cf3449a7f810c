"""A decode loop of Llama-like models without Python work per kernel; attention is the caller's."""

from workers.model_runner.attention import StepAttention
from workers.model_runner.runner import ModelRunner, StepOutput
from workers.model_runner.shapes import ModelShape, shape_named
from workers.model_runner.weights import ModelWeights, random_weights, take_weights

__all__ = [
    "ModelRunner",
    "ModelShape",
    "ModelWeights",
    "StepAttention",
    "StepOutput",
    "random_weights",
    "shape_named",
    "take_weights",
]
