"""The online half: decode from an artifact, in one process or as a service."""

from workers.session import Session, csattn_session

__all__ = ["Session", "csattn_session"]
