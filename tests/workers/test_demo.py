"""The demo: its document holds its answers, its table shows what was answered, and a short one runs from end to end."""

import io
import struct
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from csattn.artifact import open_artifact
from csattn.models import LoadedModel, load_model
from csattn.models.prompt import choose_wrapping, context_ids
from workers.cli import demo
from workers.cli.demo import DOCUMENT, QUESTIONS, Exchange, Question
from workers.engine.answer import Answer
from workers.plots import PICTURE_SIZE


@pytest.fixture(scope="module")
def demo_model() -> LoadedModel:
    return load_model()


@pytest.fixture(scope="module")
def document() -> str:
    return DOCUMENT.read_text(encoding="utf-8")


def make_answer(text: str, rows_read_per_step: float = 400.0) -> Answer:
    return Answer(
        text=text,
        token_ids=[1, 2],
        selector="csattn",
        question_len=9,
        first_token_s=0.5,
        tokens_per_s=12.345,
        num_steps=3,
        rows_read_per_step=rows_read_per_step,
        rows_full_attention=6400.0,
        search_ms_per_step=1.0,
    )


def make_exchange(sparse: str, full: str) -> Exchange:
    question = Question("What is the boat called?", "The boat is called the Petrel.", "Petrel")
    recall, reads = np.full((2, 3), 0.75), np.zeros((2, 3, 128))
    return Exchange(question, make_answer(sparse), make_answer(full, 6400.0), recall, reads)


def test_the_document_fits_the_model_and_leaves_room_for_questions(demo_model, document):
    num_tokens = len(context_ids(demo_model.tokenizer, document, choose_wrapping(demo_model.tokenizer)))
    assert 6300 <= num_tokens <= 7000
    assert num_tokens + 512 < demo_model.geometry.max_positions


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.answer)
def test_the_document_states_each_fact_once_and_far_from_the_end(document, question):
    assert document.count(question.fact) == 1
    assert question.answer in question.fact
    assert document.index(question.fact) < 0.75 * len(document)


def test_facts_are_spread_over_the_document(document):
    places = [document.index(question.fact) / len(document) for question in QUESTIONS]
    assert len(places) >= 3
    assert min(places) < 0.15
    assert max(places) > 0.6


def test_the_comparison_table_is_made_from_the_answers():
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(demo.comparison([make_exchange("It is the petrel.", "No idea."), make_exchange("A", "A")]))
    first, second = (line for line in console.export_text().splitlines() if "boat" in line)
    assert [cell.strip() for cell in first.split("│")[1:-1]] == [
        "What is the boat called?", "yes / no", "no", "12.3 / 12.3", "400 / 6400", "6.2 %", "0.75",
    ]  # fmt: skip
    assert [cell.strip() for cell in second.split("│")[2:4]] == ["no / no", "yes"]


def test_the_json_reports_which_answers_were_right():
    said = make_exchange("The PETREL", "The gull").to_json()
    assert (said["sparse"]["right"], said["full"]["right"], said["same_text"]) == (True, False, False)
    assert said["share_read"] == 0.0625


def test_a_short_demo_runs_from_end_to_end(tmp_path, demo_model, document, monkeypatch, capsys):
    short = document[: document.index("3. The harbour")].strip()
    monkeypatch.setattr(demo, "show_loading", lambda model, dtype: demo_model)
    monkeypatch.setattr(demo, "_MAX_NEW_TOKENS", 12)
    result = demo.show(tmp_path, short, QUESTIONS[:1])
    (exchange,) = result["questions"]
    assert exchange["full"]["right"]
    assert exchange["full"]["rows_read_per_step"] == exchange["full"]["rows_full_attention"]
    assert exchange["share_read"] < 0.25
    assert 0 < exchange["recall_at_k"] <= 1
    png = (tmp_path / demo.PICTURE_NAME).read_bytes()
    assert struct.unpack(">II", png[16:24]) == PICTURE_SIZE
    printed = capsys.readouterr().out
    assert exchange["sparse"]["text"] in printed
    with open_artifact(tmp_path / "store" / result["artifact"]) as artifact:
        row = demo.fact_row(demo_model, artifact, short, QUESTIONS[0])
        near = demo_model.tokenizer.decode(artifact.token_ids[row - 2 : row + 5])
    assert "Edmund" in near
    with pytest.raises(ValueError, match="substring not found"):
        demo.fact_row(demo_model, artifact, short, replace(QUESTIONS[0], fact="nowhere", answer="no"))
