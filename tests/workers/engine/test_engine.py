"""Decoding on a GPU from an artifact: every placement says what `transformers` says, and all of them the same bits."""

from pathlib import Path

import numpy as np
import pytest
import torch

from csattn.artifact import open_artifact
from csattn.config import SearchConfig, preset
from csattn.errors import ConfigError
from index_build.pipeline import build_artifact
from offload.budget import AvailableMemory
from offload.errors import MemoryPlanError, NoDeviceError
from tests.tiny import FAMILIES, loaded, token_ids
from workers.engine import PLACEMENTS, Engine, answer, engine
from workers.session import csattn_session

CONTEXT_LEN = 700
QUESTION = token_ids(11, seed=1)
NUM_STEPS = 24


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("store")


def artifact_path(store: Path, family: str = "llama", preset_name: str = "default", seed: int = 0) -> Path:
    ids = token_ids(CONTEXT_LEN + seed, seed=seed)
    return build_artifact(loaded(family), ids, preset(preset_name), store).path


def decode(engine: Engine, num_steps: int, context_id: int = 0, tail_id: int = 0) -> tuple[list[int], torch.Tensor]:
    """The greedy continuation of the question, and each step's logits."""
    context_len = engine.artifacts[context_id].spec.context_len
    output = engine.runner.prefill(QUESTION.tolist(), context_id, context_len, tail_id)
    token_ids, logits = [int(output.next_ids[0])], [output.logits[0].clone()]
    engine.runner.fill(1, token_ids, [context_len + len(QUESTION)], [context_id], [tail_id], [len(QUESTION) + 1])
    for _ in range(num_steps - 1):
        output = engine.runner.step(1)
        token_ids.append(int(output.next_ids[0]))
        logits.append(output.logits[0].clone())
        engine.runner.advance(1)
    return token_ids, torch.stack(logits).cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_reading_everything_generates_what_transformers_does(store, family, placement) -> None:
    model = loaded(family)
    with open_artifact(artifact_path(store, family)) as artifact:
        whole = np.concatenate([artifact.token_ids, QUESTION])
        ids = torch.from_numpy(whole).long()[None]
        want = model.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_STEPS, do_sample=False
        )[0, len(whole) :].tolist()
        with Engine(model, [artifact], SearchConfig(keep=1.0), placement) as ready:
            got, _ = decode(ready, NUM_STEPS)
    assert got == want


@pytest.mark.gpu
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("preset_name", ["default", "lists", "paper"])
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("rest", [None, "moments"])
def test_a_sparse_step_is_the_cpu_session_s(store, preset_name, lookahead, rest, placement) -> None:
    config = SearchConfig(keep=0.1, window_len=64, lookahead=lookahead, rest=rest)
    path = artifact_path(store, preset_name=preset_name)
    with open_artifact(path) as artifact, csattn_session(loaded(), artifact, config) as session:
        request = session.request()
        with torch.inference_mode():
            ids = torch.from_numpy(QUESTION).long()[None]
            want = session.loaded.model(ids, past_key_values=request).logits[0, -1]
    with open_artifact(path) as artifact, Engine(loaded(), [artifact], config, placement) as ready:
        _, logits = decode(ready, 1)
    torch.testing.assert_close(logits[0], want, rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize(("keep", "rest"), [(0.05, "none"), (0.05, "moments"), (0.05, "sketch"), (1.0, "none")])
def test_all_placements_give_the_same_bits(store, keep, rest, lookahead) -> None:
    """For the same selection. The CPU's may hold another of two keys that are worth the same but for rounding."""
    config = SearchConfig(keep=keep, window_len=64, lookahead=lookahead, rest=rest)
    results = {}
    for placement in PLACEMENTS:
        with (
            open_artifact(artifact_path(store)) as artifact,
            Engine(loaded(), [artifact], config, placement, slot_share=0.12) as ready,
        ):
            results[placement] = decode(ready, NUM_STEPS)
    tokens, logits = results["device"]
    for placement, (other_tokens, other_logits) in results.items():
        assert other_tokens == tokens
        if placement == "host" and keep < 1:
            torch.testing.assert_close(other_logits, logits, rtol=2e-3, atol=2e-3)
        else:
            assert torch.equal(other_logits, logits)


@pytest.mark.gpu
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("rest", ["none", "moments", "sketch"])
def test_requests_of_two_contexts_in_one_batch(store, placement, rest) -> None:
    """Each gets what it gets alone."""
    config = SearchConfig(keep=0.1, window_len=64, rest=rest)
    paths = [artifact_path(store), artifact_path(store, seed=37)]
    alone = []
    for path in paths:
        with open_artifact(path) as artifact, Engine(loaded(), [artifact], config, placement) as ready:
            alone.append(decode(ready, NUM_STEPS)[0])
    with (
        open_artifact(paths[0]) as first,
        open_artifact(paths[1]) as second,
        Engine(loaded(), [first, second], config, placement, batch_sizes=(1, 2, 8), num_tails=3) as ready,
    ):
        lens = [first.spec.context_len, second.spec.context_len]
        together = [[int(ready.runner.prefill(QUESTION.tolist(), c, lens[c], c + 1).next_ids[0])] for c in range(2)]
        starts = [context_len + len(QUESTION) for context_len in lens]
        ready.runner.fill(2, [t[0] for t in together], starts, [0, 1], [1, 2], [len(QUESTION) + 1] * 2)
        for step in ready.runner.decode(2, NUM_STEPS - 1).tolist():
            for tokens, token_id in zip(together, step, strict=True):
                tokens.append(token_id)
    assert together == alone


@pytest.mark.gpu
def test_an_answer_ends_and_says_what_it_read(store) -> None:
    config = SearchConfig(keep=0.1, window_len=64, lookahead=1)
    pieces: list[str] = []
    with open_artifact(artifact_path(store)) as artifact, Engine(loaded(), [artifact], config, "hybrid") as ready:
        said = answer(ready, "why?", 10, pieces.append)
    assert "".join(pieces).strip() == said.text
    assert len(said.token_ids) == 10
    assert said.rows_read_per_step == 70 + 68 + (said.question_len + 10) / 2


@pytest.mark.gpu
def test_memory_that_is_not_there_is_named_before_any_work(store, monkeypatch) -> None:
    monkeypatch.setattr(engine, "available_memory", lambda device: AvailableMemory(device_bytes=1 << 20, host_bytes=0))
    with open_artifact(artifact_path(store)) as artifact:
        before = torch.cuda.memory_allocated()
        with pytest.raises(MemoryPlanError, match=r"needs .* bytes .* of device memory and 1,048,576 bytes"):
            Engine(loaded(), [artifact], SearchConfig(), "device")
        assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu
def test_an_unknown_placement_is_refused(store) -> None:
    with open_artifact(artifact_path(store)) as artifact, pytest.raises(ConfigError, match="device, hybrid, host"):
        Engine(loaded(), [artifact], SearchConfig(), "cloud")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_device_the_engine_says_so(store) -> None:
    with open_artifact(artifact_path(store)) as artifact, pytest.raises(NoDeviceError, match="no CUDA device"):
        Engine(loaded(), [artifact], SearchConfig(), "device")
