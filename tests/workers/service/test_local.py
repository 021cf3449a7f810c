"""`csattn serve --local`: a context is built over HTTP and asked with OpenAI's client; it ends as it should."""

import re
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from csattn.artifact import find_artifact, open_artifact
from csattn.config import SearchConfig
from csattn.errors import CsattnError
from csattn.models import load_model
from tests.workers.service.serving import Service, run, serving
from workers.cli.serving import serve
from workers.engine.answer import answer, question_tokens
from workers.engine.opening import open_engine
from workers.settings import suited_lookahead

QUESTION = "When is lamp 7 lit?"
NUM_TOKENS = 24


def test_a_context_built_over_http_answers_as_the_command_line_does(
    local: Service, place: Path, options: tuple[str, ...]
) -> None:
    with local.client() as client:
        [alone, model] = client.models.list().data
        whole = client.chat.completions.create(
            model=model.id, messages=[{"role": "user", "content": QUESTION}], max_tokens=NUM_TOKENS
        )
    assert (alone.id, model.id) == ("model", "model@lamps")
    context = local.get("/v1/contexts/lamps").json()
    told = "".join(local.ask("model@lamps", QUESTION, NUM_TOKENS))
    loaded = load_model(str(place / "model"))
    [placement] = [option.partition("=")[2] for option in options if option.startswith("engine.placement=")]
    config = SearchConfig(keep=0.2, lookahead=suited_lookahead(placement))
    with (
        open_artifact(find_artifact(Path(options[1]), context["artifact_id"])) as artifact,
        open_engine(loaded, artifact, config, placement=placement) as engine,
    ):
        ids = question_tokens(loaded, artifact, QUESTION)
        wanted = answer(engine, loaded, artifact, config, ids, NUM_TOKENS)
    assert told == wanted.text
    assert whole.choices[0].message.content == told
    assert whole.usage is not None and whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == context["num_tokens"]


def test_an_artifact_is_served_by_name_and_a_running_answer_ends_before_the_service(
    options: tuple[str, ...], local: Service
) -> None:
    wanted = "".join(local.ask("model@lamps", QUESTION, 100))
    artifact_id = local.get("/v1/contexts/lamps").json()["artifact_id"]
    with serving("--local", *options, "--context", f"other={artifact_id[:6]}") as service:
        told: list[str] = []
        asking = threading.Thread(target=lambda: told.extend(service.ask("model@other", QUESTION, 100)))
        asking.start()
        while not told and asking.is_alive():
            time.sleep(0.001)
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(30) == 0
        asking.join()
    assert "".join(told) == wanted


def test_a_port_in_use_is_said_at_once(options: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run("--local", *options, "--port", str(taken.getsockname()[1]))
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.startswith("error: port ") and done.stderr.endswith(
        "name another with --port, or 0 for any that is free\n"
    )


@pytest.mark.parametrize(
    ("flags", "contexts", "words"),
    [
        ({"model.name": "no/such/model"}, [], "no/such/model"),
        ({}, ["book"], "--context takes NAME=ARTIFACT"),
        ({}, ["book=0123abcd"], "0123abcd"),
        ({}, ["../book=0123abcd"], "a context's name"),
        ({"server.host": "0.0.0.0"}, [], "there is no API key"),
        ({"store.path": "/dev/null/store"}, [], "/dev/null/store"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else None,
)
def test_what_cannot_be_served_is_a_sentence(
    place: Path, flags: dict[str, object], contexts: list[str], words: str
) -> None:
    given = {"server.port": 0, "store.path": place / "other", "model.name": str(place / "model"), **flags}
    with pytest.raises(CsattnError, match=re.escape(words)):
        serve(None, given, contexts, in_one_process=True, json=False)
