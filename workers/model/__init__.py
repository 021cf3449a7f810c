"""The decode loop of language models, captured so that no Python runs between kernels. The caller supplies attention.

Its operations run as CUDA graphs of Triton and CUDA C kernels on a GPU, and as tapes of compiled stages on a CPU.
"""

from workers.model.attention import StepAttention
from workers.model.runner import ModelRunner
from workers.model.weights import take_weights

__all__ = [
    "ModelRunner",
    "StepAttention",
    "take_weights",
]
