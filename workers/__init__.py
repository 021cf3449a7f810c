"""The online half: decode from an artifact, in one process or as a service."""

from typing import TYPE_CHECKING, Any

import csattn  # noqa: F401  # first, because it sets OpenMP's waiting policy before torch comes in

if TYPE_CHECKING:
    from workers.session import Session, csattn_session

__all__ = ["Session", "csattn_session"]


def __getattr__(name: str) -> Any:
    """Load the session when it is asked for: `csattn --help` should not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module 'workers' has no attribute {name!r}")
    from workers import session

    return getattr(session, name)


def __dir__() -> list[str]:
    """With what is not loaded yet: completion asks for it."""
    return sorted({*globals(), *__all__})
