"""A conversation without a named context brings its own: the system message that it begins with.

What was sent once is there the next time, for whoever sends it: its name follows from the text.
"""

import asyncio
from dataclasses import replace
from hashlib import sha256

from workers.api.contexts import find_context
from workers.serving.backend import Backend
from workers.serving.messages import Ask, BadRequestError, ContextNotReadyError, NewContext

PREFIX = "system-"
LEAST_CHARS = 256  # an index needs as many tokens, and no token is less than a character
_POLL_S = 0.2


async def with_own_context(backend: Backend, ask: Ask, most: int) -> Ask:
    """The same request of the context that its first message is, which is built now if it is not there.

    most: contexts of that kind that there may be. Raises a ServingError where there is no such message, or no context
    can be made of it.
    """
    if not ask.turns or ask.turns[0].role != "system" or len(ask.turns[0].content) < LEAST_CHARS:
        raise BadRequestError(
            f"the model is named without a context, so the first message has to be of the role system and have "
            f"{LEAST_CHARS} characters or more: a context is made of it; send one, or name a context that GET "
            "/v1/models lists",
            "model",
        )
    text = ask.turns[0].content
    name = PREFIX + sha256(text.encode(errors="replace")).hexdigest()[:16]
    known = {info.name for info in await backend.contexts() if info.name.startswith(PREFIX)}
    if name not in known and len(known) >= most:
        raise BadRequestError(
            f"of system messages this service has made {len(known)} contexts, as many as it may "
            f"(limits.max_own_contexts); delete one by DELETE /v1/contexts/{min(known)}, or name a context",
            "model",
        )
    info = await backend.register(NewContext(name=name, text=text))
    while info.state == "building":
        await asyncio.sleep(_POLL_S)
        info = find_context(await backend.contexts(), name)
    if info.state == "failed":
        await backend.delete(name)
        raise ContextNotReadyError(f"no context could be made of the system message: {info.what}")
    return replace(ask, context=name, turns=ask.turns[1:])
