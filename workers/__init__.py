"""The online half: decode from an artifact, in one process or as a service."""

from typing import TYPE_CHECKING, Any

import csattn  # noqa: F401  # first, because it sets OpenMP's waiting policy before torch is imported

if TYPE_CHECKING:
    from workers.session import Session, csattn_session

__all__ = ["Session", "csattn_session"]


def __getattr__(name: str) -> Any:
    """Import the session at first use, so that `csattn --help` does not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module 'workers' has no attribute {name!r}")
    from workers import session

    return getattr(session, name)


def __dir__() -> list[str]:
    """Include the names that are not imported yet, for tab completion."""
    return sorted({*globals(), *__all__})
