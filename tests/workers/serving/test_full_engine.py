"""The engine that other tests rely on computes the logits of `transformers`."""

from pathlib import Path

import numpy as np
import torch

from csattn.artifact import open_artifact
from csattn.config import SearchConfig
from tests.tiny import loaded, token_ids
from tests.workers.serving.full_engine import FullEngine
from workers.serving.contexts import ContextFile
from workers.serving.step_engine import StepRow

QUESTION = token_ids(9, seed=3).tolist()


def context(store: Path, name: str) -> Path:
    artifact_id = ContextFile(store).read()[name].artifact_id
    assert artifact_id is not None
    return store / artifact_id


def test_full_engine_logits_equal_transformers(built: Path) -> None:
    engine = FullEngine(loaded())
    with open_artifact(context(built, "heron")) as artifact:
        engine.add_context(0, artifact)
        whole = torch.tensor([*artifact.token_ids.tolist(), *QUESTION])[None]
    with torch.inference_mode():
        want = loaded().model(whole).logits[0, -len(QUESTION) :].numpy()
    engine.open(3, 0, SearchConfig(), "full")
    result = engine.step([StepRow(3, token_id) for token_id in QUESTION], want_logits=True)
    assert result.logits is not None
    np.testing.assert_allclose(result.logits, want, rtol=1e-3, atol=1e-3)
    assert (result.next_ids == want.argmax(-1)).all()


def test_window_selector_changes_the_logits(built: Path) -> None:
    engine = FullEngine(loaded())
    with open_artifact(context(built, "heron")) as artifact:
        engine.add_context(0, artifact)
    logits = []
    for request_slot, selector in enumerate(("full", "window")):
        engine.open(request_slot, 0, SearchConfig(window_len=8), selector)  # type: ignore[arg-type]
        result = engine.step([StepRow(request_slot, 7)], want_logits=True)
        assert result.logits is not None
        logits.append(result.logits)
    assert np.abs(logits[0] - logits[1]).max() > 0.1
