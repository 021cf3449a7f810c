"""From settings to an engine."""

import pytest

from csattn.errors import ConfigError
from tests.tiny import loaded
from tests.workers.searchers.searching import Threads
from workers.searchers.worker import choose_cpus
from workers.service import making
from workers.service.making import QUESTION_ROWS, make_backend, make_engine, make_searcher
from workers.settings import EngineSettings, LimitSettings, RaySettings, Settings


@pytest.mark.parametrize(("num_requests", "max_rows"), [(1, QUESTION_ROWS), (QUESTION_ROWS + 4, QUESTION_ROWS + 4)])
def test_a_step_has_rows_for_a_piece_of_a_question_however_few_requests_there_may_be(
    num_requests: int, max_rows: int
) -> None:
    settings = Settings(
        limits=LimitSettings(max_concurrent_requests=num_requests), engine=EngineSettings(num_threads=1)
    )
    engine = make_engine(settings, loaded(), None)
    try:
        assert (engine.max_rows, engine.num_slots) == (max_rows, num_requests)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("placement", "selector", "where"),
    [
        ("device", "csattn", "where the GPU searches"),
        ("hybrid", "csattn", "where the GPU searches"),
        ("host", "full", "where nothing is searched"),
    ],
)
def test_search_workers_that_would_search_nothing_are_refused(
    placement: str, selector: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(making, "require_device", lambda: None)
    settings = Settings(engine=EngineSettings(placement=placement, selector=selector, num_search_workers=2))
    with pytest.raises(ConfigError, match=f"num_search_workers is 2, engine.placement {placement} and .*, {where}"):
        make_backend(settings, Threads())


def test_a_selector_that_no_gpu_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "require_device", lambda: None)
    with pytest.raises(ConfigError, match="selector is 'quest', but a GPU decodes with csattn or full"):
        make_backend(Settings(engine=EngineSettings(placement="hybrid", selector="quest")), Threads())


@pytest.mark.parametrize("num_attention_workers", [1, 2])
def test_search_workers_of_the_only_attention_worker_keep_to_cpus(num_attention_workers: int) -> None:
    launch = Threads()
    settings = Settings(
        engine=EngineSettings(num_search_workers=1, num_threads=1),
        ray=RaySettings(num_attention_workers=num_attention_workers),
    )
    searcher = make_searcher(settings, launch)
    assert searcher is not None
    searcher.close()
    [worker] = launch.started
    assert worker.worker.spec.cpus == (choose_cpus(1) if num_attention_workers == 1 else None)
