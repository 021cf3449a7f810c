"""Checkpoints that tests of this folder share."""

from pathlib import Path

import numpy as np
import pytest

from tests.models.quantized_files import NUM_LAYERS, quantize
from tests.tiny import save


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("plain"), num_hidden_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def in_gptq(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("gptq")
    quantize(plain, to, "gptq", np.random.default_rng(1))
    return to
