"""The HTTP side as a Serve deployment: it holds no model, and any number of replicas may stand beside each other."""

from collections.abc import Sequence
from typing import Any

from workers.service.log_lines import log_to_stderr
from workers.service.ray_worker import RayWorker
from workers.service.spread_backend import SpreadBackend
from workers.settings import Settings


class Ingress:
    """Made by Serve in each replica."""

    def __init__(self, settings: Settings, names: Sequence[str], namespace: str):
        log_to_stderr()
        self._settings = settings
        self._backend = SpreadBackend([RayWorker(name, namespace) for name in names])

    def __serve_build_asgi_app__(self) -> Any:  # Serve asks for it by this name
        from workers.api import make_app

        return make_app(self._backend, self._settings)
