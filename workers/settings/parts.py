"""The settings: frozen parts, each checked when it is made. Their fields are the keys in file, environment and flags.

A part's error begins with the name of the field at fault, so that the loader can add where its value came from.
"""

import hmac
import ipaddress
import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from csattn.build_options import AUTO, BuildOptions
from csattn.checks import require_num_threads
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

    host: str = setting("127.0.0.1", "Address to listen on. One that other machines can reach requires an API key.")
    port: int = setting(8000, "Port to listen on; 0 chooses a free one.", lowest=0, highest=65535)
    api_keys: tuple[Secret, ...] = setting((), "API keys, each of which gives full access. Empty: no key is required.")
    api_key_file: Path | None = setting(None, "File with additional API keys, one per line; # begins a comment.")
    allowed_origins: tuple[str, ...] = setting(
        (), "Origins whose web pages may use the service (CORS), such as https://chat.example.org; * allows all."
    )
    access_log: bool = setting(False, "Log every request; false: only requests that fail.")

    def __post_init__(self) -> None:
        _Part.__post_init__(self)
        if not (self.api_keys or self.api_key_file or _is_loopback(self.host)):
            raise ConfigError(
                f"host is {self.host!r}, which other machines can reach, and there is no API key; "
                "set server.api_keys or server.api_key_file, or listen on 127.0.0.1"
            )

        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                wanted = "* or an address in lower case and without a path, such as https://chat.example.org"
                raise ConfigError(f"allowed_origins has {origin[:60]!r}, wanted {wanted}")

    def admits(self, key: str | None) -> bool:
        """Whether a request with that key is admitted. All keys are compared, so that the time reveals nothing."""
        return not self.api_keys or (key is not None and sum(secret.matches(key) for secret in self.api_keys) > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitSettings(_Part):
    """Limits on each request, and on all requests together."""

    max_body_bytes: int = setting(
        8 << 20, "Longest request body, in bytes; a longer one is refused unread.", lowest=1024
    )
    max_new_tokens: int = setting(4096, "Most tokens of an answer, however many a request asks for.", lowest=1)
    max_concurrent_requests: int = setting(32, "Requests that are decoded at the same time.", lowest=1, highest=65536)
    max_queued_requests: int = setting(
        64, "Requests that may wait for their turn; more are refused and may be retried later.", lowest=0
    )
    request_timeout_s: float = setting(
        600.0, "Time limit of a request in seconds, from its arrival to its last token.", above=0.0, highest=86400.0
    )
    max_open_requests: int = setting(
        1024, "Open requests of one HTTP process: those being received, waiting or being answered.", lowest=1
    )
    max_header_bytes: int = setting(
        16 << 10, "Longest request header, in bytes, including the path and query.", lowest=1024
    )
    max_json_depth: int = setting(64, "Deepest nesting of lists and objects in a request's JSON.", lowest=4)
    max_json_values: int = setting(100_000, "Most values in a request's JSON.", lowest=100)
    max_question_chars: int = setting(
        1 << 20, "Most characters in a request's prompt, or in all of its messages together.", lowest=1
    )
    body_timeout_s: float = setting(
        60.0, "Time in seconds within which a request's body must arrive.", above=0.0, highest=3600.0
    )
    stall_timeout_s: float = setting(
        20.0,
        "Time in seconds after which a client that neither sends nor receives a byte is disconnected.",
        above=0.0,
        highest=3600.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings(_Part):
    """The model that answers."""

    name: str | None = setting(None, "Model directory, .gguf file or hub id. Not set: the installed SmolLM2-135M.")
    weights: Literal["fp8", "int4"] | None = setting(
        None,
        "Format that linear layers and experts are rounded to, and in bfloat16 kept in. Not set: they are not rounded.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSettings(_Part):
    """How the service builds contexts into artifacts; the options are those of `csattn build`."""

    preset: Literal["default", "lists", "paper"] = setting(
        _BUILD.preset,
        "Kind of index: default, a sketch; lists, Top-L lists with corrections; paper, the lists as published.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = setting("float32", "Dtype of the model and of the KV cache.")
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "Device that prefills and indexes contexts; auto: a GPU if there is one, else the CPU."
    )
    kmeans: Literal["faiss", "torch"] | None = setting(
        None,
        "Library that runs k-means, for the presets lists and paper. Not set: torch on a GPU or macOS, else faiss.",
    )
    chat: bool = setting(_BUILD.chat, "Wrap contexts in the model's chat template.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings(_Part):
    """What decodes, and where indexes and KV caches are kept."""

    placement: Literal["cpu", "device", "hybrid", "host"] = setting(
        "cpu",
        "cpu: decode without a GPU. Otherwise decode on a GPU that holds index and KV (device), the index (hybrid), or "
        "neither (host); the rest is in host memory.",
    )
    selector: SelectorName = setting(
        "csattn",
        "Selector of requests that name none. On a GPU, where it applies to every request: csattn, full, or, in "
        "placement device, exact.",
    )
    slot_share: float = setting(
        0.15,
        "Size of the device's cache in placements hybrid and host, as a share of a context's rows, or of a request's "
        "own rows on the host.",
        above=0.0,
        highest=1.0,
    )
    all_where_faster: bool = setting(
        False,
        "In placement device, read all rows in steps where that is faster: over short contexts, of questions, or of "
        "many requests on one context. An answer then depends slightly on the requests that share its steps.",
    )
    draft_tokens: int = setting(
        15,
        "Most tokens of an answer that are guessed from what followed the last ones before, in context, question or "
        "answer, and verified in one step: the answer is the same. 0: none.",
        lowest=0,
    )
    tail_capacity: int | None = setting(
        None,
        "Most tokens of a request's question and answer together; an answer ends there. Not set: as many as the model "
        "has positions, or as fit in half of the memory; on a GPU in an eighth of its free memory, but at least 2048.",
        lowest=1,
    )
    num_contexts: int = setting(
        4,
        "Contexts that are loaded on a GPU at the same time; the others stay in the store. Without effect on a CPU.",
        lowest=1,
    )
    max_context_len: int | None = setting(
        None,
        "Most tokens of a context on a GPU. Not set: as many as the model has positions, or as fit in half of the "
        "device's free memory.",
        lowest=1,
    )
    kv_codec: str | None = setting(
        None, "Format of contexts' keys and values: q8_0, q4_0, fp8, float16, ..., or k=q8_0,v=q4_0. Not set: as built."
    )
    context_bytes: int | None = setting(
        None,
        "Most bytes of loaded contexts, KV and index, in each attention worker; the others stay in the store. Not set: "
        "as much as fits in memory.",
        lowest=1,
    )
    num_devices: int = setting(1, "GPUs of an attention worker; they split the model by heads.", lowest=1)
    num_threads: int | None = setting(
        None,
        "CPU threads for searches and, in placement cpu, for all other computation. Not set: one per CPU.",
        lowest=1,
    )
    num_search_workers: int = setting(
        0, "Separate processes that search, in placements cpu and host. 0: threads search.", lowest=0
    )

    def __post_init__(self) -> None:
        _Part.__post_init__(self)
        for name in ("num_threads", "num_search_workers"):
            if getattr(self, name):
                require_num_threads(name, getattr(self, name))
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
        None,
        "Address of the Ray cluster, or auto. Not set: start one on this machine, for as long as the service runs.",
    )
    num_attention_workers: int = setting(
        1,
        "Processes that decode, each with its own copy of the model and, in placements on a GPU, its own devices.",
        lowest=1,
    )
    num_ingress_replicas: int = setting(1, "Processes that receive HTTP requests.", lowest=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings(_Part):
    """Where artifacts are stored."""

    path: Path = setting(Path("store"), "Directory that holds the artifacts.")

    def __post_init__(self) -> None:
        _Part.__post_init__(self)
        if url := _URL.match(str(self.path)):
            rest = str(self.path)[url.end() :]
            raise ConfigError(
                f"path must be a directory, because a service writes into its store, got the URL {url[1]}://{rest}; "
                "name a directory, and copy artifacts from elsewhere into it (docs/many-contexts.md says who reads "
                "URLs)"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSettings(_Part):
    """Cache of prompts and conversation turns, for later requests that begin with the same tokens.

    Contexts of prompts and rows of turns may each fill up to half of the disk space that is free without them.
    """

    memory_bytes: int = setting(
        1 << 30,
        "Host memory, in bytes, for rows of turns; at most a quarter of what is free at the start. 0: keep no rows.",
        lowest=0,
    )
    disk_bytes: int = setting(
        16 << 30, "Disk space of the store, in bytes, for rows of turns. 0: keep them in memory only.", lowest=0
    )
    context_bytes: int = setting(
        64 << 30, "Disk space of the store, in bytes, for contexts that were built from prompts.", lowest=0
    )
    context_tokens: int = setting(
        1024,
        "A prompt with more new tokens than this, and than a quarter of the context that it begins with, is built into "
        "a longer context first; fewer are computed in decode steps.",
        lowest=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of the service. They do not change while it runs."""

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
    "keep": "Share of the context's rows chosen at each step for each KV head, in (0, 1].",
    "sink_len": "First rows of the context that are always read.",
    "window_len": "Last rows of the context, and last rows of the request, that are always read.",
    "lookahead": "1: search one layer ahead, with a predicted query; 0: with the layer's own query. "
    "Not set: 1 in placement host, else 0.",
    "search_period": "Search at every N-th token of a request; the tokens between reuse its choice.",
    "rest": "How rows that are not read are attended to: by their codes (sketch), by an estimate (moments), or not at "
    "all (none). Not set: sketch with the selector csattn over a sketch, else none.",
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
UNTIL_CHOSEN = {"engine.placement": "cpu", "build.dtype": "float32"}  # what auto is in `Settings`
_AUTO_WORDS = {
    "engine.placement": "auto: device or hybrid where a GPU has room for the model, else cpu.",
    "build.dtype": "auto: that of the first --context; else as `csattn build` chooses where the service decodes.",
}
for _key, _words in _AUTO_WORDS.items():
    _of = KEYS[_key]
    KEYS[_key] = replace(_of, hint=Literal["auto", *choices(_of.hint)], default=AUTO, words=f"{_of.words} {_words}")
# `load_settings` sets it to 0 or 1, depending on engine.placement
KEYS["search.lookahead"] = replace(KEYS["search.lookahead"], hint=int | None, default=None)
