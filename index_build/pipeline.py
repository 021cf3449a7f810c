"""Build one context in this process, layer by layer, on the model's device."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.artifact import ArtifactWriter, cache_store, local_path, remote_store
from csattn.build_options import BuildOptions
from csattn.checks import require_num_threads, require_text
from csattn.config import IndexConfig
from csattn.cpus import available_cpus
from csattn.errors import ConfigError
from csattn.models import LoadedModel
from csattn.models.loader import require_loaded
from csattn.plain_text import as_read
from csattn.torch_modes import without_modes
from csattn.torch_threads import require_threads
from index_build.board import Outcome
from index_build.build_layers import OnProgress, PhaseTimes, make_layers
from index_build.plan import Plan, make_plan, plan_text


@dataclass(frozen=True, slots=True)
class BuildReport:
    """The result of a build."""

    artifact_id: str
    path: Path
    reused: bool  # the artifact existed already
    resumed_at: int  # the first layer of this run; more than 0 if an earlier run was interrupted
    seconds: dict[str, float]  # by phase, see `PhaseTimes`
    url: str | None = None  # if the store is a URL; then `path` is the local copy, or where it would be

    @property
    def outcome(self) -> Outcome:
        return "reused" if self.reused else "resumed" if self.resumed_at else "built"

    @property
    def place(self) -> Path | str:
        """The artifact's URL or path, for `open_artifact`."""
        return self.url or self.path


def build_context(
    loaded: LoadedModel,
    text: str,
    store: Path | str,  # a directory, or a URL that fsspec knows
    *,
    preset: str = "default",
    chat: bool = True,  # wrap the text by the model's chat template, so that `Session.ask` continues it
    source: str | Path = "a text",  # its name, for the manifest
    on_progress: OnProgress = lambda progress: None,  # called several times a layer
) -> BuildReport:
    """Build the artifact of a text on the model's device, as `csattn build` does; open `place` with `csattn_session`.

    Raises ConfigError for an invalid text, model or store, ContextError for a text that is too short or too long,
    ArtifactError or StoreFullError if the store cannot be written.
    """
    require_text("a context", text)
    if not isinstance(source, str | Path):
        raise ConfigError(f"source is the name of the text, got {source!r}; give it as text, or leave it out")
    require_loaded(loaded)
    options = BuildOptions(preset=preset, chat=chat)
    plan = plan_text(as_read(text), str(source), options, loaded, loaded.device.type)
    return build_plan(loaded, plan, store, on_progress=on_progress)


def build_artifact(
    loaded: LoadedModel,
    token_ids: NDArray[np.int32],  # [context_len]
    config: IndexConfig,
    store: Path | str,  # a directory, or a URL that fsspec knows
    *,
    notes: dict[str, Any] | None = None,  # JSON, kept in the manifest
    **options: Any,  # of `build_plan`
) -> BuildReport:
    """Prefill the context and write its KV and index to the store; resume an interrupted build.

    Raises ContextError for a context that is too short or too long, CaptureError for NaN and numbers that are too large
    for an index, ArtifactError or StoreFullError if the store cannot be written.
    """
    return build_plan(loaded, make_plan(loaded, token_ids, config, notes or {}), store, **options)


@without_modes()  # an id stands for the same bytes, whoever builds it
def build_plan(
    loaded: LoadedModel,
    plan: Plan,
    store: Path | str,
    *,
    on_progress: OnProgress = lambda progress: None,
    on_wait: Callable[[], None] = lambda: None,  # called before waiting for another process that builds the artifact
    num_threads: int | None = None,  # default: all available CPUs
    here: Path | None = None,  # local directory of the build for a store behind a URL; None: that of local copies
    uploads: bool = True,
) -> BuildReport:
    """Build a planned artifact: see `build_artifact`. After an error, the next build resumes from what was done."""
    if num_threads is not None:
        require_num_threads("num_threads", num_threads)
    remote, spec, times = remote_store(store), plan.spec, PhaseTimes()
    place = local_path(store) if remote is None else here or cache_store()
    report_fields = times.seconds, None if remote is None else f"{remote.url}/{spec.artifact_id}"
    if remote is not None and remote.holds(spec.artifact_id):
        return BuildReport(spec.artifact_id, place / spec.artifact_id, True, 0, *report_fields)
    with ArtifactWriter(place, spec, plan.token_ids, on_wait) as writer:
        reused, resumed_at = writer.finished_path is not None, writer.finished_layers
        if not reused:
            writer.require_space()
            require_threads()
            make_layers(loaded, plan, writer.work, num_threads or available_cpus(), on_progress, times)
            writer.finish(plan.versions, plan.notes)
    if remote is not None and uploads:
        remote.upload(place / spec.artifact_id)
    return BuildReport(spec.artifact_id, place / spec.artifact_id, reused, resumed_at, *report_fields)
