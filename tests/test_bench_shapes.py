"""Published shapes agree with the models' cards."""

import pytest

from bench.shapes import CONFIGS, shape_named
from bench.streamed import streamed_params
from bench.timing import GateError

CARDS = {  # millions of parameters, embeddings included: used in one token's step, and in all
    "llama-3.1-8b": (8030, 8030),
    "llama-3.1-70b": (70554, 70554),
    "llama-3.2-1b": (1236, 1236),
    "qwen2.5-7b": (7616, 7616),
    "qwen3-30b-a3b": (3353, 30532),
    "gpt-oss-20b": (4186, 20908),
    "gemma-3-27b": (27008, 27008),  # without the vision encoder
    "qwen3.5-27b": (26893, 26893),  # without the vision encoder
    "granite-4-h-small": (8801, 32205),
    "nemotron-nano-2-9b": (8886, 8886),
    "nemotron-3-nano-30b": (3579, 31577),
    "deepseek-v3.2": (38403, 671877),
    "deepseek-v4-flash": (13798, 284330),
}


def test_published_shapes_have_the_published_sizes() -> None:
    assert CARDS.keys() == CONFIGS.keys()
    for name, millions in CARDS.items():
        shape = shape_named(name)
        others = sum(
            (2 + x.gated) * shape.hidden_size * x.intermediate_size * (x.num_experts - x.num_chosen)
            for layer in shape.layers
            for x in layer.experts
        )
        of_a_step = streamed_params(shape) + (0 if shape.tied_embedding else shape.vocab_size * shape.hidden_size)
        assert (of_a_step / 1e6, (of_a_step + others) / 1e6) == pytest.approx(millions, rel=1e-3)


def test_shapes_have_the_published_kinds_of_layers() -> None:
    searched = {name: len(shape_named(name).indexed_layers) for name in CONFIGS}
    assert (searched["gpt-oss-20b"], searched["gemma-3-27b"], searched["qwen3.5-27b"]) == (12, 10, 16)


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(GateError, match="no model shape 'gpt-5'; choose one of llama"):
        shape_named("gpt-5")
