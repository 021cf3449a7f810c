"""A store with a few small contexts, shared by the tests that only read it."""

from pathlib import Path

import pytest

from tests.workers.serving.artifacts import SECRETS, build, text_of
from workers.serving.contexts import name_artifact


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a context named after each secret word, and `bare`, which was built without a chat template."""
    store = tmp_path_factory.mktemp("serving")
    for secret in SECRETS:
        name_artifact(store, secret, build(store, text_of(secret)), "float32")
    name_artifact(store, "bare", build(store, text_of("bare"), chat=False), "float32")
    return store
