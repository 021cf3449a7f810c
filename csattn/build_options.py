"""The options of a build that a user may set, with the defaults of the command line and of the service."""

from dataclasses import dataclass, fields
from typing import Any

from csattn.checks import require_model_name, require_one_of

COUNTS = ("num_fine", "num_coarse", "segment_len", "num_subspaces", "num_centroids")
AUTO = "auto"  # what csattn chooses by the machine
_INDEX_OPTIONS = (*COUNTS, "list_len", "kmeans")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """The options of `csattn build` that determine what is built. None means the preset's value, or the demo model.

    A line of a list of contexts may set any of these by its name.
    """

    model: str | None = None
    preset: str = "default"
    dtype: str = AUTO  # `csattn.models.loader.dtype_for`
    weights: str | None = None  # the format that the model's weights are rounded to: see `load_model`
    chat: bool = True
    num_fine: int | None = None
    num_coarse: int | None = None
    segment_len: int | None = None
    num_subspaces: int | None = None
    num_centroids: int | None = None
    list_len: float | None = None
    kmeans: str | None = None

    def __post_init__(self) -> None:
        require_model_name(self.model)
        require_one_of("chat", self.chat, (True, False))

    @property
    def index_changes(self) -> dict[str, Any]:
        """The options of the index by name; None where the preset decides."""
        return {name: getattr(self, name) for name in _INDEX_OPTIONS}

    @property
    def flags(self) -> list[str]:
        """All options as arguments of `csattn build`."""
        given = [(field.name.replace("_", "-"), getattr(self, field.name)) for field in fields(self)]
        switches = [f"--{name}" if value else f"--no-{name}" for name, value in given if isinstance(value, bool)]
        values = [(f"--{name}", str(value)) for name, value in given if not isinstance(value, bool | None)]
        return [*(part for option in values for part in option), *switches]
