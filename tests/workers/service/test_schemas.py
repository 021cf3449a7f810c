"""A hundred schemas against a model of random weights, whose every answer must be of its schema."""

from bench.schema_cases import schema_cases
from bench.schemas import ask_all, require_sound
from tests.workers.service.serving import Service


def test_every_answer_is_of_its_schema(talking: Service) -> None:
    report = ask_all(talking.url, "chat@lamps", 100, seed=0)
    require_sound(report)
    assert report.counts.total() == 100


def test_the_same_seed_has_the_same_schemas() -> None:
    assert schema_cases(200, 1) == schema_cases(200, 1) != schema_cases(200, 2)
