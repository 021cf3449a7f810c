"""OpenAI's own client of the `service` fixture that a test file defines."""

from collections.abc import Iterator

import openai
import pytest

from tests.workers.api.running import KEY, Running


@pytest.fixture
def client(service: Running) -> Iterator[openai.OpenAI]:
    service.backend.scripts.clear()
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key=KEY, max_retries=0, timeout=10) as client:
        yield client
