"""The settings: frozen parts, each checked when it is made. Their fields are the keys in file, environment and flags.

A part's error begins with the name of the field at fault, so that the loader can add where its value came from.
"""

import hmac
import ipaddress
import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from csattn.build_options import BuildOptions
from csattn.config import SearchConfig
from csattn.errors import ConfigError
from csattn.selector_names import ABOUT, SelectorName
from offload.codecs.formats import KvFormat
from offload.errors import CodecError

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._:\[\]-]+")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(?:/|$)")  # in a Path, which has lost one of two slashes
_BUILD: Any = BuildOptions()  # the command line's defaults; Any, because its strings are Literals here


@dataclass(frozen=True, slots=True, repr=False)
class Secret:
    """Text that is never shown: not by repr, not by str, not in a message."""

    value: str

    def __post_init__(self) -> None:
        if not (self.value and self.value.isascii() and self.value.isprintable() and " " not in self.value):
            raise ConfigError("a key must be printable ASCII without spaces, of one character or more")

    def __repr__(self) -> str:
        return "***"

    def matches(self, given: str) -> bool:
        """Compare in constant time, so that the time does not reveal how much was right."""
        return hmac.compare_digest(self.value.encode(), given.encode())


@dataclass(frozen=True, slots=True)
class Key:
    """One setting."""

    default: Any
    words: str  # its meaning, for users
    lowest: float | None = None
    highest: float | None = None
    above: float | None = None  # exclusive lower bound
    hint: Any = None  # its type

    def require(self, name: str, value: Any) -> None:
        """Raise ConfigError for a value out of bounds. NaN is outside of every bound."""
        if get_origin(self.hint) is Literal and value not in choices(self.hint):
            raise ConfigError(f"{name} must be one of {', '.join(map(str, choices(self.hint)))}, got {value!r}")
        if self.lowest is not None and not value >= self.lowest:
            raise ConfigError(f"{name} must be at least {self.lowest}, got {value}")
        if self.above is not None and not value > self.above:
            raise ConfigError(f"{name} must be greater than {self.above:g}, got {value}")
        if self.highest is not None and not value <= self.highest:
            raise ConfigError(f"{name} must be at most {self.highest:g}, got {value}")


def choices(hint: Any) -> tuple[Any, ...]:
    """Return the values of a Literal; of selectors also those that were registered in this process."""
    return tuple(ABOUT) if hint == SelectorName else get_args(hint)


def setting(default: Any, words: str, **bounds: float) -> Any:
    """Make a field of a part."""
    return field(default=default, metadata={"key": Key(default, words, **bounds)})


class _Part:
    __slots__ = ()

    def __post_init__(self) -> None:
        for name, key in keys_of(type(self)).items():
            if getattr(self, name) is not None:
                key.require(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings(_Part):
    """Where the service listens, and to whom."""

    host: str = setting("127.0.0.1", "Address to listen on; one that others can reach needs an API key.")
    port: int = setting(8000, "0: one that is free.", lowest=0, highest=65535)
    api_keys: tuple[Secret, ...] = setting((), "Any of them opens everything; without one, nothing is locked.")
    api_key_file: Path | None = setting(None, "File with more API keys, one a line; # begins a comment.")
    allowed_origins: tuple[str, ...] = setting(
        (), "Web pages that browsers let use the service, such as https://chat.example.org; * allows all (CORS)."
    )
    access_log: bool = setting(False, "A line of the log for each request; without it, for those that fail.")

    def __post_init__(self) -> None:
        _Part.__post_init__(self)
        if not (self.api_keys or self.api_key_file or _is_loopback(self.host)):
            raise ConfigError(
                f"host is {self.host!r}, which other machines can reach, and there is no API key; "
                "set server.api_keys or server.api_key_file, or listen on 127.0.0.1"
            )

        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                wanted = "* or an address in small letters and without a path, such as https://chat.example.org"
                raise ConfigError(f"allowed_origins has {origin[:60]!r}, wanted {wanted}")

    def admits(self, key: str | None) -> bool:
        """Whether a request with that key is admitted. All keys are compared, so that the time reveals nothing."""
        return not self.api_keys or (key is not None and sum(secret.matches(key) for secret in self.api_keys) > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitSettings(_Part):
    """What one request, and all of them together, may ask for."""

    max_body_bytes: int = setting(8 << 20, "Of a request; longer ones are refused unread.", lowest=1024)
    max_new_tokens: int = setting(4096, "Of an answer; one for which more were asked ends there.", lowest=1)
    max_concurrent_requests: int = setting(32, "Decoded at the same time.", lowest=1)
    max_queued_requests: int = setting(64, "Waiting for their turn; more are told to come again.", lowest=0)
    request_timeout_s: float = setting(
        600.0, "From when a request is there to its last token.", above=0.0, highest=86400.0
    )
    max_open_requests: int = setting(1024, "Received, waiting or answered at once by one HTTP process.", lowest=1)
    max_header_bytes: int = setting(16 << 10, "Of a request's header.", lowest=1024)
    max_json_depth: int = setting(64, "Of lists and objects in each other.", lowest=4)
    max_json_values: int = setting(100_000, "In one request's JSON.", lowest=100)
    max_question_chars: int = setting(1 << 20, "Of a request's messages together, or of its prompt.", lowest=1)
    body_timeout_s: float = setting(60.0, "Within which a request's body has to be here.", above=0.0, highest=3600.0)
    stall_timeout_s: float = setting(
        20.0, "After which a client that neither sends nor takes a byte is cut off.", above=0.0, highest=3600.0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings(_Part):
    """The model that answers."""

    name: str | None = setting(None, "Directory, .gguf file or hub id. Not set: the installed SmolLM2-135M.")
    weights: Literal["fp8", "int4"] | None = setting(None, "That linear layers' are rounded to, and on a GPU kept in.")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSettings(_Part):
    """How contexts that are registered with the service become artifacts; as the options of `csattn build`."""

    preset: Literal["default", "lists", "paper"] = setting(_BUILD.preset, "Of the index.")
    dtype: Literal["float32", "bfloat16", "float16"] = setting(_BUILD.dtype, "Of the model and of the KV.")
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "That prefills and indexes; auto: a GPU where there is one."
    )
    kmeans: Literal["faiss", "torch"] | None = setting(
        None, "lists: places the centroids. Not set: torch on a GPU or macOS, else faiss."
    )
    chat: bool = setting(_BUILD.chat, "Wrap contexts by the model's chat template.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings(_Part):
    """Where index and KV lie, and what decodes."""

    placement: Literal["cpu", "device", "hybrid", "host"] = setting(
        "cpu", "cpu: no GPU. On a GPU, index and KV: both on the device, the index alone (hybrid), or none (host)."
    )
    selector: SelectorName = setting(
        "csattn",
        "Of requests that name none. On a GPU csattn, full, or in placement device exact, and then all requests' own.",
    )
    slot_share: float = setting(
        0.15,
        "hybrid, host: share of a context's rows, and of requests' own there, that have a slot on the device.",
        above=0.0,
        highest=1.0,
    )
    all_where_faster: bool = setting(
        False,
        "device: read all rows of contexts in steps that take less time so: over short ones, of questions, of many "
        "requests on one. What a request is told then depends a little on who else asks.",
    )
    tail_capacity: int | None = setting(
        None,
        "Rows of a request's own, question and answer: an answer ends where there are none. Not set: as many as there "
        "are positions, or as there is memory for: on a GPU an eighth of its memory that is left, but 2048.",
        lowest=1,
    )
    num_contexts: int = setting(4, "On a GPU: loaded at the same time; others wait in the store.", lowest=1)
    max_context_len: int | None = setting(
        None,
        "On a GPU: rows of the longest context. Not set: as many as the model has positions, or as half of the "
        "device's memory that is left has room for.",
        lowest=1,
    )
    kv_codec: str | None = setting(
        None, "Keeps contexts' rows as q8_0, q4_0, fp8, float16, ..., or k=q8_0,v=q4_0. Not set: as built."
    )
    context_bytes: int | None = setting(
        None,
        "Of contexts that are loaded at the same time, KV as it is kept and index, in each attention worker; "
        "others wait in the store. Not set: as far as there is memory.",
        lowest=1,
    )
    num_devices: int = setting(1, "GPUs that share out the model's heads, each with its part of all.", lowest=1)
    num_threads: int | None = setting(
        None, "CPU threads: of searches, and in placement cpu of a whole step. Not set: one for each CPU.", lowest=1
    )
    num_search_workers: int = setting(0, "Processes of their own that search on the CPU. 0: threads do.", lowest=0)

    def __post_init__(self) -> None:
        _Part.__post_init__(self)
        try:
            _ = self.kv_format
        except CodecError as error:
            raise ConfigError(f"kv_codec cannot be {self.kv_codec!r}: {error}") from error

    @property
    def kv_format(self) -> KvFormat | None:
        """The format of contexts' rows; None: as built."""
        return None if self.kv_codec is None else KvFormat.parse(self.kv_codec)


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings(_Part):
    """The service's processes on a Ray cluster; unused with --local."""

    address: str | None = setting(
        None, "Of the cluster, or auto. Not set: one on this machine, while the service runs."
    )
    num_attention_workers: int = setting(
        1, "Each with the model, and a device of its own where there are GPUs.", lowest=1
    )
    num_ingress_replicas: int = setting(1, "Processes that take HTTP requests.", lowest=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings(_Part):
    """Where artifacts are."""

    path: Path = setting(Path("store"), "Directory that holds artifacts.")

    def __post_init__(self) -> None:
        _Part.__post_init__(self)
        if url := _URL.match(str(self.path)):
            rest = str(self.path)[url.end() :]
            raise ConfigError(
                f"path must be a directory, for a service writes into its store, got the URL {url[1]}://{rest}; name a "
                "directory, and copy artifacts into it that lie elsewhere (docs/many-contexts.md says who reads URLs)"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSettings(_Part):
    """What is kept of prompts and turns for later ones that begin alike.

    No kind takes more of the disk than it leaves free.
    """

    memory_bytes: int = setting(
        1 << 30, "Of host memory, for rows of turns, a quarter of it at most; 0 keeps none.", lowest=0
    )
    disk_bytes: int = setting(16 << 30, "Of the store's disk, for rows of turns; 0: memory alone has them.", lowest=0)
    context_bytes: int = setting(64 << 30, "Of the store's disk, for contexts that prompts have brought.", lowest=0)
    context_tokens: int = setting(
        1024, "A prompt of which more is not kept becomes a context first; less goes into steps.", lowest=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of the service. None of them changes while it runs."""

    server: ServerSettings = field(default_factory=ServerSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    build: BuildSettings = field(default_factory=BuildSettings)
    search: SearchConfig = field(default_factory=SearchConfig)
    engine: EngineSettings = field(default_factory=EngineSettings)
    ray: RaySettings = field(default_factory=RaySettings)
    kept: KeptSettings = field(default_factory=KeptSettings)
    store: StoreSettings = field(default_factory=StoreSettings)


SEARCH_WORDS = {
    "keep": "Share of the context fetched at each step for each KV head, in (0, 1].",
    "sink_len": "First rows of the context, always read.",
    "window_len": "Last rows of the context, and of the request's own, always read.",
    "lookahead": "1: search a layer ahead, on the predicted query; 0: on its own. Not set: as suits the placement.",
    "search_period": "Search at every N-th token of a request; those between read what it chose.",
    "rest": "Rows that are not read: by the sketch's codes, by moments, or not at all. Not set: as suits the index.",
}


def default_lookahead(placement: str, rows_on_disk: bool = False) -> int:
    """Return the default lookahead: 1 if the layer before hides much, a search on the CPU beside a GPU or disk reads.

    Rows that only cross the link arrive while the others are attended to by their codes, so 0 is enough for them.
    """
    return int(rows_on_disk or placement == "host")


def keys_of(part: Any) -> dict[str, Key]:
    """Return the settings of a part, by field."""
    hints = get_type_hints(part)
    keys = {}
    for item in fields(part):
        key = item.metadata.get("key") or Key(item.default, SEARCH_WORDS[item.name])
        keys[item.name] = replace(key, hint=hints[item.name])
    return keys


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


SECTIONS: dict[str, Any] = get_type_hints(Settings)
KEYS = {f"{section}.{name}": key for section, part in SECTIONS.items() for name, key in keys_of(part).items()}
# `load_settings` sets it to 0 or 1, depending on engine.placement
KEYS["search.lookahead"] = replace(KEYS["search.lookahead"], hint=int | None, default=None)
