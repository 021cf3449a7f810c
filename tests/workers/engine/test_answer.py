"""An answer computed by the engine equals what transformers generates in a session, and reports how much it read."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from csattn.artifact import Artifact, open_artifact
from csattn.config import SearchConfig, preset
from csattn.errors import ArtifactMismatchError, ContextError
from index_build.pipeline import build_artifact
from tests.tiny import MAX_POSITIONS, byte_tokenizer, loaded, token_ids
from workers.engine.answer import Answer, answer, question_tokens
from workers.engine.cpu.engine import CpuEngine
from workers.session import csattn_session

QUESTION = "Who keeps the lamp?"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    path = build_artifact(loaded(), token_ids(1000), preset("default"), tmp_path_factory.mktemp("store")).path
    with open_artifact(path) as opened:
        yield opened


def answer_on_cpu(
    artifact: Artifact, config: SearchConfig, max_new_tokens: int, pieces: list[str], tail_capacity: int = 2000
) -> Answer:
    ids = question_tokens(loaded(), artifact, QUESTION)
    with CpuEngine(loaded(), max_requests=1, tail_capacity=tail_capacity, num_threads=2) as engine:
        engine.add_context(0, artifact)
        return answer(engine, loaded(), artifact, config, ids, max_new_tokens, pieces.append)


@pytest.mark.parametrize("config", [SearchConfig(window_len=64, lookahead=1), SearchConfig(keep=1.0)])
@pytest.mark.parametrize("max_new_tokens", [1, 4, 50])  # 50 reaches the model's last position
def test_an_answer_equals_what_transformers_generates(
    artifact: Artifact, config: SearchConfig, max_new_tokens: int
) -> None:
    pieces: list[str] = []
    got = answer_on_cpu(artifact, config, max_new_tokens, pieces)
    with csattn_session(loaded(), artifact, config) as session:
        asked = session.ask(QUESTION)
        prompt_len = asked["input_ids"].shape[1]
        room = session.room_for(prompt_len, max_new_tokens)
        want = loaded().model.generate(**asked, max_new_tokens=room, do_sample=False)[0, prompt_len:].tolist()
    assert got.token_ids == want
    assert got.text == loaded().tokenizer.decode(want, skip_special_tokens=True).strip()
    assert got.question_len == prompt_len - 1000
    assert got.rows_full_attention == 1000 + (got.question_len + len(want)) / 2
    near_and_far = 1000 if config.keep == 1 else 4 + 64 + 20
    assert got.rows_read_per_step == near_and_far + (got.question_len + len(want)) / 2
    assert "".join(pieces).strip() == got.text
    assert got.first_token_s > 0
    assert len(got.token_ids) == min(max_new_tokens, MAX_POSITIONS - 1000 - got.question_len)
    assert (got.search_ms_per_step > 0) == (got.selector == "csattn")


def test_a_question_to_a_model_whose_chat_template_has_changed_is_refused(tmp_path: Path) -> None:
    """Before the new template is rendered, which may raise errors of its own."""
    model = loaded("mistral")
    built = build_artifact(model, token_ids(300), preset("default"), tmp_path, notes={"wrapping": "system"})
    changed = replace(model, tokenizer=byte_tokenizer("{{ raise_exception('no') }}"))
    with open_artifact(built.path) as artifact, pytest.raises(ArtifactMismatchError, match="was built with tokenizer"):
        question_tokens(changed, artifact, QUESTION)


def test_an_answer_that_ends_within_a_draft_reads_what_it_reads_without(artifact: Artifact) -> None:
    config, ids = SearchConfig(window_len=16), token_ids(5, seed=2).tolist()
    with CpuEngine(loaded(), max_requests=1, tail_capacity=200, num_threads=2) as engine:
        engine.add_context(0, artifact)
        said = answer(engine, loaded(), artifact, config, ids, 30, draft_tokens=0).token_ids
        last = max(said.index(token_id) for token_id in said[:7])
        model = SimpleNamespace(stop_ids={said[last]}, tokenizer=loaded().tokenizer)
        context = SimpleNamespace(spec=artifact.spec, token_ids=np.array(said, np.int32))
        want, got = (answer(engine, model, context, config, ids, 30, draft_tokens=most) for most in (0, 7))
    assert got.token_ids == want.token_ids == said[: last + 1]
    assert got.num_steps < want.num_steps and got.rows_read_per_step == want.rows_read_per_step


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 20])
def test_progress_through_the_question_is_reported_before_the_answer(artifact: Artifact, num_tokens: int) -> None:
    told: list[object] = []
    with CpuEngine(loaded(), max_requests=1, tail_capacity=200, num_threads=2, max_rows=8) as engine:
        engine.add_context(0, artifact)
        answer(
            engine, loaded(), artifact, SearchConfig(), token_ids(num_tokens).tolist(), 3, told.append,
            on_read=lambda done, total: told.append((done, total)),
        )  # fmt: skip
    counts = [(done, num_tokens) for done in (*range(0, num_tokens, 8), num_tokens)]
    assert told[: len(counts)] == counts
    assert all(isinstance(text, str) for text in told[len(counts) :]) and len(told) > len(counts)


def test_an_answer_ends_when_the_tail_capacity_is_reached(artifact: Artifact) -> None:
    num_question = len(question_tokens(loaded(), artifact, QUESTION))
    got = answer_on_cpu(artifact, SearchConfig(), 50, [], tail_capacity=num_question + 3)
    assert len(got.token_ids) == 4  # the last token is never fed back


def test_a_question_that_is_too_long_is_refused(artifact: Artifact) -> None:
    with pytest.raises(ContextError, match="ask a shorter question"):
        question_tokens(loaded(), artifact, "why " * 20)
