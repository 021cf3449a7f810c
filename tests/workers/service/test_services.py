"""`csattn serve` in one process and on Ray, over one store: requests with OpenAI's client, failures, and the end.

All are in one file, because the tests of a file share the services that they start. Tests that do not need the service
on Ray come first: its processes keep the CPU busy as long as they run.
"""

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import jsonschema
import openai
import psutil
import pytest

from bench.faults import TARGETS, Plan, prepare, processes, require_sound, try_kill
from bench.schema_cases import schema_cases
from bench.schemas import ask_all
from bench.schemas import require_sound as require_sound_schemas
from csattn.artifact import find_artifact, open_artifact
from csattn.config import SearchConfig
from csattn.errors import CsattnError
from csattn.models import load_model
from tests.workers.api.running import eventually
from tests.workers.service.serving import Service, run
from tests.workers.serving.artifacts import build, text_of
from workers.cli.serving import serve
from workers.engine.answer import answer, question_tokens
from workers.engine.opening import open_engine
from workers.serving.context_file import ContextFile
from workers.settings import default_lookahead

MODEL = "chat@lamps"
NAMED = "chat@other"  # the same artifact, named on the command line
TURNS = 10
QUESTIONS = ("When is lamp 7 lit?", "Which lamp is lit at 3?", "How many lamps are there?")
NUM_TOKENS = 150
SCHEMA = {
    "type": "object",
    "properties": {"lamp": {"type": "integer"}, "is_lit": {"type": "boolean"}},
    "required": ["lamp", "is_lit"],
    "additionalProperties": False,
}


def function(name: str, **properties: str) -> dict[str, Any]:
    schemas = {
        key: {"type": kind, **({"maxLength": 6} if kind == "string" else {})} for key, kind in properties.items()
    }
    parameters = {"type": "object", "properties": schemas, "required": list(schemas), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": True}}


TOOLS: list[Any] = [
    function("switch", lamp="integer", on="boolean"),
    function("read_clock"),
    function("say", text="string"),
]


def test_a_conversations_beginning_becomes_a_context(local: Service, placement: str) -> None:
    if placement != "cpu":
        pytest.skip("what becomes a context is the same for every placement")
    with local.client() as client:
        text, told, turn = converse(client)
        salt = {"cache_salt": "x"}
        salted = client.chat.completions.create(model="chat", messages=told, max_tokens=8, extra_body=salt)
        assert cached(salted)[0] == 0 and salted.choices[0].message.content == turn.choices[0].message.content
        assert {model.id for model in client.models.list()} <= {"chat", MODEL, NAMED}, "they have no names"
        prompt = client.completions.create(model="chat", prompt=text, max_tokens=8)
        assert prompt.usage is not None and prompt.usage.prompt_tokens > 1000
        short = client.chat.completions.create(model="chat", messages=told[1:2], max_tokens=8)
        assert short.choices[0].message.content is not None


def converse(client: openai.OpenAI) -> tuple[str, list[Any], Any]:
    """Hold a conversation: a separate process builds a context of its long beginning, and each turn finds earlier ones
    cached. Returns the beginning, the messages sent and the last reply."""
    text = f"{client.base_url}: " + "".join(f"Door {door} opens at {door % 12}. " for door in range(60))
    told: list[Any] = [{"role": "system", "content": text}, {"role": "user", "content": "When does door 7 open?"}]
    first, again = (client.chat.completions.create(model="chat", messages=told, max_tokens=8) for _ in range(2))
    assert cached(first)[0] == 0 and cached(again)[0] >= cached(again)[1] - 64
    assert first.choices[0].message.content == again.choices[0].message.content
    told += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "And 8?"}]
    turn = client.chat.completions.create(model="chat", messages=told, max_tokens=8)
    assert cached(turn)[0] >= cached(again)[0]
    return text, told, turn


def cached(whole: Any) -> tuple[int, int]:
    return whole.usage.prompt_tokens_details.cached_tokens, whole.usage.prompt_tokens


def test_a_hundred_answers_fit_their_schemas(local: Service) -> None:
    report = ask_all(local.url, "chat@lamps", 100, seed=0)
    require_sound_schemas(report)
    assert report.counts.total() == 100


def test_schema_cases_depend_only_on_the_seed() -> None:
    assert schema_cases(200, 1) == schema_cases(200, 1) != schema_cases(200, 2)


def test_a_context_built_over_http_answers_like_the_command_line(
    local: Service, place: Path, placement: str, options: tuple[str, ...]
) -> None:
    with local.client() as client:
        [alone, model] = [model for model in client.models.list().data if model.id != NAMED]
        whole = client.chat.completions.create(
            model=model.id, messages=[{"role": "user", "content": QUESTIONS[0]}], max_tokens=24
        )
    assert (alone.id, model.id) == ("chat", MODEL)
    context = local.get("/v1/contexts/lamps").json()
    told = "".join(local.ask(MODEL, QUESTIONS[0], 24))
    loaded = load_model(str(place / "chat"))
    config = SearchConfig(keep=0.2, lookahead=default_lookahead(placement))
    with (
        open_artifact(find_artifact(Path(options[1]), context["artifact_id"])) as artifact,
        open_engine(loaded, artifact, config, placement=placement) as engine,
    ):
        ids = question_tokens(loaded, artifact, QUESTIONS[0])
        wanted = answer(engine, loaded, artifact, config, ids, 24)
    assert told == wanted.text
    assert whole.choices[0].message.content == told
    assert whole.usage is not None and whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == context["num_tokens"]


def test_serve_on_a_port_in_use_exits_with_the_reason(options: tuple[str, ...]) -> None:
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
        ({"model.name": "n" * 300}, [], "there is no model at nnn"),
        ({}, ["book"], "--context takes NAME=ARTIFACT"),
        ({}, ["book=0123abcd"], "0123abcd"),
        ({}, ["../book=0123abcd"], "a context's name"),
        ({"server.host": "0.0.0.0"}, [], "there is no API key"),
        ({"store.path": "/dev/null/store"}, [], "/dev/null/store"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else None,
)
def test_invalid_serve_options_are_refused_with_the_reason(
    place: Path, flags: dict[str, object], contexts: list[str], words: str
) -> None:
    given = {"server.port": 0, "store.path": place / "other", "model.name": str(place / "chat"), **flags}
    with pytest.raises(CsattnError, match=re.escape(words)):
        serve(None, given, contexts, in_one_process=True, json=False)


def test_a_name_for_two_artifacts_is_refused(place: Path) -> None:
    contexts = [f"book={build(place / 'two', text_of(secret))}" for secret in ("heron", "crane")]
    given = {"server.port": 0, "store.path": place / "two", "model.name": str(place / "chat")}
    with pytest.raises(CsattnError, match=r"--context gives 'book' to [0-9a-f]+ and to [0-9a-f]+; give each"):
        serve(None, given, contexts, in_one_process=True, json=False)


def test_a_context_larger_than_context_bytes_is_refused_at_the_start(place: Path) -> None:
    """Contexts on the command line are refused; for contexts that already have a name it is only logged."""
    store = place / "large"
    artifact_id = build(store, text_of("heron"))
    given = {"server.port": 0, "store.path": store, "model.name": str(place / "chat"), "engine.context_bytes": 1000}
    with pytest.raises(
        CsattnError, match=r"'heron' takes \d[\d,]+ bytes when .* and engine.context_bytes is 1,000; set"
    ):
        serve(None, given, [f"heron={artifact_id}"], in_one_process=True, json=False)
    assert not ContextFile(store).read()


def test_an_artifact_of_another_model_is_refused_at_the_start(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is not named in the store."""
    store = place / "of-another"
    artifact_id = build(store, text_of("heron"))
    given = {"server.port": 0, "store.path": store, "model.name": str(place / "chat")}
    with pytest.raises(CsattnError, match=r"the context's artifact cannot be used.*load the model that built it"):
        serve(None, given, [f"heron={artifact_id}"], in_one_process=True, json=False)
    assert "ready at" not in capsys.readouterr().out
    assert not ContextFile(store).read()


@pytest.fixture(scope="module", params=["local", pytest.param("on_ray", marks=pytest.mark.ray)])
def client(request: pytest.FixtureRequest, placement: str) -> Iterator[openai.OpenAI]:
    if placement != "cpu":
        pytest.skip("what crosses between clients and the service is the same for every placement")
    with request.getfixturevalue(request.param).client() as client:
        yield client


def endings(client: openai.OpenAI, text: str) -> dict[str, float]:
    """Return a logit bias for the tokens of `text` and against reasoning: random weights hardly ever end otherwise."""
    [think] = tokens_of(client, "<think>")
    return {str(think): -100, **dict.fromkeys(map(str, tokens_of(client, text)), 20)}


def tokens_of(client: openai.OpenAI, text: str) -> list[int]:
    told = client.post("/../tokenize", body={"prompt": text}, cast_to=httpx2.Response)
    return list(told.json()["tokens"])


def test_an_agent_calls_three_tools_over_many_turns(client: openai.OpenAI, request: pytest.FixtureRequest) -> None:
    """Each of ten turns (fewer on Ray) calls an existing tool, by its schema, and gets the result."""
    messages: list[Any] = [{"role": "user", "content": "Look after the lamps."}]
    bias = endings(client, '"},')
    by_name = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    called = []
    num_turns = TURNS if "local" in request.node.name else 3
    for turn in range(num_turns):
        message, reason = (streamed if turn % 2 else whole)(
            client, messages, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, logit_bias=bias,
            temperature=1.0, seed=turn, max_tokens=300,
        )  # fmt: skip
        assert reason == "tool_calls", message
        [call] = message["tool_calls"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), by_name[call["function"]["name"]])
        called.append(call["function"]["name"])
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": f"done: {turn}"}]
    ids = [message["tool_call_id"] for message in messages if message["role"] == "tool"]
    assert (set(called) == set(by_name) or num_turns < TURNS) and len(set(ids)) == num_turns
    last = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=5)
    assert last.choices[0].message.tool_calls is None


def whole(client: openai.OpenAI, messages: list[Any], **fields: Any) -> tuple[dict[str, Any], str]:
    choice = client.chat.completions.create(model=MODEL, messages=messages, **fields).choices[0]
    return choice.message.to_dict(), choice.finish_reason


def streamed(client: openai.OpenAI, messages: list[Any], **fields: Any) -> tuple[dict[str, Any], str]:
    with client.chat.completions.stream(model=MODEL, messages=messages, **fields) as stream:
        choice = stream.get_final_completion().choices[0]
    message = choice.message.to_dict()
    for call in message["tool_calls"]:  # type: ignore[attr-defined]
        call["function"].pop("parsed_arguments", None)
        call.pop("index", None)
    return {key: value for key, value in message.items() if key != "parsed"}, choice.finish_reason


def test_schema_answers_agree_between_choices_seeds_and_responses(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "lamp", "strict": True, "schema": SCHEMA}}
    asked: Any = {"messages": [{"role": "user", "content": "Which?"}], "max_tokens": 200, "temperature": 1.0, "seed": 3}
    bias = endings(client, "},")
    answers = client.chat.completions.create(model=MODEL, response_format=form, n=3, logit_bias=bias, **asked).choices
    for choice in answers:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)
    again = client.chat.completions.create(model=MODEL, response_format=form, logit_bias=bias, **{**asked, "seed": 4})
    assert again.choices[0].message.content == answers[1].message.content
    told = client.responses.create(
        model=MODEL, input="Which?", text={"format": {"type": "json_schema", "name": "lamp", "schema": SCHEMA}},
        temperature=1.0, max_output_tokens=200, extra_body={"logit_bias": bias, "seed": 3},
    )  # fmt: skip
    assert told.output_text == answers[0].message.content


def test_responses_call_a_tool_and_take_its_result(client: openai.OpenAI) -> None:
    tools: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
    choice: Any = {"type": "function", "name": "switch"}
    more: dict[str, Any] = {"model": MODEL, "tools": tools, "parallel_tool_calls": False, "max_output_tokens": 200}
    bias = {"logit_bias": endings(client, "},")}
    first = client.responses.create(input="Go!", tool_choice=choice, extra_body=bias, **more)
    [call] = first.output
    assert call.type == "function_call" and set(json.loads(call.arguments)) == {"lamp", "on"}
    items: list[Any] = [{"role": "user", "content": "Go!"}, call.to_dict()]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "done"})
    with client.responses.stream(input=items, tool_choice="required", extra_body=bias, **more) as stream:
        assert stream.get_final_response().output[0].type == "function_call"


def test_anthropics_client_calls_a_tool_and_takes_its_result(client: openai.OpenAI) -> None:
    tools: list[Any] = [{"name": "switch", "input_schema": TOOLS[0]["function"]["parameters"]}]
    bias = {"logit_bias": endings(client, "},")}
    turns: list[Any] = [{"role": "user", "content": "Go!"}]
    more: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "tools": tools, "extra_body": bias}
    url = str(client.base_url).removesuffix("/v1/")
    with anthropic.Anthropic(base_url=url, api_key=client.api_key, max_retries=0) as claude:
        first = claude.messages.create(messages=turns, tool_choice={"type": "tool", "name": "switch"}, **more)
        [call] = first.content
        assert call.type == "tool_use" and set(call.input) == {"lamp", "on"} and first.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "done"}
        turns += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        with claude.messages.stream(messages=turns, tool_choice={"type": "any"}, **more) as stream:
            answer = stream.get_final_message()
        assert [block.type for block in answer.content] == ["tool_use"]
        counted = claude.messages.count_tokens(model=MODEL, messages=turns[:1]).input_tokens
        free = claude.messages.create(model=MODEL, messages=turns[:1], max_tokens=20)
        assert free.usage.input_tokens + (free.usage.cache_read_input_tokens or 0) == counted
        assert free.content[0].type == "text"
        half = free.content[0].text[len(free.content[0].text) // 2 :][:3]
        cut = claude.messages.create(model=MODEL, messages=turns[:1], max_tokens=20, stop_sequences=["\x00", half])
        assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", half)


def test_echo_logprobs_are_complete_and_equal_for_ids_and_text(client: openai.OpenAI) -> None:
    ids = tokens_of(client, "Lamp 7 is lit at 7.")
    by_ids = client.completions.create(model=MODEL, prompt=[ids], echo=True, max_tokens=1, logprobs=1, temperature=0)
    by_text = client.completions.create(model=MODEL, prompt="Lamp 7 is lit at 7.", echo=True, max_tokens=1, logprobs=1)
    told = by_ids.choices[0].logprobs
    assert told is not None and told.token_logprobs is not None and told.top_logprobs is not None
    assert len(told.tokens or []) == len(ids) + 1 and told.token_logprobs[0] is None
    assert told == by_text.choices[0].logprobs and by_text.choices[0].text.startswith("Lamp 7 is lit at 7.")
    for logprob, top in zip(told.token_logprobs[1:], told.top_logprobs[1:], strict=True):
        assert logprob is not None and logprob <= max(top.values()) + 1e-9


def test_several_choices_equal_single_requests_with_their_seeds(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": MODEL, "prompt": "Lamp", "max_tokens": 12, "temperature": 1.0, "frequency_penalty": 0.7,
        "extra_body": {"top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1},
    }  # fmt: skip
    together = [choice.text for choice in client.completions.create(n=4, seed=10, **fields).choices]
    alone = [client.completions.create(seed=10 + n, **fields).choices[0].text for n in range(4)]
    assert together == alone and len(set(alone)) > 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True}}}},
            "response_format",
        ),
        ({"tools": [function("f")], "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "type"),
        ({"logit_bias": {"9999": 1}}, "logit_bias"),
        ({"n": 1000}, "n"),
    ],
)
def test_unsupported_requests_are_refused_with_the_field_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}], **fields}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, **asked)
    assert refused.value.param is not None and param in refused.value.param


@pytest.mark.ray
def test_the_service_on_ray_answers_like_the_local_one(on_ray: Service, local: Service) -> None:
    assert on_ray.get("/v1/contexts").json() == local.get("/v1/contexts").json()
    for question in QUESTIONS:
        told = list(on_ray.ask(MODEL, question, NUM_TOKENS))
        assert "".join(told) == "".join(local.ask(MODEL, question, NUM_TOKENS))
        assert len(told) > 1
    assert "".join(on_ray.ask(NAMED, QUESTIONS[0], 24)) == "".join(local.ask(MODEL, QUESTIONS[0], 24))


@pytest.mark.ray
def test_a_client_disconnect_frees_its_slot_on_ray(on_ray: Service) -> None:
    for _ in range(5):
        with closing(on_ray.ask(MODEL, QUESTIONS[0], 600)) as pieces:
            next(pieces)
            assert running(on_ray) == 1.0
        assert eventually(lambda: running(on_ray) == 0.0, 2.0)


def running(service: Service) -> float:
    """Return the number of requests being decoded, as the worker measures it."""
    found = re.search(r'^csattn_running_requests{worker="attention-0"} (\S+)$', service.get("/metrics").text, re.M)
    assert found is not None
    return float(found[1])


@pytest.mark.ray
def test_serves_own_paths_return_404(on_ray: Service) -> None:
    for path in ("/-/routes", "/-/healthz", "/docs"):
        reply = on_ray.get(path)
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.ray
def test_ray_processes_have_the_services_priority(on_ray: Service) -> None:
    own = os.getpriority(os.PRIO_PROCESS, on_ray.process.pid)
    for target in TARGETS:
        pids = processes(on_ray, target)
        assert pids and {os.getpriority(os.PRIO_PROCESS, pid) for pid in pids} == {own}


@pytest.mark.ray
def test_a_conversations_beginning_becomes_a_context_on_ray(on_ray: Service, placement: str) -> None:
    """Tested late: the standby process for builds runs by now, and ends with its worker before another one starts."""
    if placement != "cpu":
        pytest.skip("what becomes a context is the same for every placement")
    with on_ray.client() as client:
        converse(client)


@pytest.fixture(scope="module")
def plan(on_ray: Service) -> Plan:
    plan = Plan(MODEL, QUESTIONS, NUM_TOKENS)
    prepare(on_ray, plan)
    return plan


@pytest.mark.ray
@pytest.mark.parametrize(("target", "share"), list(zip(TARGETS, (0.7, 0.4, 0.1), strict=True)))
def test_answers_survive_or_fail_cleanly_when_a_process_is_killed(
    on_ray: Service, plan: Plan, target: str, share: float
) -> None:
    """A process is killed once, when `share` of the answers has arrived; `bench.faults` does so at length."""
    trial = try_kill(on_ray, plan, target, share)
    require_sound(target, trial)
    if target == "search worker":
        assert trial.outcomes == ["answered"] * len(QUESTIONS)


@pytest.mark.ray
def test_a_killed_proxy_is_noticed_and_restarted_soon(on_ray: Service) -> None:
    """Three failed health checks reveal it. A killed proxy is started again."""

    def started(title: str) -> psutil.Process:
        children = psutil.Process(on_ray.process.pid).children(recursive=True)
        return next(child for child in children if (child.cmdline() or [""])[0].startswith(title))

    controller, head = started("ray::ServeController"), on_ray.process.pid
    assert controller.environ()["RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S"] == "1"
    ours = controller, *psutil.Process(head).children()
    assert sum("RAY_ROTATION_MAX_BYTES" in process.environ() for process in ours) > 2, "no log grows for ever"
    started("ray::ProxyActor").kill()
    assert eventually(lambda: not is_ready(on_ray), 10.0)
    on_ray.wait_until_ready(15.0)  # with the default period it takes 25 to 29 s


def is_ready(service: Service) -> bool:
    try:
        return service.get("/ready").status_code == 200
    except httpx2.HTTPError:
        return False


@pytest.mark.parametrize("name", [pytest.param("on_ray", marks=pytest.mark.ray), "local"])
def test_a_running_answer_is_completed_before_the_service_exits(
    request: pytest.FixtureRequest, placement: str, name: str
) -> None:
    """The last test of this file: it ends the services that the others use, as systemd and terminals do."""
    service: Service = request.getfixturevalue(name)
    wanted = "".join(service.ask(MODEL, QUESTIONS[0], 100))
    told: list[str] = []
    asking = threading.Thread(target=lambda: told.extend(service.ask(MODEL, QUESTIONS[0], 100)))
    asking.start()
    while not told and asking.is_alive():
        time.sleep(0.001)
    started = psutil.Process(service.process.pid).children(recursive=True)
    for sent in (signal.SIGTERM, signal.SIGHUP):
        os.killpg(service.process.pid, sent)
    assert service.process.wait(30) == 0
    asking.join()
    assert "".join(told) == wanted
    assert eventually(lambda: not any(process.is_running() for process in started), 5.0)
