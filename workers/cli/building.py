"""`csattn build`: read the context, load the model, run the build, show its progress."""

from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

from csattn.artifact import is_url, local_path, read_manifest
from csattn.artifact.durable import unsynced
from csattn.artifact.find import require_place_for_store
from csattn.build_options import BuildOptions
from csattn.checks import require_num_threads
from csattn.cpus import available_cpus
from csattn.errors import ConfigError
from csattn.models import LoadedModel, load_model
from csattn.models.loader import is_to_be_converted, require_dtype_and_rounding
from csattn.models.prompt import num_special, require_not_far_too_long
from csattn.models.quantized_model import drop_quantized
from csattn.models.source import model_name
from index_build.inputs import choose_device, make_config, read_text, read_tokens, with_dtype
from index_build.pipeline import BuildReport, build_plan
from index_build.plan import Plan, plan_text, plan_tokens
from workers.capacity import require_room_for_weights
from workers.cli.terminal import BuildDisplay, JsonProgress, err
from workers.serving.context_build import WAITS
from workers.words import counted


def build(
    context: str | None,  # a text file, or - for standard input
    tokens: Path | None,  # instead: a list of token ids in JSON
    options: BuildOptions,
    store: Path | str,
    *,
    device: str,
    threads: int | None,
    progress: str,
    sync: bool,
) -> dict[str, Any]:
    """Build and return the command's JSON object. sync: the artifact survives a power failure."""
    use_threads(threads)
    device = choose_device(device)
    make_config(options.preset, options.index_changes, device)  # invalid options fail before a model is loaded
    if not is_url(store):
        require_place_for_store(local_path(store))
    ids = None if tokens is None else (read_tokens(tokens), tokens.name)
    text = "" if context is None else read_text(context)
    options = with_dtype(options, device)
    loaded = show_loading(options.model, options.dtype, device, weights=options.weights)
    drop_quantized(loaded.model)
    if ids is not None:
        plan = plan_tokens(*ids, options, loaded, device)
    else:
        require_not_far_too_long(text, loaded)
        if progress != "json":  # there, the last text on stderr is taken for the reason of a failure
            _warn_of_special_tokens(loaded, text)
        plan = plan_text(text, "stdin" if context == "-" else Path(str(context)).name, options, loaded, device)
    with nullcontext() if sync else unsynced():
        report = run_build(loaded, plan, store, as_json=progress == "json")
    manifest = read_manifest(report.place)
    return {
        "artifact": report.artifact_id,
        "path": str(report.place),
        "reused": report.reused,
        "resumed_at_layer": report.resumed_at,
        "device": device,
        "dtype": options.dtype,
        "index_config": plan.spec.index_config.to_json(),
        "context_len": manifest.spec.context_len,
        "size_bytes": manifest.size_bytes,
        "index_bytes": manifest.index_bytes,
        "seconds": {phase: round(seconds, 3) for phase, seconds in report.seconds.items()},
    }


def _warn_of_special_tokens(loaded: LoadedModel, text: str) -> None:
    """Warn of special tokens: with them, a text that somebody else has written may end its own message."""
    if number := num_special(loaded.tokenizer, text):
        err.print(
            f"the text holds {counted(number, 'special token')} of the model, such as the end of a message; the model "
            "reads special tokens as such, not as text",
            soft_wrap=True,
        )


def run_build(loaded: LoadedModel, plan: Plan, store: Path | str, *, as_json: bool = False) -> BuildReport:
    """Build with a progress display."""
    with nullcontext(JsonProgress(plan.spec.artifact_id)) if as_json else BuildDisplay() as display:
        report = build_plan(loaded, plan, store, on_progress=display, on_wait=lambda: err.print(WAITS))
    if report.reused:
        err.print("this context was built before with the same model and options; nothing to do")
    return report


def show_loading(
    model: str | None, dtype: str, device: str = "cpu", stretch: float = 1.0, weights: str | None = None
) -> LoadedModel:
    """Load a model, and print so: a first load may convert it, which takes minutes."""
    require_dtype_and_rounding(dtype, weights)
    first = f", converted to {dtype} once" if is_to_be_converted(model, dtype) else ""
    where = f" onto the GPU, in {dtype}" if device == "cuda" else ""
    err.print(f"loading {model_name(model)}{first}{where}", soft_wrap=True)
    return _load_model(model, dtype, device, stretch, weights)


def _load(model: str | None, dtype: str, device: str, stretch: float, weights: str | None) -> LoadedModel:
    require_room_for_weights(model, dtype, weights)
    return load_model(model, dtype, device, stretch, weights, may_offload=True)


_load_model = _load


def keep_model() -> None:
    """Cache the last loaded model, for a process that builds more than once."""
    global _load_model
    _load_model = lru_cache(maxsize=1)(_load)


def require_progress(progress: str) -> None:
    if progress not in ("auto", "json"):
        raise ConfigError(f"--progress must be auto or json, got {progress!r}")


def use_threads(threads: int | None) -> None:
    """Set the number of torch's threads; None: one per available CPU."""
    import torch

    if threads is not None:
        require_num_threads("--threads", threads)
    torch.set_num_threads(threads or available_cpus())
