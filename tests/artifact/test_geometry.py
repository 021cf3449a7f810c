"""Sizes of a model that fix an artifact's shapes."""

from typing import Any

import pytest

from csattn.artifact import LayerGeometry, ModelGeometry
from csattn.errors import ConfigError

LEAST: dict[str, Any] = dict.fromkeys(
    ("num_layers", "num_q_heads", "num_kv_heads", "head_dim", "hidden_size", "vocab_size", "max_positions"), 1
)


def test_a_sliding_window_layer_keeps_only_the_rows_within_its_reach() -> None:
    layers = LayerGeometry(), LayerGeometry(keeps="window", window=100), LayerGeometry(keeps="latents")
    model = ModelGeometry(**(LEAST | {"num_layers": 3}), layers=layers)
    assert [model.num_kept(layer_idx, 70) for layer_idx in range(3)] == [70, 70, 70]
    assert [model.num_kept(layer_idx, 300) for layer_idx in range(3)] == [300, 100, 300]


@pytest.mark.parametrize("name", LEAST)
@pytest.mark.parametrize("value", [0, -1, True, 1.0, None])
def test_sizes_that_are_not_positive_integers_are_refused(name: str, value: Any) -> None:
    ModelGeometry(**LEAST)
    with pytest.raises(ConfigError, match=f"{name} of a model must be a positive integer, got {value}"):
        ModelGeometry(**(LEAST | {name: value}))
