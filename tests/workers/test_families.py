"""Every supported family, read from its config, says what transformers says: the CPU engine, and the definition."""

from pathlib import Path

import numpy as np
import pytest
import torch

from csattn.artifact import open_artifact
from csattn.config import SearchConfig, preset
from csattn.models.families import FAMILIES
from csattn.models.weights import weights_of
from index_build.pipeline import build_artifact
from tests.tiny import ALL_FAMILIES, loaded, token_ids
from tests.workers.engine.talks import Talk, alone
from tests.workers.model.full_context import CONTEXT_LENS, greedy, logits_after, make_runner
from workers.engine.cpu_engine import CpuEngine

CONTEXT_LEN, NUM_TOKENS = 300, 64
QUESTION = token_ids(5, seed=5).tolist()


def test_all_families_are_tested() -> None:
    assert ALL_FAMILIES.keys() == FAMILIES.keys()


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_what_is_described_is_there(family: str) -> None:
    model = loaded(family).model
    weights = weights_of(model)
    for spec, layer in zip(weights.spec.layers, weights.layers, strict=True):
        assert [linear.bias is not None for linear in layer.qkv] == [spec.attention.qkv_bias] * 3
        assert (layer.out.bias is not None) == spec.attention.out_bias
        assert [linear.bias is not None for linear in layer.gate_up] == [spec.mlp.bias] * (1 + spec.mlp.gated)
        assert (layer.down.bias is not None) == spec.mlp.bias
        assert (layer.before_attention is None) == (layer.before_mlp is None) == (not spec.pre_norm)
        assert (layer.behind_attention is None) == (layer.behind_mlp is None) == (not spec.post_norm)
    assert weights.spec.softmax_scale == pytest.approx(model.model.layers[0].self_attn.scaling)
    taken = {p.data_ptr() for p in model.parameters() if p.dim() == 2}
    assert sum(p.numel() for p in model.parameters() if p.data_ptr() in taken) == sum(
        linear.weight.numel()
        for layer in weights.layers
        for linear in (*layer.qkv, layer.out, *layer.gate_up, layer.down)
    ) + weights.embedding.numel() + (0 if weights.spec.tied_embedding else weights.head.weight.numel())


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_the_cpu_engine_says_what_transformers_says(family: str, tmp_path: Path) -> None:
    model = loaded(family).model
    artifact = build_artifact(loaded(family), token_ids(CONTEXT_LEN), preset("default"), tmp_path)
    with open_artifact(artifact.path) as opened, CpuEngine(loaded(family), num_threads=2) as engine:
        engine.add_context(0, opened)
        got = alone(engine, Talk(0, SearchConfig(keep=1.0), "csattn", QUESTION, NUM_TOKENS))
    ids = torch.from_numpy(np.concatenate([token_ids(CONTEXT_LEN), QUESTION, got.tokens[:-1]])).long()[None]
    with torch.no_grad():
        want = model(ids).logits[0, -NUM_TOKENS:].numpy()
    np.testing.assert_allclose(np.stack(got.logits), want, rtol=0, atol=1e-3)
    assert got.tokens == want.argmax(axis=1).tolist()


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_the_definition_says_what_transformers_says(family: str) -> None:
    """The decode loop on a CPU: the same description, over operations in torch."""
    model = loaded(family).model
    runner, context_len = make_runner(model), CONTEXT_LENS[0]
    output = runner.prefill(QUESTION, 0, context_len, 0)
    torch.testing.assert_close(output.logits, logits_after(model, 0, QUESTION)[-1:], rtol=0, atol=1e-3)
    first = int(output.next_ids)
    runner.fill(1, [first], [context_len + len(QUESTION)], [0], [0], [len(QUESTION) + 1])
    num_tokens = 50  # which still fit the tail
    assert [first, *runner.decode(1, num_tokens - 1)[:, 0].tolist()] == greedy(model, 0, QUESTION, num_tokens)
