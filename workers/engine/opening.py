"""Opens an engine for one artifact, in any placement."""

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any

from csattn.artifact import Artifact
from csattn.checks import require_at_least, require_num_threads
from csattn.config import SearchConfig
from csattn.errors import ConfigError
from csattn.models import LoadedModel
from csattn.models.loader import require_loaded
from csattn.selector_names import SelectorName, selector_named
from offload.codecs.formats import KvFormat
from offload.errors import CodecError, TierError
from offload.sizes import parse_size
from workers.engine.cpu.context import WITHOUT_ALL_KEYS, HostBudget
from workers.engine.cpu.engine import CpuEngine
from workers.engine.gpu.engine import GpuEngine, require_selector
from workers.engine.gpu.memory import PLACEMENTS, Placement
from workers.engine.gpu.split_engine import SplitEngine

# the command line's name, and a former one, that are too different to be guessed
_ALIASES = {"kv_codec": "kv_format", "num_slots": "max_requests"}
_DOCUMENTED = {  # options of `csattn_session`
    "host_budget_bytes",
    "kv_format",
    "num_devices",
    "max_requests",
    "num_threads",
    "placement",
    "slot_share",
    "tail_capacity",
}


def open_engine(
    loaded: LoadedModel,
    artifact: Artifact,
    config: SearchConfig,
    selector: SelectorName | str = "csattn",
    *,
    placement: str = "cpu",  # or one of PLACEMENTS, on a GPU
    kv_format: KvFormat | str | None = None,  # of the context's rows, or its name; None: as the artifact maps them
    host_budget_bytes: int | str | None = None,  # host memory for the context's rows, or text as 64MiB; None: no limit
    max_requests: int | None = None,  # requests at the same time; default: 16 on the CPU, 4 on a GPU
    tail_capacity: int | None = None,  # own rows of a request; default: what positions and memory allow
    num_devices: int = 1,  # GPUs that divide the heads
    **options: Any,  # of the engine
) -> CpuEngine | GpuEngine | SplitEngine:
    """Open an engine with the artifact as context 0, for requests with this configuration.

    Close it before the artifact. Raises an error that names a remedy if the arguments do not go together.
    """
    host_budget_bytes = _bytes_of(host_budget_bytes)
    counts = {"max_requests": max_requests, "tail_capacity": tail_capacity, "num_devices": num_devices}
    _require_kinds(loaded, artifact, config, host_budget_bytes=host_budget_bytes, **counts)
    if options.get("num_threads") is not None:
        require_num_threads("num_threads", options["num_threads"])
    kv_format = _kv_format_of(kv_format)
    require_together(placement, selector, host_budget_bytes, num_devices, kv_format)
    on_gpu = [GpuEngine] if num_devices == 1 else [GpuEngine, SplitEngine]
    _require_options(options, *([CpuEngine] if placement == "cpu" else on_gpu))
    loaded.require_unchanged()
    artifact.require_model(loaded.fingerprint, loaded.geometry, loaded.tokenizer_hash)
    engine: CpuEngine | GpuEngine | SplitEngine
    if placement == "cpu":
        engine = CpuEngine(
            loaded,
            max_requests=16 if max_requests is None else max_requests,
            tail_capacity=tail_capacity,
            kv_format=kv_format,
            host_budget=None if host_budget_bytes is None else HostBudget(host_budget_bytes, config, selector),
            **options,
        )
    else:
        engine = gpu_engine(
            loaded,
            config,
            placement,
            num_devices,
            selector=selector,
            kv_format=kv_format,
            max_requests=4 if max_requests is None else max_requests,
            tail_capacity=tail_capacity,
            **{"max_context_len": artifact.spec.context_len, **options},
        )
    try:
        engine.add_context(0, artifact)
        engine.preparation(0, config, selector)  # type: ignore[arg-type]  # refuses others by name
    except BaseException:
        engine.close()
        raise
    return engine


def gpu_engine(
    loaded: LoadedModel,
    config: SearchConfig,
    placement: Placement | str,
    num_devices: int,
    **options: Any,  # of either engine
) -> GpuEngine | SplitEngine:
    """Make an engine for one GPU, or for several that divide the model's heads."""
    if num_devices == 1:
        return GpuEngine(loaded, config, placement, **options)
    return SplitEngine(loaded, config, placement, num_devices, **options)


def require_together(
    placement: str,
    selector: str,
    host_budget_bytes: int | None,
    num_devices: int = 1,
    kv_format: KvFormat | None = None,
) -> None:
    """Raise ConfigError, before anything is loaded, for an unknown placement or selector, and for options that only the
    CPU, or only GPUs, have."""
    selector_named(selector)
    if placement == "cpu":
        if host_budget_bytes is not None:
            _require_for_budget(selector, kv_format)
        if num_devices != 1:
            raise ConfigError(
                f"{num_devices} GPUs were given, and the placement is cpu; choose one device, or another placement"
            )
        return
    if placement not in PLACEMENTS:
        raise ConfigError(f"unknown placement {placement!r}; choose one of cpu, {', '.join(PLACEMENTS)}")
    require_selector(selector, placement, kv_format)
    if host_budget_bytes is not None:
        raise ConfigError(
            "a host budget is for decoding on the CPU; leave out the host budget, or choose placement cpu"
        )


def _require_kinds(loaded: object, artifact: object, config: object, **counts: object) -> None:
    """Raise ConfigError for arguments of a wrong type, and for counts below 1."""
    require_loaded(loaded)
    if not isinstance(artifact, Artifact):
        raise ConfigError(f"an artifact is an open one, or its directory or URL as text, got {artifact!r}; give one")
    if not isinstance(config, SearchConfig):
        raise ConfigError(
            f"config is a csattn.config.SearchConfig, got {config!r}; give one, such as SearchConfig(keep=0.02)"
        )
    for name, value in counts.items():
        if value is not None:
            require_at_least(name, value, 1)


def _require_options(options: Iterable[str], *engines: Callable[..., object]) -> None:
    """Raise ConfigError for an option that neither `open_engine` nor any of the engines has."""
    known = {
        name
        for takes in (open_engine, *engines)
        for name, parameter in signature(takes).parameters.items()
        if parameter.kind is Parameter.KEYWORD_ONLY and name != "host_budget"  # made from host_budget_bytes
    }
    for name in sorted(set(options) - known):
        if name in signature(SearchConfig).parameters:
            remedy = f"it belongs in config=SearchConfig({name}=...)"
        elif name in _DOCUMENTED:
            remedy = f"it is for a placement on a GPU, one of {', '.join(PLACEMENTS)}; leave it out, or add one"
        elif near := get_close_matches(_ALIASES.get(name, name), _DOCUMENTED):
            remedy = f"did you mean {near[0]}?"
        else:
            remedy = f"leave it out; the options are {', '.join(sorted(known & _DOCUMENTED))}"
        raise ConfigError(f"there is no option {name} with this placement: {remedy}")


def _kv_format_of(given: KvFormat | str | None) -> KvFormat | None:
    """Parse a KV format if it is given by name, as on the command line. Raises ConfigError for anything else."""
    if given is None or isinstance(given, KvFormat):
        return given
    if not isinstance(given, str):
        raise ConfigError(
            f"a KV format is a name such as q8_0, or k=q8_0,v=q4_0, got {given!r}; give one, or leave it out"
        )
    try:
        return KvFormat.parse(given)
    except CodecError as error:
        raise ConfigError(str(error)) from error


def _bytes_of(given: int | str | None) -> int | None:
    """Parse a size if it is given as text, as on the command line. Raises ConfigError if it is none."""
    if not isinstance(given, str):
        return given
    try:
        return parse_size(given)
    except TierError as error:
        raise ConfigError(f"host_budget_bytes: {error}") from error


def _require_for_budget(selector: str, kv_format: KvFormat | None) -> None:
    """Raise ConfigError for a selector or format that reads more or other rows than a host budget holds."""
    if selector not in WITHOUT_ALL_KEYS:
        raise ConfigError(
            f"selector {selector!r} reads all keys from host memory, which a host budget limits; choose "
            f"{', '.join(WITHOUT_ALL_KEYS)}, or leave the budget out"
        )
    if kv_format is not None:
        raise ConfigError("a host budget keeps rows as the artifact has them; leave out the format, or the budget")
