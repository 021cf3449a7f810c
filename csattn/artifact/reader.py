"""Open a finished artifact: check what is cheap to check, memory-map the rest, and refuse whatever was altered."""

import errno
import hashlib
import os
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from shlex import quote
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray

from csattn.artifact.find import is_artifact_id, resolve_artifact
from csattn.artifact.geometry import ModelGeometry
from csattn.artifact.layout import (
    MANIFEST_FILE,
    MANIFEST_HASH_FILE,
    MAX_LAYERS,
    TOKENS_FILE,
    file_layout,
    file_names,
    index_fault,
    index_file,
    index_from_arrays,
    kv_file,
    layer_files,
    state_file,
    take_next_query,
)
from csattn.artifact.manifest import NOT_ROUNDED, ArtifactSpec, Manifest, hash_token_ids
from csattn.artifact.tensor_file import map_file, open_regular_file, repair_advice
from csattn.checks import require_one_of
from csattn.cpus import available_cpus
from csattn.errors import (
    ArtifactCorruptError,
    ArtifactError,
    ArtifactMismatchError,
    ArtifactNotFoundError,
    ArtifactRoomError,
)
from csattn.index import ListIndex, NoIndex
from csattn.sketch import SketchIndex

Progress = Callable[[int, int], None]  # called with the bytes hashed so far and in all

_MAX_THREADS = 8  # to hash files
_MAX_MANIFEST_BYTES = 16 * 2**20
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
ROOM_ADVICE = "close other artifacts, or raise `ulimit -n`, `ulimit -v` or vm.max_map_count"


class Artifact:
    """An open artifact. Its arrays are read-only memory maps: they take only address space until they are touched.

    Arrays that it returned stay valid after `close`. Writing into them ends the process (SIGSEGV).
    """

    def __init__(self, path: Path, manifest: Manifest, files: Mapping[str, Mapping[str, NDArray[Any]]]):
        self.path = path.absolute()  # valid in other processes, and after a change of directory
        self.manifest = manifest
        self.token_ids: NDArray[np.int32] = files[TOKENS_FILE]["token_ids"]  # [context_len]
        self._files: dict[str, Mapping[str, NDArray[Any]]] = dict(files)
        self._indexes: dict[int, ListIndex | SketchIndex | NoIndex] = {}

    @property
    def spec(self) -> ArtifactSpec:
        return self.manifest.spec

    @property
    def size_bytes(self) -> int:
        """Bytes on disk, without the manifest."""
        return self.manifest.size_bytes

    @property
    def index_bytes(self) -> int:
        """Bytes of the index files: all that a step reads besides KV."""
        return self.manifest.index_bytes

    def layer_kv(self, layer_idx: int) -> torch.Tensor:
        """Return the context's rows [num_kv_heads, context_len, 2, head_dim]: K at [..., 0, :], V at [..., 1, :].

        A local layer has only the last `ModelGeometry.num_kept` rows.
        """
        kv_source = self.spec.model.kv_source(layer_idx)
        return as_tensor(self._file(kv_file(kv_source))["kv"], self.spec.kv_dtype == "bfloat16")

    def layer_kv_place(self, layer_idx: int) -> tuple[Path, int, int]:
        """Return where the rows of `layer_kv` are contiguous on disk: file, offset of the first byte, number of bytes.

        For readers that do not map the file. The checks at opening cover it as well.
        """
        self._file(name := kv_file(self.spec.model.kv_source(layer_idx)))
        [(tensor, offset)] = file_layout(self.spec, name).tensors
        return self.path / name, offset, tensor.num_bytes

    def layer_index(self, layer_idx: int) -> ListIndex | SketchIndex:
        """Return the index of a layer that has one, checked on first use so that kernels can trust it."""
        index = self._index(layer_idx)
        assert not isinstance(index, NoIndex), f"layer {layer_idx} has no index"
        return index

    def indexes(self) -> list[ListIndex | SketchIndex]:
        """Return the indexes of all layers that have one, in the order by which engines and searchers number them."""
        return [self.layer_index(layer_idx) for layer_idx in self.spec.model.indexed_layers]

    def indexed_kv(self) -> list[torch.Tensor]:
        """Return `layer_kv` of the layers that have an index, in order."""
        return [self.layer_kv(layer_idx) for layer_idx in self.spec.model.indexed_layers]

    def local_kv(self) -> list[torch.Tensor]:
        """Return `layer_kv` of the other layers with rows, in order: local layers, and those of latents."""
        return [self.layer_kv(layer_idx) for layer_idx in self.spec.model.local_layers]

    def states(self) -> list[Mapping[str, NDArray[Any]]]:
        """Return the states of layers that have one instead of KV rows, in order.

        Linear attention: conv and memory, float32. Compressed attention, which all layers have or none: the fields of
        `CompressedState`, `pending` in float32, the others in the dtype of rows (bfloat16 as uint16 bits).
        Raises ArtifactCorruptError for NaN or infinity.
        """
        layers = (i for i in range(self.spec.model.num_layers) if self.spec.model.has_state(i))
        states = {name: self._file(name) for name in map(state_file, layers)}
        for name, state in states.items():
            if not all(map(_is_finite, state.values())):
                raise ArtifactCorruptError(f"{self.path / name} holds NaN or infinity; {repair_advice(self.path)}")
        return list(states.values())

    def require_sound(self) -> None:
        """Check every index and state now, so that their first use is quick. KV rows are too many to check."""
        for layer_idx in range(self.spec.model.num_layers):
            self._index(layer_idx)
        self.states()

    def next_query(self, layer_idx: int) -> NDArray[np.float32] | None:
        """Return the predictor of the next layer's queries from that layer's input: see `ListIndex.next_query`."""
        return self._index(layer_idx).next_query

    def _index(self, layer_idx: int) -> ListIndex | SketchIndex | NoIndex:
        index = self._indexes.get(layer_idx)
        if index is None:
            name = index_file(layer_idx)
            has_file = name in layer_files(self.spec, layer_idx)
            arrays = dict(self._file(name)) if has_file else {}
            next_query = take_next_query(arrays)
            index = index_from_arrays(self.spec.index_config, self.spec.context_len, arrays, next_query)
            if fault := index_fault(index):
                raise ArtifactCorruptError(f"{self.path / name}: {fault}; {repair_advice(self.path)}")
            self._indexes[layer_idx] = index
        return index

    def require_model(self, fingerprint: str, geometry: ModelGeometry, tokenizer_hash: str) -> None:
        """Raise ArtifactMismatchError for a model that did not build this artifact (its `max_positions` may differ), or
        a tokenizer that may give other ids to the same text.

        fingerprint, geometry: the whole model's, not a device's share.
        """
        if fingerprint != self.spec.model_fingerprint:
            raise ArtifactMismatchError(
                f"the artifact {self.path} was built with {self.spec.model_name} in {self.spec.kv_dtype} (fingerprint "
                f"{self.spec.model_fingerprint[:12]}) and the loaded model has fingerprint {fingerprint[:12]}; load "
                f"the model that built it in {self.spec.kv_dtype}, {self._weights_then()}, or build the context again "
                "with this one"
            )
        sizes = replace(self.manifest.spec.model, max_positions=geometry.max_positions)
        if sizes != geometry:
            names = [of.name for of in fields(sizes) if getattr(sizes, of.name) != getattr(geometry, of.name)]
            has, wants = (", ".join(f"{name} {getattr(of, name)}" for name in names) for of in (sizes, geometry))
            raise ArtifactMismatchError(
                f"the artifact {self.path} has {has} and the loaded model {wants}: a manifest or a config.json was "
                "altered; build the context again with this model"
            )
        if tokenizer_hash != self.spec.tokenizer_hash:
            raise ArtifactMismatchError(
                f"the artifact {self.path} was built with tokenizer {self.spec.tokenizer_hash[:12]} and the loaded "
                f"one is {tokenizer_hash[:12]}; load the tokenizer that built it, or build the context again with this "
                "one"
            )

    def _weights_then(self) -> str:
        """Say how the weights of the model that built it were loaded, as part of a sentence."""
        if (rounding := self.manifest.weights) is None:
            return "its weights rounded in the same way"
        if rounding == NOT_ROUNDED:
            return "its weights not rounded (leave out --weights, in Python weights=)"
        return f"its weights rounded to {rounding} (add --weights {rounding}, in Python weights={rounding!r})"

    def close(self) -> None:
        """Release the memory maps; arrays in use keep theirs alive."""
        self._files.clear()
        self._indexes.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable[[Path], "Artifact"], tuple[Path]]:
        """Copy and pickle as a path: the copy opens the artifact again, and no array is copied.

        Raises ArtifactError if it is closed.
        """
        self._require_open()
        return open_artifact, (self.path,)

    def __repr__(self) -> str:
        state = "open" if self._files else "closed"
        return f"<Artifact {self.spec.artifact_id} of {self.spec.context_len} tokens, {state}>"

    def _file(self, name: str) -> Mapping[str, NDArray[Any]]:
        self._require_open()
        if name not in self._files:
            raise IndexError(f"the artifact has layers 0 to {self.spec.model.num_layers - 1}, not {name}")
        return self._files[name]

    def _require_open(self) -> None:
        if not self._files:
            raise ArtifactError(f"the artifact {self.path} is closed; open it again")


def open_artifact(
    path: Path, *, verify: Literal["size", "full"] = "size", progress: Progress | None = None
) -> Artifact:
    """Open the artifact in a directory, given its path or `<store>/<prefix of the id>`.

    Always checked: the manifest's own hash, the set of files, their sizes, headers and shapes, the token ids.
    With verify="full" every byte is hashed and every index is checked as well. Raises ArtifactError.
    """
    require_one_of("verify", verify, ("size", "full"))
    path = resolve_artifact(path)
    try:
        manifest = _read_manifest(path)
        _require_file_set(path, manifest)
        if verify == "full":
            _require_hashes(path, manifest, progress)
        artifact = Artifact(
            path, manifest, {name: map_file(path / name, file_layout(manifest.spec, name)) for name in manifest.files}
        )
    except OSError as error:
        if error.errno in NO_ROOM:
            raise ArtifactRoomError(
                f"the artifact {path} cannot be mapped in addition to what this process has open and mapped: "
                f"{error.strerror}; {ROOM_ADVICE}"
            ) from error
        raise ArtifactError(
            f"cannot read the artifact {path}: {error.strerror or error}; check its permissions and its disk"
        ) from error
    if hash_token_ids(artifact.token_ids) != manifest.spec.token_ids_sha256:
        raise ArtifactCorruptError(
            f"{path / TOKENS_FILE} does not hold the tokens that the manifest describes; {repair_advice(path)}"
        )
    vocab_size = manifest.spec.model.vocab_size
    if not 0 <= artifact.token_ids.min() <= artifact.token_ids.max() < vocab_size:
        raise ArtifactCorruptError(
            f"{path / TOKENS_FILE} holds token ids outside of the model's vocabulary of {vocab_size}; "
            f"{repair_advice(path)}"
        )
    if verify == "full":
        artifact.require_sound()
    return artifact


def is_whole(path: Path) -> bool:
    """Whether an intact artifact is at that path, judged by the cheap checks of `open_artifact`.

    Raises ArtifactRoomError if it cannot be opened for lack of room: it may be sound, and must not be replaced.
    """
    try:
        open_artifact(path).close()
    except ArtifactRoomError:
        raise
    except ArtifactError:
        return False
    return True


def _read_manifest(path: Path) -> Manifest:
    if not (path / MANIFEST_FILE).exists():
        # advise to delete only what is named like an artifact: anything else may be a store, or a home directory
        remedy = repair_advice(path)
        if not is_artifact_id(path.name):
            remedy = (
                f"if it is a store, `csattn ls --store {quote(str(path))}` lists its artifacts: "
                f"give {path}/ and how an id starts"
            )
        raise ArtifactNotFoundError(f"{path} holds no finished artifact ({MANIFEST_FILE} is missing); {remedy}")
    with open_regular_file(path / MANIFEST_FILE) as file:
        data = file.read(_MAX_MANIFEST_BYTES)
    hash_path = path / MANIFEST_HASH_FILE
    if not hash_path.exists():
        raise ArtifactCorruptError(f"{hash_path} is missing; {repair_advice(path)}")
    with open_regular_file(hash_path) as file:
        stored = file.read(_MAX_MANIFEST_BYTES)
    return parse_manifest(path, data, stored, repair_advice(path))


def parse_manifest(place: Path | str, data: bytes, hash_line: bytes, remedy: str) -> Manifest:
    """Parse the manifest of the artifact at a place, after comparing it with its hash.

    The result lists exactly the files of the format, so their names are safe to join to a path.
    remedy: what to do, for errors. Raises ArtifactCorruptError or ArtifactMismatchError.
    """
    if hash_line != manifest_hash_line(data):
        raise ArtifactCorruptError(
            f"{place}/{MANIFEST_FILE} and {MANIFEST_HASH_FILE} do not agree: one of them is altered; {remedy}"
        )
    try:
        manifest = Manifest.from_bytes(data)
    except ArtifactMismatchError as error:  # it may be sound, made by another csattn: do not advise to delete it
        raise ArtifactMismatchError(f"{place}: {error}") from error
    except ArtifactError as error:
        raise type(error)(f"{place}: {error}; {remedy}") from error
    if manifest.spec.model.num_layers > MAX_LAYERS or set(manifest.files) != set(file_names(manifest.spec)):
        raise ArtifactCorruptError(f"{place}: the manifest lists the wrong files; {remedy}")
    return manifest


def manifest_hash_line(manifest: bytes) -> bytes:
    """Return the contents of manifest.sha256, in the format of `sha256sum --check`."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST_FILE}\n".encode()


def _require_file_set(path: Path, manifest: Manifest) -> None:
    """Raise ArtifactCorruptError for missing and unknown files, wrong sizes, and another artifact's id."""
    if is_artifact_id(path.name) and path.name != manifest.spec.artifact_id:
        raise ArtifactCorruptError(f"{path} holds the artifact {manifest.spec.artifact_id}; {repair_advice(path)}")
    # macOS leaves .DS_Store where a Finder has looked, and ._NAME beside a file on a disk of another system
    found = {name for name in os.listdir(path) if name != ".DS_Store" and not name.startswith("._")}
    found -= {MANIFEST_FILE, MANIFEST_HASH_FILE}
    if missing := sorted(set(manifest.files) - found):
        raise ArtifactCorruptError(f"{path / missing[0]} is missing; {repair_advice(path)}")
    if unknown := sorted(found - set(manifest.files)):
        raise ArtifactCorruptError(
            f"{path / unknown[0]} does not belong to the artifact; remove it if it is yours, or {repair_advice(path)}"
        )
    for name, record in manifest.files.items():
        size_bytes = os.stat(path / name).st_size
        if size_bytes != record.size_bytes:
            raise ArtifactCorruptError(
                f"{path / name} has {size_bytes} bytes instead of {record.size_bytes}; {repair_advice(path)}"
            )


def _require_hashes(path: Path, manifest: Manifest, progress: Progress | None) -> None:
    done_bytes = 0
    with ThreadPoolExecutor(min(available_cpus(), _MAX_THREADS)) as threads:
        hashes = threads.map(hash_file, [path / name for name in manifest.files])
        try:
            for (name, record), found in zip(manifest.files.items(), hashes, strict=True):
                if found != record.sha256:
                    raise ArtifactCorruptError(f"{path / name} is altered: its SHA-256 is wrong; {repair_advice(path)}")
                done_bytes += record.size_bytes
                if progress is not None:
                    progress(done_bytes, manifest.size_bytes)
        finally:
            threads.shutdown(cancel_futures=True)


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, hex. It is read, not mapped: a file that shrinks must not end the process."""
    with open_regular_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def has_hash(path: Path, sha256: str) -> bool:
    """Whether the file exists and has this hash."""
    try:
        return hash_file(path) == sha256
    except (OSError, ArtifactError):
        return False


def _is_finite(array: NDArray[Any]) -> bool:
    """Whether all numbers are finite. Of bfloat16, given as bits, NaN and infinity have all exponent bits set."""
    return bool(((array & 0x7F80) != 0x7F80).all() if array.dtype.kind in "iu" else np.isfinite(array).all())


def as_tensor(array: NDArray[Any], is_bfloat16: bool) -> torch.Tensor:
    """Return the array as a tensor over the same memory. is_bfloat16: the array holds its bits."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if is_bfloat16 else tensor
