"""`csattn inspect`, `verify`, `ls`, `rm` and `gc`: show, check, remove and clean what is in a store."""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from csattn.artifact import (
    ArtifactSummary,
    RemoteStore,
    cache_store,
    collect_garbage,
    is_being_built,
    is_url,
    read_manifest,
    remote_store,
    resolve_artifact,
    scan_store,
    shrink_cache,
    unfinished_builds,
    verify_artifact,
)
from csattn.artifact.directories import remove_artifact
from csattn.artifact.find import is_artifact_id, require_place_for_store, store_entries
from csattn.artifact.layout import MANIFEST_FILE
from csattn.artifact.manifest import NOT_ROUNDED
from csattn.config import IndexConfig, SketchConfig
from csattn.errors import ArtifactError, ArtifactMismatchError, ArtifactNotFoundError, ConfigError, CsattnError
from workers.cli.terminal import counting, err, out, table
from workers.serving.context_file import ContextFile
from workers.serving.kept_store import DIRECTORY, KeptFiles, kept_files, remove_kept
from workers.words import counted, size


def inspect(place: Path | str) -> dict[str, Any]:
    """Show what an artifact holds, and return the command's JSON object."""
    manifest = read_manifest(place)
    spec, size_bytes, index_bytes = manifest.spec, manifest.size_bytes, manifest.index_bytes
    config = spec.index_config
    num_keys = spec.context_len * len(spec.model.indexed_layers) * spec.model.num_kv_heads
    bytes_per_key = index_bytes / num_keys if num_keys else 0.0
    result = {
        "artifact": spec.artifact_id,
        "path": str(place if is_url(place) else resolve_artifact(Path(place))),
        "model": spec.model_name,
        "context_len": spec.context_len,
        "kv_dtype": spec.kv_dtype,
        "weights": manifest.weights,
        "size_bytes": size_bytes,
        "index_bytes": index_bytes,
        "index_bytes_per_key": bytes_per_key,
        "index_config": config.to_json(),
        "geometry": spec.model.to_json(),
        "notes": dict(manifest.build_notes),
        "library_versions": dict(manifest.library_versions),
    }
    rows = [
        ["model", f"{spec.model_name} ({spec.model.num_layers} layers, {spec.model.num_kv_heads} KV heads)"],
        ["dtype", spec.kv_dtype],
        ["weights", _weights(manifest.weights)],
        ["context", f"{spec.context_len} tokens from {manifest.build_notes.get('source', 'unknown')}"],
        ["size", f"{size(size_bytes)}, of which {size(index_bytes)} index"],
        ["index", _described(config) if num_keys else "none: the model chooses its rows itself"],
        ["index per key and KV head", f"{bytes_per_key:.0f} bytes"],
        ["preset", str(manifest.build_notes.get("preset", "unknown"))],
    ]
    out.print(table(f"artifact {spec.artifact_id}", ["", ""], rows))
    return result


def _weights(weights: str | None) -> str:
    """Return `Manifest.weights` in words."""
    if weights is None:
        return "unknown"
    return "as published" if weights == NOT_ROUNDED else f"rounded to {weights}"


def _described(config: IndexConfig) -> str:
    if isinstance(config, SketchConfig):
        return f"sketch, {config.num_fine} fine and {config.num_coarse} coarse words for 64 dimensions"
    of = f"{config.num_subspaces} subspaces x {config.num_centroids} centroids"
    return f"lists of {100 * config.list_len:g} % of the keys, {of}"


def verify(place: Path | str) -> dict[str, Any]:
    """Verify one artifact, raising ArtifactError if it is broken, or all in a store. Returns the JSON object."""
    if isinstance(place, Path) and not (place / MANIFEST_FILE).exists() and (names := _artifacts(place)):
        return _verify_store(place, names)
    total = read_manifest(place).size_bytes
    with counting("verifying", total, "byte") as bar:
        manifest = verify_artifact(place, partial(bar.show, "verifying"))
    out.print(f"artifact {manifest.spec.artifact_id} is intact: {size(total)} in {len(manifest.files)} files")
    return {"artifact": manifest.spec.artifact_id, "intact": True, "size_bytes": total, "files": len(manifest.files)}


def _artifacts(store: Path) -> list[str]:
    """Return the ids of the artifacts in a store; none if it is not a directory, or is an artifact's own."""
    if not store.is_dir() or is_artifact_id(store.name):
        return []
    return [name for name in store_entries(store) if is_artifact_id(name)]


def _verify_store(store: Path, names: list[str]) -> dict[str, Any]:
    intact, broken, unreadable = list[str](), dict[str, str](), dict[str, str]()
    with counting("verifying", len(names), "artifact") as bar:
        for name in names:
            try:
                verify_artifact(store / name)
                intact.append(name)
            except ArtifactError as error:
                is_sound = isinstance(error, ArtifactMismatchError)
                (unreadable if is_sound else broken)[name] = str(error)
                err.print(f"not {'readable here' if is_sound else 'intact'}: {name}: {error}", soft_wrap=True)
            bar.advance(1)
    out.print(f"intact: {len(intact)} of {counted(len(names), 'artifact')} in {store}")
    found = {"artifacts": intact, "broken": broken, "unreadable": unreadable}
    return {"store": str(store), "intact": not (broken or unreadable), **found}


def listing(store: Path | str) -> dict[str, Any]:
    """List a store's artifacts, builds and kept files, and return the command's JSON object."""
    kept, names = KeptFiles(0, 0, 0), dict[str, list[str]]()
    if (remote := remote_store(store)) is not None:
        manifests, faults = remote.manifests()
        found = [ArtifactSummary.of(f"{remote.url}/{name}", one) for name, one in manifests.items()]
        unfinished = []
    else:
        require_store(Path(store))
        unfinished = [work for work in unfinished_builds(Path(store)) if work.is_dir()]
        found, broken = scan_store(Path(store))
        faults = {path.name: error for path, error in broken.items()}
        kept, names = kept_files(Path(store)), _registered(Path(store))
    building = [work for work in unfinished if is_being_built(work)]
    out.print(_artifact_table(store, found, names))
    if kept.num_bytes:
        out.print(f"{_describe_kept(store, kept)}; `csattn gc --kept` removes it", soft_wrap=True)
    for name, error in faults.items():
        err.print(f"not usable: {name}: {error}", soft_wrap=True)
    for work in unfinished:
        if work in building:
            err.print(f"being built: {work.name}")
        else:
            line = f"unfinished: {work.name}; the same build continues it, `csattn gc` removes it"
            err.print(line, soft_wrap=True)
    return {
        "store": str(store),
        "artifacts": [
            {
                "artifact": of.artifact_id,
                "path": str(of.path),
                "model": of.model_name,
                "context_len": of.context_len,
                "kv_dtype": of.kv_dtype,
                "weights": of.weights,
                "size_bytes": of.size_bytes,
                "source": of.source,
                "names": names.get(of.artifact_id, []),
            }
            for of in found
        ],
        "broken": {name: str(error) for name, error in faults.items()},
        "unfinished": [str(work) for work in unfinished if work not in building],
        "building": [str(work) for work in building],
        "kept": asdict(kept),
    }


def _registered(store: Path) -> dict[str, list[str]]:
    """Return the names under which services know contexts, by artifact. If they cannot be read, says so."""
    names = defaultdict[str, list[str]](list)
    try:
        for record in ContextFile(store).read().values():
            if record.artifact_id is not None:
                names[record.artifact_id].append(record.name)
    except CsattnError as error:
        err.print(f"the names of contexts cannot be read: {error}", soft_wrap=True)
    return names


def _artifact_table(store: Path | str, found: Sequence[ArtifactSummary], names: Mapping[str, list[str]]) -> Table:
    rows = [
        [
            of.artifact_id,
            of.model_name,
            of.kv_dtype if of.weights in (None, NOT_ROUNDED) else f"{of.kv_dtype}, {of.weights}",
            str(of.context_len),
            of.layout,
            size(of.size_bytes),
            ", ".join(names.get(of.artifact_id, ())) or of.source or "",
        ]
        for of in found
    ]
    columns = ["artifact", "model", "dtype", "tokens", "index", "size", "name or source" if names else "source"]
    shown = table(f"{counted(len(rows), 'artifact')} in {store}", columns, rows)
    shown.columns[0].no_wrap = True  # users copy ids
    return shown


def _describe_kept(store: Path | str, kept: KeptFiles) -> str:
    """Return in words what services keep of prompts and turns."""
    contexts = f"{counted(kept.num_contexts, 'context')} of prompts ({size(kept.context_bytes)})"
    return f"{store}/{DIRECTORY} has {contexts} and rows of turns ({size(kept.row_bytes)})"


def require_store(place: Path) -> None:
    if place.is_file():
        raise ArtifactNotFoundError(f"{place} is a file, not a store; give a directory with --store")
    if not place.is_dir():
        raise ArtifactNotFoundError(f"there is no store at {place}; `csattn build` makes one, --store names another")
    require_place_for_store(place)


def remove(places: Sequence[Path | str]) -> dict[str, Any]:
    """Remove artifacts, and return the command's JSON object. If one of them is not there, none is removed."""
    found = list(dict.fromkeys(map(_whole_place, places)))
    for place in found:
        names = ""
        if isinstance(place, str):
            store, _, artifact_id = place.rpartition("/")
            RemoteStore(store).remove(artifact_id)
        elif remove_artifact(place):
            names = ", ".join(_registered(place.parent).get(place.name, ()))
        else:
            raise ArtifactError(f"another process builds or removes {place}; try again when it has ended")
        out.print(f"removed {place}" + (f", which services know as {names}" if names else ""), soft_wrap=True)
    return {"removed": [str(place) for place in found]}


def _whole_place(place: Path | str) -> Path | str:
    """Return the directory or URL of a finished artifact, without what is abbreviated. Raises ArtifactNotFoundError."""
    if is_url(place):
        store, _, prefix = str(place).rstrip("/").rpartition("/")
        remote = RemoteStore(store)
        if remote.holds(artifact_id := remote.resolve(prefix)):
            return f"{remote.url}/{artifact_id}"
        raise ArtifactNotFoundError(f"there is no artifact {place}; `csattn ls --store {store}` lists those there")
    path = resolve_artifact(Path(place)).absolute()
    if is_artifact_id(path.name) and (path / MANIFEST_FILE).is_file():
        return path
    raise ArtifactNotFoundError(f"{path} is not an artifact; `csattn ls --store STORE` lists those of a store")


def clean(store: Path | str, cache_bytes: int | None, with_kept: bool) -> dict[str, Any]:
    """Remove what interrupted builds have left and, on request, copies and kept files. Returns the JSON object.

    Builds for a store behind a URL run in the local cache, so what they have left is there.
    """
    if with_kept and is_url(store):
        raise ConfigError(
            f"services keep nothing in a store at a URL, got {store}; leave --kept out, or give a directory"
        )
    place = cache_store() if is_url(store) else Path(store)
    if not is_url(store):
        require_store(place)
        if not os.access(place, os.W_OK):
            raise ArtifactError(f"nothing can be removed from {place}, which cannot be written; check its permissions")
    num_kept_bytes = _clean_kept(place) if with_kept else 0  # first: it may be refused
    removed = collect_garbage(place)
    out.print(f"removed {counted(len(removed), 'unfinished build')} from {place}")
    copies = [] if cache_bytes is None else shrink_cache(cache_bytes)
    if cache_bytes is not None:
        out.print(f"removed {counted(len(copies), 'copy', 'copies')} from {cache_store()}, to keep {size(cache_bytes)}")
    return {
        "store": str(store),
        "removed": [str(path) for path in removed],
        "removed_copies": [str(path) for path in copies],
        "removed_kept_bytes": num_kept_bytes,
    }


def _clean_kept(store: Path) -> int:
    """Remove what services have kept; return how many bytes that has freed."""
    before = kept_files(store)
    remove_kept(store)
    after = kept_files(store)
    gone = before.num_bytes - after.num_bytes
    out.print(f"removed {size(gone)} of prompts and turns from {store / DIRECTORY}")
    if after.num_bytes:
        err.print(f"{_describe_kept(store, after)}, which are in use or cannot be removed", soft_wrap=True)
    return gone
