"""The offline half: prefill a context once, index its keys by its queries, write the artifact."""

from typing import TYPE_CHECKING, Any

import csattn  # noqa: F401  # first, because it sets OpenMP's waiting policy before torch is imported

if TYPE_CHECKING:
    from index_build.pipeline import BuildReport, build_context

__all__ = ["BuildReport", "build_context"]


def __getattr__(name: str) -> Any:
    """Import the build on first use: `csattn --help` should not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module 'index_build' has no attribute {name!r}")
    from index_build import pipeline

    return getattr(pipeline, name)


def __dir__() -> list[str]:
    """Include names that are not imported yet, for completion."""
    return sorted({*globals(), *__all__})
