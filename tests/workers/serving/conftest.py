"""A store of a few small contexts, shared by tests that only read it; and builds in the tests' own process."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from index_build.inputs import make_config
from index_build.pipeline import build_artifact
from tests.tiny import loaded
from tests.workers.serving.artifacts import SECRETS, build, text_of
from workers.serving.context_build import Builder
from workers.serving.contexts import name_artifact


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a context named after each secret word, and `bare`, which was built without a chat template."""
    store = tmp_path_factory.mktemp("serving")
    for secret in SECRETS:
        name_artifact(store, secret, build(store, text_of(secret)), "float32")
    name_artifact(store, "bare", build(store, text_of("bare"), chat=False), "float32")
    return store


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Build contexts of prompts in this process instead of another. The list has the store of each build."""
    made: list[Path] = []

    async def build(self: Builder, source: list[str], store: Path, tell: Any, nice: int) -> dict[str, Any]:
        ids = np.array(json.loads(Path(source[-1]).read_text()), np.int32)
        assert "--no-sync" in source, "no prompt waits for a disk"
        made.append(store)
        set_to = self._settings.build
        config = make_config(set_to.preset, {"kmeans": set_to.kmeans}, "cpu")
        report = await asyncio.to_thread(build_artifact, loaded(), ids, config, store)
        return {"artifact": report.artifact_id, "context_len": len(ids)}

    monkeypatch.setattr(Builder, "build", build)
    return made
