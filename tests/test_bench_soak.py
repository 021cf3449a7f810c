"""The soak test itself, in small: it runs, and it sees what it is there to see."""

import asyncio
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from bench import soak
from bench.soak_targets import InProcess, Question, Reply, in_process
from bench.timing import GateError
from csattn.config import preset
from csattn.models import load_model
from csattn.models.prompt import choose_wrapping, context_ids
from index_build.pipeline import build_artifact
from tests.tiny import save
from workers.serving.contexts import name_artifact

CHARS = 600


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and a store in which the contexts are built already."""
    place = tmp_path_factory.mktemp("soak")
    loaded = load_model(str(save(place / "model")))
    wrapping = choose_wrapping(loaded.tokenizer)
    for number, password in enumerate(soak.PASSWORDS):
        ids = context_ids(loaded.tokenizer, soak.text_of(number, password, CHARS), wrapping)
        report = build_artifact(loaded, ids, preset("default"), place / "store", notes={"wrapping": wrapping})
        name_artifact(place / "store", f"soak-{number}", report.artifact_id, "float32")
    return place


def options(seconds: float) -> Namespace:
    return Namespace(url=None, model="tiny", streams=16, seconds=seconds, context_chars=CHARS, new_tokens=16, pid=None)


def measured(place: Path, seconds: float, kind: type[InProcess] = InProcess) -> dict:
    async def main() -> dict:
        async with in_process(str(place / "model"), place / "store", 16) as target:
            target.__class__ = kind
            return await soak.measure(target, options(seconds))

    return asyncio.run(main())


def test_streams_on_three_contexts_stay_right(place: Path) -> None:
    result = measured(place, 4.0)
    assert result["requests"] > 32
    assert result["errors"] == result["wrong_answers"] == result["foreign_words"] == 0
    assert result["ttft_p50_ms"] > 0 < result["tpot_p50_ms"]
    if sys.platform == "linux":
        assert result["rss_mb"] > 100


# Questions asked before the streams begin, of which each may come to ask only once.
NUM_ALONE = len(soak.PASSWORDS) * len(soak.ASKED)


class Wrong(InProcess):
    """Gives the streams' first answer, and some later ones, of another context."""

    num_asked = 0

    async def ask(self, question: Question) -> Reply:
        Wrong.num_asked += 1
        if Wrong.num_asked % (NUM_ALONE + 1) == 0:
            question = replace(question, context="soak-0" if question.context != "soak-0" else "soak-1")
        return await super().ask(question)


class Failing(InProcess):
    num_asked = 0

    async def ask(self, question: Question) -> Reply:
        Failing.num_asked += 1
        if Failing.num_asked > NUM_ALONE:
            raise RuntimeError("a fault")
        return await super().ask(question)


class Telling(InProcess):
    async def ask(self, question: Question) -> Reply:
        reply = await super().ask(question)
        return replace(reply, text=reply.text + soak.PASSWORDS[1])


@pytest.mark.parametrize(("kind", "words"), [(Wrong, "differ"), (Failing, "a fault"), (Telling, "another context")])
def test_what_is_not_right_is_seen(place: Path, kind, words) -> None:
    with pytest.raises(GateError, match=words):
        measured(place, 1.0, kind)
