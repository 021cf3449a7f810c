"""The service over HTTP: OpenAI's endpoints, contexts, metrics, and a status page.

app = make_app(backend, settings)  # for uvicorn and for Ray Serve
"""

from workers.api.app import make_app
from workers.api.server import server_of

__all__ = ["make_app", "server_of"]
