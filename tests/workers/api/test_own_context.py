"""A conversation that names no context brings its own: its system message."""

import asyncio
from dataclasses import replace

import pytest

from tests.workers.api.fake_backend import FakeBackend
from workers.api.own_context import PREFIX, with_own_context
from workers.serving.messages import Ask, BadRequestError, ContextNotReadyError, Sampling, Turn

TEXT = "Of lamps, their colours and their hours. " * 20
TURNS = Turn("system", TEXT), Turn("user", "Which are red?")


def ask(*turns: Turn) -> Ask:
    return Ask(request_id="1", context="", turns=turns, sampling=Sampling(max_new_tokens=3))


def found(backend: FakeBackend, asked: Ask, most: int = 2, outcome: str = "ready") -> Ask:
    """What building comes to is told a moment later."""

    async def run() -> Ask:
        finding = asyncio.create_task(with_own_context(backend, asked, most))
        while not finding.done():
            for name, info in list(backend.infos.items()):
                if info.state == "building":
                    what = "the disk is full" if outcome == "failed" else ""
                    backend.infos[name] = replace(info, state=outcome, progress=1.0, what=what)
            await asyncio.sleep(0.01)
        return await finding

    return asyncio.run(run())


def test_the_system_message_is_the_context_and_the_others_follow_it() -> None:
    backend = FakeBackend()
    first = found(backend, ask(*TURNS))
    assert first.context.startswith(PREFIX) and first.turns == TURNS[1:]
    assert backend.texts == {first.context: TEXT}
    again = found(backend, ask(TURNS[0], Turn("user", "And blue?")))
    assert again.context == first.context and len(backend.infos) == 1


@pytest.mark.parametrize("turns", [(), (TURNS[1],), (Turn("system", "Be brief."), TURNS[1])])
def test_without_a_long_system_message_a_context_has_to_be_named(turns: tuple[Turn, ...]) -> None:
    with pytest.raises(BadRequestError, match="role system and have 256 characters or more"):
        found(FakeBackend(), ask(*turns))


def test_what_cannot_be_built_is_said_and_forgotten() -> None:
    backend = FakeBackend()
    with pytest.raises(ContextNotReadyError, match="made of the system message: the disk is full"):
        found(backend, ask(*TURNS), outcome="failed")
    assert not backend.infos


def test_there_are_only_so_many_of_them() -> None:
    backend = FakeBackend()
    backend.add("handbook")
    for number in range(2):
        found(backend, ask(Turn("system", f"{number} {TEXT}"), TURNS[1]))
    with pytest.raises(BadRequestError, match="has made 2 contexts, as many as it may"):
        found(backend, ask(*TURNS))
    assert found(backend, ask(Turn("system", f"1 {TEXT}"), TURNS[1])).context in backend.infos
