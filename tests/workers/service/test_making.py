"""From settings to an engine."""

import pytest

from tests.tiny import loaded
from workers.service.making import QUESTION_ROWS, make_engine
from workers.settings import EngineSettings, LimitSettings, Settings


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
