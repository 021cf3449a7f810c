"""Configuration is checked where it enters: types as well as ranges."""

import numpy as np
import pytest

from csattn.config import ListConfig, SearchConfig, SketchConfig
from csattn.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"keep": "0.02"}, "keep must be a number, got '0.02'"),
        ({"keep": True}, "keep must be a number, got True"),
        ({"keep": None}, "keep must be a number, got None"),
        ({"keep": float("nan")}, "keep must be more than 0 and at most 1, got nan"),
        ({"window_len": 1.5}, "window_len must be a whole number, got 1.5"),
        ({"window_len": 0}, "window_len must be at least 1, got 0"),
        ({"sink_len": "4"}, "sink_len must be a whole number, got '4'"),
        ({"search_period": True}, "search_period must be a whole number, got True"),
        ({"lookahead": 2}, "lookahead must be one of 0, 1, got 2"),
    ],
)
def test_invalid_search_configurations_are_refused(options, sentence) -> None:
    with pytest.raises(ConfigError, match=sentence):
        SearchConfig(**options)


def test_index_options_of_a_wrong_type_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_fine must be a whole number, got 1\.5"):
        SketchConfig(num_fine=1.5)
    with pytest.raises(ConfigError, match="list_len must be a number, got 'half'"):
        ListConfig(list_len="half")


def test_numpy_numbers_are_accepted() -> None:
    config = SearchConfig(keep=np.float32(0.5), window_len=np.int64(8), sink_len=0)
    assert config.top_k(100) == 50
    assert SearchConfig(keep=1).top_k(7) == 7
