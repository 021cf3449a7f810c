"""`csattn demo`: build from the document that ships with the project, ask three questions, draw what was read."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numba.core.event import install_listener
from numpy.typing import NDArray

from csattn.artifact import Artifact, open_artifact
from csattn.build_options import BuildOptions
from csattn.config import SearchConfig
from csattn.models import LoadedModel
from csattn.models.prompt import context_ids
from csattn.selector_names import SelectorName
from index_build.inputs import read_text
from index_build.plan import plan_text
from workers.cli.building import run_build, show_loading, use_threads
from workers.cli.generating import CompileTimer, speak
from workers.cli.terminal import counting, out, table
from workers.engine.answer import Answer, answer, question_tokens
from workers.engine.opening import open_engine
from workers.observe import AttentionProbe
from workers.serving.step_engine import StepEngine
from workers.words import size

DOCUMENT = Path(__file__).parent.parent / "demo" / "gannet-island.txt"
PICTURE_NAME = "attention.png"
# The default window is meant for longer contexts: here it alone would be 4 % of the context.
_CONFIG = SearchConfig(window_len=64)
_MAX_NEW_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Question:
    """One question, and where the document answers it."""

    text: str
    fact: str  # as the document states it
    answer: str  # the part of the fact that a right answer repeats


QUESTIONS = (
    Question(
        "Who is the keeper of the lighthouse? Answer in one sentence.",
        "The keeper of the lighthouse is Edmund Farrow.",
        "Edmund Farrow",
    ),
    Question(
        "Name the most valuable object in the museum.",
        "The most valuable object in the museum is a silver astrolabe",
        "silver astrolabe",
    ),
    Question("What is the name of the telescope?", "The telescope is called the Cyclops.", "Cyclops"),
)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question, both answers to it, and what the sparse one read."""

    question: Question
    sparse: Answer
    full: Answer
    recall: NDArray[np.float64]  # [num_layers, num_kv_heads], of the exact Top-K rows
    reads: NDArray[np.float64]  # [num_layers, num_kv_heads, num_stretches], share of a stretch's rows read

    @property
    def same_text(self) -> bool:
        return self.sparse.text == self.full.text

    @property
    def share_read(self) -> float:
        """Rows read per step, as a share of what full attention reads."""
        return self.sparse.rows_read_per_step / self.sparse.rows_full_attention

    def to_json(self) -> dict[str, Any]:
        return {
            "question": self.question.text,
            "expected": self.question.answer,
            "sparse": {**self.sparse.to_json(), "right": is_right(self.sparse, self.question)},
            "full": {**self.full.to_json(), "right": is_right(self.full, self.question)},
            "same_text": self.same_text,
            "share_read": round(self.share_read, 4),
            "recall_at_k": round(float(self.recall.mean()), 4),
        }


def run(target: Path) -> dict[str, Any]:
    """Run the demo, writing its files to `target`, and return the command's JSON object."""
    return show(target, read_text(str(DOCUMENT)), QUESTIONS)


def show(target: Path, document: str, questions: tuple[Question, ...]) -> dict[str, Any]:
    """Build a context from a document, ask the questions, and draw what was read."""
    seconds: dict[str, float] = {}
    use_threads(None)
    with _timed(seconds, "load"):
        loaded = show_loading(None, "float32")
    with _timed(seconds, "build"):
        path = _build(loaded, document, target / "store")
    with open_artifact(path) as artifact:
        compiling = install_listener("numba:compile", CompileTimer())
        with compiling, open_engine(loaded, artifact, _CONFIG, max_requests=1) as engine:
            with _timed(seconds, "answer"):
                pairs = []
                for question in questions:
                    out.print(f"\n{question.text}", style="bold")
                    sparse = _ask(engine, loaded, artifact, question, "csattn")
                    pairs.append((sparse, _ask(engine, loaded, artifact, question, "full")))
                out.print("\nWithout the search, the first and the last rows alone do not hold the answer:")
                window = _ask(engine, loaded, artifact, questions[-1], "window")
            with _timed(seconds, "observe"):
                exchanges = _observe(engine, loaded, artifact, questions, pairs)
        out.print(comparison(exchanges))
        with _timed(seconds, "draw"):
            picture = target / PICTURE_NAME
            _draw(loaded, artifact, document, exchanges, picture)
        out.print("\nThe picture of what every layer and head read: ", end="")
        out.print(str(picture), style="bold", soft_wrap=True)
        out.print(f"Ask more: csattn generate {path} --prompt '...' --compare", soft_wrap=True)
        return {
            "artifact": artifact.spec.artifact_id,
            "path": str(path),
            "context_len": artifact.spec.context_len,
            "search": asdict(_CONFIG),
            "questions": [exchange.to_json() for exchange in exchanges],
            "window": {**window.to_json(), "right": is_right(window, questions[-1])},
            "png": str(picture),
            "seconds": {phase: round(value, 2) for phase, value in seconds.items()},
        }


def comparison(exchanges: list[Exchange]) -> Any:
    """One row per question: sparse and full attention beside each other."""
    yes_or_no = "no", "yes"
    rows = [
        [
            exchange.question.text,
            " / ".join(yes_or_no[is_right(of, exchange.question)] for of in (exchange.sparse, exchange.full)),
            yes_or_no[exchange.same_text],
            f"{exchange.sparse.tokens_per_s:.1f} / {exchange.full.tokens_per_s:.1f}",
            f"{exchange.sparse.rows_read_per_step:.0f} / {exchange.full.rows_read_per_step:.0f}",
            f"{100 * exchange.share_read:.1f} %",
            f"{exchange.recall.mean():.2f}",
        ]
        for exchange in exchanges
    ]
    columns = ["", "right", "same text", "tokens/s", "rows per step and head", "share read", "recall of exact Top-K"]
    return table("\nsparse / full attention", columns, rows)


def is_right(result: Answer, question: Question) -> bool:
    return question.answer.casefold() in result.text.casefold()


def fact_row(loaded: LoadedModel, artifact: Artifact, document: str, question: Question) -> int:
    """The row of the context where the answer begins in the document, exact to a token or two."""
    document = document.strip()
    before = document[: document.index(question.fact) + question.fact.index(question.answer)]
    wrapping = artifact.manifest.build_notes["wrapping"]
    num_ids, num_before = (len(context_ids(loaded.tokenizer, text, wrapping)) for text in (document, before))
    return artifact.spec.context_len - (num_ids - num_before)


def _build(loaded: LoadedModel, document: str, store: Path) -> Path:
    plan = plan_text(document, DOCUMENT.name, BuildOptions(), loaded, "cpu")
    out.print(
        f"\nThe document is the handbook of an island that does not exist: {plan.spec.context_len} tokens. They pass "
        "through the model once; keys, values and an index of the keys go to the store, for every question to come."
    )
    report = run_build(loaded, plan, store)
    with open_artifact(report.path) as artifact:
        out.print(
            f"Artifact {report.artifact_id} has {size(artifact.size_bytes)}, "
            f"{size(artifact.index_bytes)} of them index.\n"
        )
    out.print(
        f"Now the questions. `csattn` searches the index and reads {100 * _CONFIG.keep:g} % of the rows besides the "
        f"first {_CONFIG.sink_len} and the last {_CONFIG.window_len} (by default {SearchConfig().window_len}, which "
        "would be most of the rows read of so short a text), and a few bits of all others; `full` reads all rows."
    )
    return report.path


def _ask(
    engine: StepEngine, loaded: LoadedModel, artifact: Artifact, question: Question, selector: SelectorName
) -> Answer:
    ids = question_tokens(loaded, artifact, question.text)
    return speak(engine, loaded, artifact, _CONFIG, selector, ids, _MAX_NEW_TOKENS, selector)


def _observe(
    engine: StepEngine,
    loaded: LoadedModel,
    artifact: Artifact,
    questions: tuple[Question, ...],
    pairs: list[tuple[Answer, Answer]],
) -> list[Exchange]:
    """Answer again, looking at every step: apart from the timed answers, because looking reads all keys."""
    exchanges = []
    out.print()
    with counting("comparing what was read with exact Top-K", len(questions), "answer") as bar:
        for question, (sparse, full) in zip(questions, pairs, strict=True):
            probe = AttentionProbe(artifact)
            ids = question_tokens(loaded, artifact, question.text)
            answer(engine, loaded, artifact, _CONFIG, ids, _MAX_NEW_TOKENS, observer=probe)
            recall, reads = probe.per_head(probe.recall), probe.per_head(probe.reads)
            exchanges.append(Exchange(question, sparse, full, recall, reads))
            bar.advance(1)
    return exchanges


def _draw(loaded: LoadedModel, artifact: Artifact, document: str, exchanges: list[Exchange], picture: Path) -> None:
    from workers.plots import AttentionPicture, draw_attention_map

    pictures = []
    for of in exchanges:
        row = fact_row(loaded, artifact, document, of.question)
        pictures.append(AttentionPicture(of.question.text, of.sparse.text, row, of.reads, of.recall))
    draw_attention_map(pictures, picture, artifact.spec.context_len, _CONFIG)


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - started
