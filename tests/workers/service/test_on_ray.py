"""`csattn serve` on Ray: the answers of one process, whatever is killed meanwhile."""

import random
import re
from collections.abc import Iterator
from contextlib import closing

import pytest

from bench.faults import TARGETS, Plan, prepare, require_sound, try_kill
from tests.workers.api.running import eventually
from tests.workers.service.serving import Service, serving

pytestmark = pytest.mark.ray
QUESTIONS = ("When is lamp 7 lit?", "Which lamp is lit at 3?", "How many lamps are there?")
NUM_TOKENS = 150


@pytest.fixture(scope="module")
def on_ray(options: tuple[str, ...], local: Service) -> Iterator[Service]:
    """With search workers, over the store in which the service in one process has built a context."""
    pytest.importorskip("ray", reason="the package ray is not installed; pip install 'csattn[serve]'")
    with serving(*options, "--set", "engine.num_search_workers=2") as service:
        yield service
        assert service.process.poll() is None
    assert service.process.returncode == 0


def test_it_answers_as_one_process_does(on_ray: Service, local: Service) -> None:
    assert on_ray.get("/v1/contexts").json() == local.get("/v1/contexts").json()
    for question in QUESTIONS:
        told = list(on_ray.ask("model@lamps", question, NUM_TOKENS))
        assert "".join(told) == "".join(local.ask("model@lamps", question, NUM_TOKENS))
        assert len(told) > 1


def test_a_client_that_leaves_frees_its_slot(on_ray: Service) -> None:
    for _ in range(5):
        with closing(on_ray.ask("model@lamps", QUESTIONS[0], 600)) as pieces:
            next(pieces)
            assert running(on_ray) == 1.0
        assert eventually(lambda: running(on_ray) == 0.0, 2.0)


def running(service: Service) -> float:
    """Requests being decoded, as the worker measures it."""
    found = re.search(r'^csattn_running_requests{worker="attention-0"} (\S+)$', service.get("/metrics").text, re.M)
    assert found is not None
    return float(found[1])


def test_what_is_no_part_of_the_service_is_not_there(on_ray: Service) -> None:
    for path in ("/-/routes", "/-/healthz", "/docs"):
        reply = on_ray.get(path)
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize("target", TARGETS)
def test_killed_in_the_middle_of_answers(on_ray: Service, target: str) -> None:
    """Twice, but the attention worker: it takes the model's loading to come back."""
    plan = Plan("model@lamps", QUESTIONS, NUM_TOKENS)
    prepare(on_ray, plan)
    for seed in range(1 if target == "attention worker" else 2):
        trial = try_kill(on_ray, plan, target, random.Random(seed).uniform(0.0, 0.8))
        require_sound(target, trial)
        if target == "search worker":
            assert trial.outcomes == ["answered"] * len(QUESTIONS)
