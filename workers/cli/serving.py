"""`csattn serve`: load the settings, run the service in one process or on Ray, and print its address."""

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, redirect_stdout, suppress
from dataclasses import asdict, replace
from importlib.util import find_spec
from json import dumps as to_json
from pathlib import Path
from threading import Event

from csattn.artifact.find import require_place_for_store
from csattn.cpus import multiplies_bfloat16
from csattn.errors import ConfigError
from csattn.selector_names import SELECTOR_NAMES
from csattn.signals import ending_signals
from workers.cli import signals
from workers.cli.terminal import err, output_that_may_fail, print_json, write
from workers.doctor.facts import ask, visible_gpus
from workers.service.addresses import listen, reserve_port
from workers.settings import EngineSettings, Settings, load_settings

_PACKAGES = ("fastapi", "prometheus_client", "uvicorn")  # needed with Ray and without


def serve(
    file: Path | None, flags: Mapping[str, object], contexts: Sequence[str], in_one_process: bool, json: bool
) -> None:
    """Serve until one of `ending_signals` arrives."""
    _require_packages(_PACKAGES if in_one_process else (*_PACKAGES, "ray"))
    is_ready = False

    def end() -> None:
        if is_ready:
            sys.exit(0)
        raise KeyboardInterrupt  # with the signal's exit code: a supervisor must not take it for a service that ran

    _on_signal(end)  # until the service has handlers of its own
    loaded = load_settings(file, os.environ, flags)
    pairs = [_pair(given) for given in contexts]
    settings = _chosen(_with_absolute_paths(loaded.settings), loaded.left_to_csattn, pairs)
    named = _named(settings, pairs)

    def on_ready(url: str, found: str) -> None:
        nonlocal is_ready
        is_ready = True
        of_openai = f"{url}/v1 (base_url of OpenAI's clients)"
        with output_that_may_fail():
            write(f"found {found}\nready at {url} (a browser, Anthropic's clients) and {of_openai}; Ctrl-C ends it\n")
            if json:
                print_json({"ready": True, "url": url, "base_url": f"{url}/v1", "pid": os.getpid(), "found": found})

    if in_one_process:
        _serve_here(settings, named, on_ready)
    else:
        _serve_on_ray(settings, named, on_ready)
    if not is_ready:
        end()
    err.print("ended")


def _require_packages(names: Sequence[str]) -> None:
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the service needs {', '.join(missing)}, which the base installation leaves out; run "
            "`pip install -c constraints.txt -e '.[serve]'`"
        )


def _with_absolute_paths(settings: Settings) -> Settings:
    """Make paths absolute, so that they hold in every process, and make the store's directory."""
    path = settings.store.path.absolute()
    require_place_for_store(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the store {path} cannot be used ({error.strerror}); name a directory that can be written with --store"
        ) from error
    model = settings.model
    if model.name is not None and os.path.exists(model.name):  # False for what cannot be a path
        model = replace(model, name=str(Path(model.name).absolute()))
    return replace(settings, store=replace(settings.store, path=path), model=model)


def _pair(given: str) -> tuple[str, str]:
    """Split NAME=ARTIFACT."""
    from workers.serving.contexts import require_name

    name, equals, artifact_id = given.partition("=")
    if not (equals and artifact_id):
        raise ConfigError(f"--context takes NAME=ARTIFACT, such as handbook=3f2a, got {given!r}")
    require_name(name)
    return name, artifact_id


def _chosen(settings: Settings, left: Sequence[str], contexts: Sequence[tuple[str, str]]) -> Settings:
    """Choose the settings that are left to csattn: see UNTIL_CHOSEN. contexts: names with artifacts.

    That is done in another process: this one may live as long as the service, and holds no memory of a device.
    """
    if "build.dtype" in left and contexts:
        from workers.serving.contexts import spec_named

        dtype = spec_named(settings.store.path, contexts[0][1]).kv_dtype
        settings = replace(settings, build=replace(settings.build, dtype=dtype))
        left = [key for key in left if key != "build.dtype"]
    engine, build, model = settings.engine, settings.build, settings.model
    may_use_gpu = engine.placement != "cpu" or ("engine.placement" in left and bool(visible_gpus()))
    has_choice_of_dtype = "build.dtype" in left and model.name is not None and multiplies_bfloat16()
    if not left or not (may_use_gpu or has_choice_of_dtype):
        return settings
    given = model.name, build.dtype, model.weights, build.preset, asdict(engine), left
    found = ask("auto", to_json(given))
    if may_use_gpu and (reason := found.get("error") or found["reason"]):
        err.print(f"decoding on the CPU: {reason}", soft_wrap=True)
    if "error" in found:
        return settings
    engine, build = replace(engine, placement=found["placement"]), replace(build, dtype=found["dtype"])
    return replace(settings, engine=engine, build=build)


def _named(settings: Settings, contexts: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return artifact ids by the names in --context, checked as far as possible without the model."""
    named: dict[str, str] = {}
    for name, artifact_id in contexts:
        from workers.serving.contexts import record_of

        found = str(record_of(settings.store.path, name, artifact_id, settings.build.dtype).artifact_id)
        _require_room(name, settings.store.path / found, settings.engine)
        if named.setdefault(name, found) != found:
            raise ConfigError(f"--context gives {name!r} to {named[name]} and to {found}; give each a name of its own")
    return named


def _require_room(name: str, artifact: Path, engine: EngineSettings) -> None:
    """Raise ConfigError for a context that engine.context_bytes has no room for: it could never be loaded."""
    if engine.context_bytes is None:
        return
    from csattn.artifact import read_manifest
    from workers.capacity import context_bytes

    num_bytes = sum(context_bytes(read_manifest(artifact).spec, engine.kv_format))
    if num_bytes > engine.context_bytes:
        raise ConfigError(
            f"the context {name!r} takes {num_bytes:,} bytes when it is loaded and engine.context_bytes is "
            f"{engine.context_bytes:,}; set it to at least that much, or leave it out"
        )


def _serve_here(settings: Settings, named: Mapping[str, str], on_ready: Callable[[str, str], None]) -> None:
    with closing(listen(settings.server)) as listener:
        err.print("loading the model")
        from workers.service.local_app import serve_locally

        if ended_by := serve_locally(settings, named, listener, on_ready):
            signals.record_signal(signal.Signals[ended_by])


def _serve_on_ray(settings: Settings, named: Mapping[str, str], on_ready: Callable[[str, str], None]) -> None:
    if (selector := settings.engine.selector) not in SELECTOR_NAMES:
        raise ConfigError(f"selector {selector} was registered only in this process; serve from it, with --local")
    from workers.service.ray_app import DRAIN_S, Stopped, service_on_ray

    port = settings.server.port
    stop_requested = Event()
    _on_signal(stop_requested.set)  # an exception could surface anywhere in Ray's code
    with ExitStack() as undo:
        if settings.ray.address is None or port == 0:  # else Serve may listen there already, since an earlier service
            port = undo.enter_context(reserve_port(settings.server)).getsockname()[1]
        err.print("starting Ray and the workers")
        undo.enter_context(suppress(Stopped))
        url, found = undo.enter_context(service_on_ray(settings, named, port, stop_requested))
        on_ready(url, found)
        with redirect_stdout(sys.stderr):  # Ray prints there which processes died
            stop_requested.wait()
            err.print(f"ending: running requests have {DRAIN_S:.0f} s to finish")


def _on_signal(act: Callable[[], object]) -> None:
    def handle(number: int, _: object) -> None:
        signals.record_signal(number)
        act()

    for number in ending_signals():
        signal.signal(number, handle)
