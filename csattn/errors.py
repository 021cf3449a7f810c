"""Errors that callers may see. Every message says what came, what was wanted, and what to do."""


class CsattnError(Exception):
    """Base of all errors that this project raises on purpose."""


class ConfigError(CsattnError, ValueError):
    """An option is outside its range, or two options contradict each other."""


class ArrayError(CsattnError, ValueError):
    """An array has a shape, strides, a dtype or a device that the function does not take."""


class ContextError(CsattnError, ValueError):
    """A context is empty, too short for an index, or longer than the model's positions."""


class ModelError(CsattnError):
    """A model cannot be found, cannot be loaded, or has attention that this project does not reproduce."""


class CaptureError(CsattnError):
    """The prefill produced values that cannot be indexed (NaN or infinity)."""


class ArtifactError(CsattnError):
    """Base of everything that can be wrong with an artifact on disk."""


class ArtifactNotFoundError(ArtifactError):
    """The given place has no finished artifact."""


class ArtifactCorruptError(ArtifactError):
    """A file of the artifact is missing, truncated, altered, or not listed in its manifest."""


class ArtifactMismatchError(ArtifactError):
    """The artifact is sound but was made for another model, tokenizer or format version."""


class ArtifactRoomError(ArtifactError):
    """This process cannot open or map more files; the artifact itself may be sound."""


class StoreFullError(ArtifactError):
    """The store's file system refused a write; nothing was published."""


class SearchLostError(CsattnError):
    """A search worker does not start or does not answer, and no other could take over its searches."""


class DevicesError(CsattnError):
    """One of several devices that compute together could not do what the others can."""
