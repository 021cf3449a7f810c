"""The interface of the HTTP side to the side that decodes, in the same process or on Ray."""

from collections.abc import AsyncGenerator
from typing import Protocol

from prometheus_client import Metric

from workers.serving.messages import Ask, ContextInfo, Event, Health, TokenizeAsk, Tokens, WorkerStatus


class Backend(Protocol):
    """Answers requests. Every method may raise a ServingError, and raises nothing else for a client's mistake."""

    def generate(self, ask: Ask) -> AsyncGenerator[Event, None]:
        """Yield the answer's Pieces as they come, then one Done.

        If the request is not admitted, the error is raised before the first event. Closing the generator ends the
        request: its request slot is free within one step.
        """
        ...

    async def tokenize(self, ask: TokenizeAsk) -> Tokens: ...

    async def detokenize(self, ids: tuple[int, ...]) -> str: ...

    async def contexts(self, name: str | None = None) -> list[ContextInfo]:
        """Return all contexts, or only the one of that name, if any, without reading the others' files."""
        ...

    async def register(self, name: str, text: str) -> ContextInfo:
        """Start to build a context. Registering the same name with the same text again returns the same context."""
        ...

    async def delete(self, name: str) -> None:
        """Forget a context: new requests are refused, running ones finish. Its artifact stays in the store."""
        ...

    async def workers(self) -> dict[str, WorkerStatus | None]:
        """Return the state of each attention worker by name; None for one that does not answer."""
        ...

    async def health(self) -> Health: ...

    async def metrics(self) -> list[Metric]: ...
