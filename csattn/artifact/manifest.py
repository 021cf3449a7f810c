"""What an artifact is: the inputs that give it its id, and the manifest with the hash of each of its files."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from csattn.artifact.durable import FileRecord
from csattn.config import IndexConfig, index_config_from_json, num_index_heads
from csattn.errors import ArtifactCorruptError, ArtifactMismatchError, ConfigError

FORMAT_NAME = "csattn-artifact"
FORMAT_VERSION = 5
STATE, ALL, COMPRESSED = -1, -2, -3  # special values in `ModelGeometry.reaches`
MAX_CONTEXT_TOKENS = 2**31 - 1  # rows are numbered by int32
NOT_ROUNDED = "none"  # noted in a manifest as the rounding of weights that were not rounded

_MAX_SHOWN = 200  # characters shown of a fault in a manifest

KvDtype = Literal["float32", "float16", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGeometry:
    """The sizes of a model that determine the shapes in an artifact."""

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int  # width of a token's hidden state between layers, all residual streams together
    vocab_size: int
    max_positions: int  # the longest sequence that the model's positions allow
    # For each layer, how many of a context's last rows a token after it may see. 0: all rows. STATE: the layer keeps a
    # state instead of rows (linear attention). ALL: all rows, without an index (latents: a learned indexer's keys are
    # in the rows). COMPRESSED: the last rows, and compressed rows of the whole context. Empty: all layers see all rows.
    reaches: tuple[int, ...] = ()
    # sizes of a STATE layer's state: the convolution's last inputs (2 numbers), and the memory (3 numbers)
    state: tuple[int, ...] = ()
    # num_kv_heads and head_dim of layers that keep only a context's last rows; empty: as in the others
    local_heads: tuple[int, ...] = ()
    # for each layer, the layer whose rows it attends to: itself or an earlier one; empty: all layers have their own
    rows_of: tuple[int, ...] = ()
    # If all layers are COMPRESSED: the window (uncompressed rows that a token sees, including its own); then for each
    # layer the tokens that a compressed row stands for (0: none), the tokens it is computed from, its index key's width
    compressed: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, value in self._sizes.items():
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} of a model must be a positive integer, got {value!r}")
        has_state = STATE in self.reaches
        if len(self.state) != 5 * has_state or any(type(x) is not int or x < 1 for x in self.state):
            raise ConfigError(
                f"a state of linear attention has five positive sizes, and only where a layer has one, got {self.state}"
            )
        if self.reaches and (len(self.reaches) != self.num_layers or not {0, ALL, COMPRESSED} & set(self.reaches)):
            raise ConfigError(
                f"at least one of {self.num_layers} layers must attend to the whole context, got {self.reaches}"
            )
        if any(type(reach) is not int or reach < COMPRESSED for reach in self.reaches):
            raise ConfigError(f"a layer attends to some rows or all rows of a context, got {self.reaches}")
        self._check_compressed()
        if self.local_heads and (
            not self.reaches or len(self.local_heads) != 2 or any(type(x) is not int or x < 1 for x in self.local_heads)
        ):
            raise ConfigError(
                "heads of local layers are given by their number and their width, and only where reaches are, got "
                f"{self.local_heads}"
            )
        if self.rows_of and (
            len(self.rows_of) != self.num_layers
            or any(type(at) is not int or not 0 <= at <= i for i, at in enumerate(self.rows_of))
            or any(self.rows_of[at] != at or self._reach(at) != self._reach(i) for i, at in enumerate(self.rows_of))
        ):
            raise ConfigError(
                f"layers may only share rows of earlier layers with the same attention span, got {self.rows_of}"
            )
        for num_kv_heads in (self.num_kv_heads, *self.local_heads[:1]):
            if self.num_q_heads % num_kv_heads:
                raise ConfigError(
                    f"{self.num_q_heads} query heads cannot be divided into equal groups over {num_kv_heads} KV heads"
                )

    def _check_compressed(self) -> None:
        has_some = COMPRESSED in self.reaches
        if has_some and set(self.reaches) != {COMPRESSED}:
            raise ConfigError(f"either all layers have compressed rows or none, got {self.reaches}")
        wanted = 1 + 3 * self.num_layers if has_some else 0
        are_sizes = all(type(x) is int and x >= 0 for x in self.compressed) and all(self.compressed[:1])
        layers = [self.compressed[i : i + 3] for i in range(1, len(self.compressed), 3)]
        if (
            len(self.compressed) != wanted
            or not are_sizes
            or any(span not in (ratio, 2 * ratio) or (width and not ratio) for ratio, span, width in layers)
        ):
            raise ConfigError(f"sizes of compressed rows are a window and three of each layer, got {self.compressed}")

    @property
    def indexed_layers(self) -> tuple[int, ...]:
        """Layers with an index: those that see all of a context by KV heads (reach 0)."""
        return tuple(i for i in range(self.num_layers) if not self.reaches or self.reaches[i] == 0)

    def is_predicted(self, layer_idx: int) -> bool:
        """Whether its queries are predicted from the previous layer's input: so in all indexed layers but the first."""
        return layer_idx in self.indexed_layers[1:]

    def has_state(self, layer_idx: int) -> bool:
        """Whether the layer keeps a state of the context instead of a KV row for each token."""
        return bool(self.reaches) and self.reaches[layer_idx] in (STATE, COMPRESSED)

    def compressed_sizes(self, layer_idx: int, context_len: int) -> dict[str, tuple[int, int]]:
        """Return the shapes of what a COMPRESSED layer keeps of a context: see `csattn.lightning.CompressedState`."""
        window, *others = self.compressed
        ratio, span, key_width = others[3 * layer_idx :][:3]
        num_rows, num_left = divmod(context_len, ratio) if ratio else (0, 0)
        if span > ratio and num_rows:  # overlap: the last row's tokens contribute to the next one as well
            num_left += ratio
        series = span // ratio if ratio else 0
        return {
            "window": (min(window - 1, context_len), 2 * self.head_dim),
            "rows": (num_rows, 2 * self.head_dim),
            "keys": (num_rows if key_width else 0, key_width),
            "pending": (num_left, 2 * series * (2 * self.head_dim + key_width)),
        }

    def num_kept(self, layer_idx: int, context_len: int) -> int:
        """Return how many of a context's last rows that layer keeps; 0 if it has a state."""
        if self.has_state(layer_idx):
            return 0
        reach = self._reach(layer_idx)
        return context_len if reach in (0, ALL) else min(context_len, reach)

    def kv_source(self, layer_idx: int) -> int:
        """Return the layer whose rows this layer attends to."""
        return self.rows_of[layer_idx] if self.rows_of else layer_idx

    def num_stored(self, layer_idx: int, context_len: int) -> int:
        """Return how many rows of a context are stored for that layer; 0 if it attends to another's."""
        return self.num_kept(layer_idx, context_len) if self.kv_source(layer_idx) == layer_idx else 0

    def _reach(self, layer_idx: int) -> int:
        return self.reaches[layer_idx] if self.reaches else 0

    def row_sizes(self, layer_idx: int) -> tuple[int, int]:
        """Return num_kv_heads and head_dim of that layer."""
        if not self.local_heads or self.reaches[layer_idx] < 1:
            return self.num_kv_heads, self.head_dim
        num_kv_heads, head_dim = self.local_heads
        return num_kv_heads, head_dim

    def to_json(self) -> dict[str, Any]:
        lists = {name: list(getattr(self, name)) for name in GEOMETRY_LISTS}
        return self._sizes | {name: values for name, values in lists.items() if values}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        return cls(**{**data, **{name: tuple(data.get(name, ())) for name in GEOMETRY_LISTS}})

    @property
    def _sizes(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in GEOMETRY_LISTS}


# the fields of ModelGeometry that are lists; empty ones are not written
GEOMETRY_LISTS = "reaches", "state", "local_heads", "rows_of", "compressed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactSpec:
    """Everything that determines an artifact's bytes, and so its id; `model_name` is for people and not part of it."""

    model_name: str
    model_fingerprint: str
    model: ModelGeometry
    tokenizer_hash: str
    token_ids_sha256: str  # see `hash_token_ids`
    context_len: int
    index_config: IndexConfig
    kv_dtype: KvDtype

    def __post_init__(self) -> None:
        if type(self.context_len) is not int or not 1 <= self.context_len <= MAX_CONTEXT_TOKENS:
            raise ConfigError(f"a context has 1 to {MAX_CONTEXT_TOKENS} tokens, got context_len={self.context_len!r}")
        if self.kv_dtype not in get_args(KvDtype):
            raise ConfigError(f"kv_dtype must be one of {', '.join(get_args(KvDtype))}, got {self.kv_dtype!r}")
        if not self.model.reaches or 0 in self.model.reaches:  # some have an index; no loop to a forged num_layers
            self.index_config.require_head_dim(self.model.head_dim)

    @property
    def artifact_id(self) -> str:
        """16 hexadecimal digits, the same for the same model, tokenizer, tokens and configuration."""
        identity = [
            FORMAT_VERSION,
            self.model_fingerprint,
            self.tokenizer_hash,
            self.token_ids_sha256,
            self.index_config.to_json(),
            self.kv_dtype,
        ]
        return hashlib.sha256(canonical_json(identity)).hexdigest()[:16]

    @property
    def num_index_heads(self) -> int:
        return num_index_heads(self.index_config, self.model.num_q_heads, self.model.num_kv_heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of manifest.json, trusted only if manifest.sha256 has its hash."""

    spec: ArtifactSpec
    library_versions: Mapping[str, str]
    build_notes: Mapping[str, Any]  # any JSON that the builder wants to record
    files: Mapping[str, FileRecord]  # every file besides the manifest and its hash

    @property
    def size_bytes(self) -> int:
        """Bytes on disk, without the manifest."""
        return sum(record.size_bytes for record in self.files.values())

    @property
    def index_bytes(self) -> int:
        """Bytes of the index files: all that a step reads besides KV."""
        return sum(record.size_bytes for name, record in self.files.items() if name.endswith(".index.safetensors"))

    @property
    def weights(self) -> str | None:
        """The format that the model's weights were rounded to, or NOT_ROUNDED; None if not noted, as in older ones."""
        return self._noted("weights")

    @property
    def source(self) -> str | None:
        """The name of the text that it was built from, or None if not noted."""
        return self._noted("source")

    def _noted(self, name: str) -> str | None:
        noted = self.build_notes.get(name)
        return noted if isinstance(noted, str) else None

    def to_bytes(self) -> bytes:
        spec = self.spec
        document = {
            "format": FORMAT_NAME,
            "format_version": FORMAT_VERSION,
            "artifact_id": spec.artifact_id,
            "model": {"name": spec.model_name, "fingerprint": spec.model_fingerprint, **spec.model.to_json()},
            "tokenizer_hash": spec.tokenizer_hash,
            "token_ids_sha256": spec.token_ids_sha256,
            "context_len": spec.context_len,
            "index_config": spec.index_config.to_json(),
            "kv_dtype": spec.kv_dtype,
            "library_versions": dict(self.library_versions),
            "build_notes": dict(self.build_notes),
            "files": {name: asdict(record) for name, record in self.files.items()},
        }
        return json.dumps(document, indent=1, allow_nan=False).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a manifest.

        Raises ArtifactMismatchError for another version, ArtifactCorruptError for another format or contradictions.
        """
        try:
            document = json.loads(data, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
            _require_this_version(document)
            manifest, name = cls._from_document(document), document["artifact_id"]
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            shown = f"{type(error).__name__}: {error}"[:_MAX_SHOWN]  # a repr may contain the whole manifest
            raise ArtifactCorruptError(f"the manifest is not one that csattn writes ({shown})") from error
        if name != manifest.spec.artifact_id:
            shown = repr(name)[:_MAX_SHOWN]
            raise ArtifactCorruptError(f"the manifest calls itself {shown} but describes {manifest.spec.artifact_id}")
        return manifest

    @classmethod
    def _from_document(cls, document: dict[str, Any]) -> Self:
        model = dict(document["model"])
        spec = ArtifactSpec(
            model_name=_text(model.pop("name")),
            model_fingerprint=_text(model.pop("fingerprint")),
            model=ModelGeometry.from_json(model),
            tokenizer_hash=_text(document["tokenizer_hash"]),
            token_ids_sha256=_text(document["token_ids_sha256"]),
            context_len=document["context_len"],
            index_config=_index_config(document["index_config"]),
            kv_dtype=document["kv_dtype"],
        )
        files = {name: FileRecord(**record) for name, record in document["files"].items()}
        for name, record in files.items():
            if type(record.size_bytes) is not int or record.size_bytes < 0 or len(_text(record.sha256)) != 64:
                raise ValueError(f"bad size or hash of {name}")
        return cls(
            spec=spec,
            library_versions=dict(document["library_versions"]),
            build_notes=dict(document["build_notes"]),
            files=files,
        )


def hash_token_ids(token_ids: NDArray[np.int32]) -> str:
    """Return the SHA-256, in hex, of the ids as little-endian int32."""
    return hashlib.sha256(np.ascontiguousarray(token_ids, dtype="<i4").tobytes()).hexdigest()


def canonical_json(value: object) -> bytes:
    """Serialize a value in the one form that is hashed: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _require_this_version(document: dict[str, Any]) -> None:
    if document["format"] != FORMAT_NAME:
        raise ValueError(f"format is {document['format']!r}")
    if (version := document["format_version"]) != FORMAT_VERSION:
        raise ArtifactMismatchError(
            f"the artifact has format version {repr(version)[:_MAX_SHOWN]} and this csattn reads version "
            f"{FORMAT_VERSION}; build it again with `csattn build`, or use the csattn that made it"
        )


def _index_config(data: dict[str, Any]) -> IndexConfig:
    """Read the configuration and require each field's type: shapes are computed from it."""
    config = index_config_from_json(data)
    for field in fields(config):
        value = getattr(config, field.name)
        wanted = field.type if isinstance(field.type, type) else str  # the others are Literals of strings
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise TypeError(f"index option {field.name} is {value!r}")
    return config


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError(f"{value!r} is not a text")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice")
    return result


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")
