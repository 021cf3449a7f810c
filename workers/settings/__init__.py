"""The settings of the service, each value with its origin.

loaded = load_settings(Path("csattn.toml"), os.environ, {"server.port": 9000})
loaded.settings.server.port, loaded.leaves["server.port"].origin
"""

from workers.settings.load import load_settings
from workers.settings.parts import (
    UNTIL_CHOSEN,
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

__all__ = [
    "UNTIL_CHOSEN",
    "BuildSettings",
    "EngineSettings",
    "KeptSettings",
    "LimitSettings",
    "ModelSettings",
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
