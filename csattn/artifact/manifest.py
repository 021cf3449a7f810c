"""What an artifact is: the inputs that give it its id, and the manifest with the hash of each of its files."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from csattn.artifact.durable import FileRecord
from csattn.artifact.geometry import ModelGeometry
from csattn.checks import require_one_of
from csattn.config import IndexConfig, index_config_from_json, num_index_heads
from csattn.errors import ArtifactCorruptError, ArtifactMismatchError, ConfigError

FORMAT_NAME = "csattn-artifact"
FORMAT_VERSION = 6
MAX_CONTEXT_TOKENS = 2**31 - 1  # rows are numbered by int32
NOT_ROUNDED = "none"  # noted in a manifest as the rounding of weights that were not rounded

_MAX_SHOWN = 200  # characters shown of a fault in a manifest

KvDtype = Literal["float32", "float16", "bfloat16"]


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
        require_one_of("kv_dtype", self.kv_dtype, get_args(KvDtype))
        if "rows" in self.model.kinds:  # some have an index; no loop to a forged num_layers
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
