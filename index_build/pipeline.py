"""Builds in this process: one context, layer by layer, on the device that the model is on."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.artifact import ArtifactWriter, cache_store, local_path, remote_store
from csattn.build_options import BuildOptions
from csattn.checks import require_text
from csattn.config import IndexConfig
from csattn.cpus import available_cpus
from csattn.models import LoadedModel
from csattn.models.loader import require_loaded
from csattn.torch_threads import require_threads
from index_build.board import Outcome
from index_build.build_layers import OnProgress, PhaseTimes, make_layers
from index_build.plan import Plan, make_plan, plan_text


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What a build did."""

    artifact_id: str
    path: Path
    reused: bool  # the artifact was there already
    resumed_at: int  # first layer of this run; more than 0 when an earlier run was interrupted
    seconds: dict[str, float]  # by phase, see `PhaseTimes`
    url: str | None = None  # when the store is a URL; then `path` is the copy on this machine, or where it would be

    @property
    def outcome(self) -> Outcome:
        return "reused" if self.reused else "resumed" if self.resumed_at else "built"

    @property
    def place(self) -> Path | str:
        """What `open_artifact` takes."""
        return self.url or self.path


def build_context(
    loaded: LoadedModel,
    text: str,
    store: Path | str,  # a directory, or a URL that fsspec knows
    *,
    preset: str = "default",
    chat: bool = True,  # wrap the text by the model's chat template, so that `Session.ask` continues it
    source: str = "a text",  # its name, for the manifest
    on_progress: OnProgress = lambda progress: None,  # is told where the build is, some times a layer
) -> BuildReport:
    """What `csattn build` makes of a text, on the device that the model is on; `report.place` is for `csattn_session`.

    Raises ConfigError for what is no text, no model or no store, ContextError for a text that is too short or too long,
    ArtifactError or StoreFullError when the store cannot be written.
    """
    require_text("a context", text)
    require_loaded(loaded)
    options = BuildOptions(preset=preset, chat=chat)
    plan = plan_text(text, source, options, loaded, loaded.device.type)
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
    """Prefill the context and write its KV and index to the store; go on where an interrupted build stopped.

    Raises ContextError for a context that is too short or too long, CaptureError for NaN and numbers that no index
    takes, ArtifactError or StoreFullError when the store cannot be written.
    """
    return build_plan(loaded, make_plan(loaded, token_ids, config, notes or {}), store, **options)


def build_plan(
    loaded: LoadedModel,
    plan: Plan,
    store: Path | str,
    *,
    on_progress: OnProgress = lambda progress: None,
    on_wait: Callable[[], None] = lambda: None,  # another process is building the same artifact
    num_threads: int | None = None,
    here: Path | None = None,  # where it is made for a store behind a URL; None: where this machine's copies are
    uploads: bool = True,
) -> BuildReport:
    """The same for a plan. An error leaves what was done for the next build."""
    remote, spec, times = remote_store(store), plan.spec, PhaseTimes()
    place = local_path(store) if remote is None else here or cache_store()
    told = times.seconds, None if remote is None else f"{remote.url}/{spec.artifact_id}"
    if remote is not None and remote.holds(spec.artifact_id):
        return BuildReport(spec.artifact_id, place / spec.artifact_id, True, 0, *told)
    with ArtifactWriter(place, spec, plan.token_ids, on_wait) as writer:
        reused, resumed_at = writer.finished_path is not None, writer.finished_layers
        if not reused:
            writer.require_space()
            require_threads()
            make_layers(loaded, plan, writer.work, num_threads or available_cpus(), on_progress, times)
            writer.finish(plan.versions, plan.notes)
    if remote is not None and uploads:
        remote.upload(place / spec.artifact_id)
    return BuildReport(spec.artifact_id, place / spec.artifact_id, reused, resumed_at, *told)
