"""The HTTP side as a Serve deployment: it holds no model, and may have any number of replicas."""

from collections.abc import Sequence
from typing import Any

from workers.service.log_lines import log_to_stderr
from workers.service.ray_worker import RayWorker
from workers.service.spread_backend import SpreadBackend
from workers.settings import Settings


class Ingress:
    """A replica, made by Serve."""

    def __init__(self, settings: Settings, names: Sequence[str], namespace: str):
        log_to_stderr()
        self._settings = settings
        self._backend = SpreadBackend([RayWorker(name, namespace) for name in names])

    def __serve_build_asgi_app__(self) -> Any:  # the name that Serve calls
        from workers.api import make_app

        return make_app(self._backend, self._settings)
