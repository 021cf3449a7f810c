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


@pytest.mark.parametrize(
    "layer",
    [
        {"keeps": "everything"},
        {"keeps": "window"},
        {"keeps": "window", "window": -1},
        {"keeps": "window", "window": True},
        {"keeps": "rows", "window": 4},
        {"keeps": "latents", "rows_of": 0},
        {"keeps": "rows", "rows_of": 0.0},
        {"keeps": "state"},
        {"keeps": "state", "conv": (4, 3)},
        {"keeps": "state", "conv": (4, 0), "memory": (2, 8, 8)},
        {"keeps": "rows", "conv": (4, 3), "memory": (2, 8, 8)},
        {"keeps": "window", "window": 4, "ratio": 4, "span": 4},
        {"keeps": "compressed"},
        {"keeps": "compressed", "window": 4, "ratio": 4},
        {"keeps": "compressed", "window": 4, "ratio": 4, "span": 12},
        {"keeps": "compressed", "window": 4, "key_width": 8},
        {"keeps": "nothing", "window": 4},
        {"keeps": "nothing", "rows_of": 0},
        {"keeps": "nothing", "conv": (4, 3), "memory": (2, 8, 8)},
        {"keeps": "state", "conv": (4, 3), "memory": (2, 0, 8)},
    ],
)
def test_layers_that_keep_something_else_are_refused(layer: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match="a layer keeps rows, the last rows, latents, a state, compressed rows or nothing"
    ):
        LayerGeometry(**layer)


def test_models_of_which_no_layer_keeps_all_of_a_context_are_refused() -> None:
    layers = LayerGeometry(keeps="window", window=4), LayerGeometry(keeps="state", conv=(4, 3), memory=(2, 8, 8))
    with pytest.raises(ConfigError, match="at least one of 2 layers must attend to the whole context"):
        ModelGeometry(**(LEAST | {"num_layers": 2}), layers=layers)


@pytest.mark.parametrize(
    "layer",
    [
        LayerGeometry(),
        LayerGeometry(keeps="window", window=1, rows_of=0),
        LayerGeometry(keeps="latents"),
        LayerGeometry(keeps="state", conv=(4, 3), memory=(2, 8, 8)),
        LayerGeometry(keeps="compressed", window=4),
        LayerGeometry(keeps="compressed", window=4, ratio=4, span=8, key_width=16),
        LayerGeometry(keeps="compressed", window=4, ratio=1, span=1, key_width=1),
    ],
)
def test_json_keeps_what_a_layer_keeps(layer: LayerGeometry) -> None:
    assert LayerGeometry.from_json(layer.to_json()) == layer


def test_a_compressed_layer_keeps_its_window_complete_rows_and_the_tokens_after_them() -> None:
    layers = (
        LayerGeometry(keeps="compressed", window=5),
        LayerGeometry(keeps="compressed", window=5, ratio=4, span=8, key_width=3),
    )
    model = ModelGeometry(**(LEAST | {"num_layers": 2, "head_dim": 10}), layers=layers)
    plain = {"window": (4, 20), "rows": (0, 20), "keys": (0, 0), "pending": (0, 0)}
    assert model.compressed_sizes(0, 70) == plain and model.compressed_sizes(0, 3)["window"] == (3, 20)
    assert model.compressed_sizes(1, 70) == {"window": (4, 20), "rows": (17, 20), "keys": (17, 3), "pending": (6, 92)}
    assert model.compressed_sizes(1, 3)["pending"] == (3, 92)
    assert model.num_kept(0, 70) == model.num_stored(1, 70) == 0 and not model.indexed_layers


@pytest.mark.parametrize("name", LEAST)
@pytest.mark.parametrize("value", [0, -1, True, 1.0, None])
def test_sizes_that_are_not_positive_integers_are_refused(name: str, value: Any) -> None:
    ModelGeometry(**LEAST)
    with pytest.raises(ConfigError, match=f"{name} of a model must be a positive integer, got {value}"):
        ModelGeometry(**(LEAST | {name: value}))
