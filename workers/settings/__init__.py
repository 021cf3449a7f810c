"""The settings of the service, each value with its origin.

loaded = load_settings(Path("csattn.toml"), os.environ, {"server.port": 9000})
loaded.settings.server.port, loaded.leaves["server.port"].origin
"""

from workers.settings.load import Loaded, load_settings
from workers.settings.parts import (
    BuildSettings,
    EngineSettings,
    KeptSettings,
    LimitSettings,
    ModelSettings,
    RaySettings,
    Secret,
    ServerSettings,
    Settings,
    StoreSettings,
    default_lookahead,
)
from workers.settings.show import describe, example
from workers.settings.sources import Leaf, Origin

__all__ = [
    "BuildSettings",
    "EngineSettings",
    "KeptSettings",
    "Leaf",
    "LimitSettings",
    "Loaded",
    "ModelSettings",
    "Origin",
    "RaySettings",
    "Secret",
    "ServerSettings",
    "Settings",
    "StoreSettings",
    "default_lookahead",
    "describe",
    "example",
    "load_settings",
]
