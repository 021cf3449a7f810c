"""What the HTTP side asks of the side that decodes: in the same process, or behind Ray."""

from collections.abc import AsyncGenerator
from typing import Protocol

from prometheus_client import Metric

from workers.serving.messages import Ask, ContextInfo, Event, Health, Standing, TokenizeAsk, Tokens


class Backend(Protocol):
    """Every method may raise a ServingError; nothing else is raised for what a client did."""

    def generate(self, ask: Ask) -> AsyncGenerator[Event, None]:
        """Pieces as they come, then one Done.

        A request that is not admitted raises before the first event. Closing the generator ends the request: its slot
        is free within one step.
        """
        ...

    async def tokenize(self, ask: TokenizeAsk) -> Tokens: ...

    async def detokenize(self, ids: tuple[int, ...]) -> str: ...

    async def contexts(self, name: str | None = None) -> list[ContextInfo]:
        """All; or the one of that name, where there is one, without a look at the others' files."""
        ...

    async def register(self, name: str, text: str) -> ContextInfo:
        """Start building; the same name with the same text again is the same context."""
        ...

    async def delete(self, name: str) -> None:
        """Forget a context: new requests are refused, running ones finish. Its artifact stays in the store."""
        ...

    async def workers(self) -> dict[str, Standing | None]:
        """Those that decode, by name; None while one does not answer."""
        ...

    async def health(self) -> Health: ...

    async def metrics(self) -> list[Metric]: ...
