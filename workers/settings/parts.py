"""What can be set: frozen parts, each checked where it is made. File, environment and flags have their fields as keys.

Every refusal of a part begins with the name of the field at fault: the loader then can say where its value came from.
"""

import hmac
import ipaddress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from csattn.build_options import BuildOptions
from csattn.config import SearchConfig
from csattn.errors import ConfigError
from csattn.selector_names import SelectorName
from offload.codecs.formats import KvFormat
from offload.errors import CodecError

_BUILD: Any = BuildOptions()  # the command line's defaults; its strings are literals here


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
        """In a time that does not tell how much of it was right."""
        return hmac.compare_digest(self.value.encode(), given.encode())


def about(
    words: str,  # what it means to a person
    *,
    lowest: float | None = None,
    highest: float | None = None,
    above: float | None = None,  # a lowest value that is itself not allowed
) -> dict[str, Any]:
    """A field's metadata."""
    return {"words": words, "lowest": lowest, "highest": highest, "above": above}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where the service listens, and to whom."""

    host: str = field(
        default="127.0.0.1", metadata=about("Address to listen on; one that others can reach needs an API key.")
    )
    port: int = field(default=8000, metadata=about("0: one that is free.", lowest=0, highest=65535))
    api_keys: tuple[Secret, ...] = field(
        default=(), metadata=about("Any of them opens everything; without one, nothing is locked.")
    )
    api_key_file: Path | None = field(
        default=None, metadata=about("File with more API keys, one a line; # begins a comment.")
    )

    def __post_init__(self) -> None:
        _check(self)
        if not (self.api_keys or self.api_key_file or _is_loopback(self.host)):
            raise ConfigError(
                f"host is {self.host!r}, which other machines can reach, and there is no API key; "
                "set server.api_keys or server.api_key_file, or listen on 127.0.0.1"
            )

    def admits(self, key: str | None) -> bool:
        """Whether a request with that key may come in. Every key is compared, so time does not tell which was near."""
        return not self.api_keys or (key is not None and sum(secret.matches(key) for secret in self.api_keys) > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitSettings:
    """What one request, and all of them together, may ask for."""

    max_body_bytes: int = field(
        default=8 << 20, metadata=about("Of a request; longer ones are refused unread.", lowest=1024)
    )
    max_new_tokens: int = field(default=4096, metadata=about("Of an answer; asking for more is refused.", lowest=1))
    max_concurrent_requests: int = field(default=32, metadata=about("Decoded at the same time.", lowest=1))
    max_queued_requests: int = field(
        default=64, metadata=about("Waiting for their turn; more are told to come again.", lowest=0)
    )
    request_timeout_s: float = field(
        default=600.0, metadata=about("From a request's arrival to its last token.", above=0.0, highest=86400.0)
    )
    max_open_requests: int = field(
        default=1024, metadata=about("Received, waiting or answered at once by one HTTP process.", lowest=1)
    )
    max_header_bytes: int = field(default=16 << 10, metadata=about("Of a request's header.", lowest=1024))
    max_json_depth: int = field(default=64, metadata=about("Of lists and objects in each other.", lowest=4))
    max_json_values: int = field(default=100_000, metadata=about("In one request's JSON.", lowest=100))
    max_question_chars: int = field(
        default=1 << 20, metadata=about("Of a request's messages together, or of its prompt.", lowest=1)
    )
    body_timeout_s: float = field(
        default=60.0, metadata=about("Within which a request's body has to be here.", above=0.0, highest=3600.0)
    )
    stall_timeout_s: float = field(
        default=20.0,
        metadata=about(
            "After which a client that neither sends nor takes a byte is cut off.", above=0.0, highest=3600.0
        ),
    )

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The model that answers."""

    name: str | None = field(
        default=None, metadata=about("Directory, .gguf file or hub id. Not set: the installed SmolLM2-135M.")
    )
    weights: Literal["fp8", "int4"] | None = field(
        default=None, metadata=about("That linear layers' are rounded to, and on a GPU kept in.")
    )

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSettings:
    """How contexts that are registered with the service become artifacts: as `csattn build` has it."""

    preset: Literal["default", "lists", "paper"] = field(default=_BUILD.preset, metadata=about("Of the index."))
    dtype: Literal["float32", "bfloat16", "float16"] = field(
        default=_BUILD.dtype, metadata=about("Of the model and of the KV.")
    )
    device: Literal["auto", "cpu", "cuda"] = field(
        default="auto", metadata=about("That prefills and indexes; auto: a GPU where there is one.")
    )
    kmeans: Literal["faiss", "torch"] | None = field(
        default=None, metadata=about("lists: places the centroids. Not set: torch on a GPU, else faiss.")
    )
    chat: bool = field(default=_BUILD.chat, metadata=about("Wrap contexts by the model's chat template."))

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Where index and KV lie, and what decodes."""

    placement: Literal["cpu", "device", "hybrid", "host"] = field(
        default="cpu",
        metadata=about(
            "cpu: no GPU. On a GPU, index and KV: both on the device, the index alone (hybrid), or none (host)."
        ),
    )
    selector: SelectorName = field(
        default="csattn",
        metadata=about("Of requests that name none. On a GPU csattn or full, and then all requests' own."),
    )
    slot_share: float = field(
        default=0.15,
        metadata=about(
            "hybrid, host: share of a context's rows that have a slot on the device.", above=0.0, highest=1.0
        ),
    )
    tail_capacity: int | None = field(
        default=None,
        metadata=about(
            "Rows of a request's own, question and answer: an answer ends where there are none. Not set: on the CPU as "
            "many as there are positions and memory for, on a GPU 2048.",
            lowest=1,
        ),
    )
    num_contexts: int = field(
        default=4, metadata=about("On a GPU: loaded at the same time; others wait in the store.", lowest=1)
    )
    max_context_len: int | None = field(
        default=None,
        metadata=about(
            "On a GPU: rows of the longest context. Not set: as many as the model has positions, or as half of the "
            "device's memory that is left has room for.",
            lowest=1,
        ),
    )
    kv_codec: str | None = field(
        default=None,
        metadata=about("Keeps contexts' rows as q8_0, q4_0, fp8, float16, ..., or k=q8_0,v=q4_0. Not set: as built."),
    )
    context_bytes: int | None = field(
        default=None,
        metadata=about(
            "Of contexts that are loaded at the same time, KV as it is kept and index, in each attention worker; "
            "others wait in the store. Not set: as far as there is memory.",
            lowest=1,
        ),
    )
    num_devices: int = field(
        default=1, metadata=about("GPUs that share out the model's heads, each with its part of all.", lowest=1)
    )
    num_threads: int | None = field(
        default=None, metadata=about("That search on the CPU. Not set: one for each CPU.", lowest=1)
    )
    num_search_workers: int = field(
        default=0, metadata=about("Processes of their own that search on the CPU. 0: threads do.", lowest=0)
    )

    def __post_init__(self) -> None:
        _check(self)
        try:
            _ = self.kv_format
        except CodecError as error:
            raise ConfigError(f"kv_codec cannot be {self.kv_codec!r}: {error}") from error

    @property
    def kv_format(self) -> KvFormat | None:
        """How rows are kept; None: as they were built."""
        return None if self.kv_codec is None else KvFormat.parse(self.kv_codec)


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """The service's processes on a Ray cluster; one process has no use for them."""

    address: str | None = field(
        default=None, metadata=about("Of the cluster, or auto. Not set: one on this machine, while the service runs.")
    )
    num_attention_workers: int = field(
        default=1, metadata=about("Each with the model, and a device of its own where there are GPUs.", lowest=1)
    )
    num_ingress_replicas: int = field(default=1, metadata=about("Processes that take HTTP requests.", lowest=1))

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """Where artifacts are."""

    path: Path = field(default=Path("store"), metadata=about("Directory that holds artifacts."))

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSettings:
    """What is kept of prompts and turns, for those that begin with them."""

    memory_bytes: int = field(
        default=1 << 30, metadata=about("Of host memory, for rows of turns; 0 keeps none.", lowest=0)
    )
    disk_bytes: int = field(
        default=16 << 30, metadata=about("Of the store's disk, for rows of turns; 0: memory alone has them.", lowest=0)
    )
    context_bytes: int = field(
        default=64 << 30, metadata=about("Of the store's disk, for contexts that prompts have brought.", lowest=0)
    )
    context_tokens: int = field(
        default=1024,
        metadata=about("A prompt of which more is not kept becomes a context first; less goes into steps.", lowest=0),
    )

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All of them. What the service is given; nothing of it changes while it runs."""

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


def suited_lookahead(placement: str, rows_on_disk: bool = False) -> int:
    """1 where the layer before hides much: a search on the CPU beside a GPU, or rows that come from disk.

    Rows that only cross the link come while the others are attended to by their codes.
    """
    return int(rows_on_disk or placement == "host")


def _check(part: Any) -> None:
    hints = get_type_hints(type(part))
    for item in fields(part):
        value, bounds = getattr(part, item.name), item.metadata
        if get_origin(hints[item.name]) is Literal and value not in get_args(hints[item.name]):
            allowed = ", ".join(map(str, get_args(hints[item.name])))
            raise ConfigError(f"{item.name} must be one of {allowed}, got {value!r}")
        if value is None:
            continue
        # written so that NaN is outside of every bound
        if bounds["lowest"] is not None and not value >= bounds["lowest"]:
            raise ConfigError(f"{item.name} must be at least {bounds['lowest']}, got {value}")
        if bounds["above"] is not None and not value > bounds["above"]:
            raise ConfigError(f"{item.name} must be greater than {bounds['above']:g}, got {value}")
        if bounds["highest"] is not None and not value <= bounds["highest"]:
            raise ConfigError(f"{item.name} must be at most {bounds['highest']:g}, got {value}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
