"""`csattn inspect`, `verify`, `ls` and `gc`: what is in a store."""

from pathlib import Path
from typing import Any

from csattn.artifact import (
    broken_artifacts,
    collect_garbage,
    list_store,
    open_artifact,
    resolve_artifact,
    verify_artifact,
)
from workers.cli.terminal import counting, err, out, size, table


def inspect(path: Path) -> dict[str, Any]:
    with open_artifact(path) as artifact:
        index_bytes, size_bytes = artifact.index_bytes, artifact.size_bytes
        spec, manifest = artifact.spec, artifact.manifest
        config = spec.index_config
        bytes_per_key = index_bytes / (spec.context_len * spec.model.num_layers * spec.model.num_kv_heads)
        result = {
            "artifact": spec.artifact_id,
            "path": str(artifact.path),
            "model": spec.model_name,
            "context_len": spec.context_len,
            "kv_dtype": spec.kv_dtype,
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
        ["context", f"{spec.context_len} tokens from {manifest.build_notes.get('source', 'unknown')}"],
        ["size", f"{size(size_bytes)}, of which {size(index_bytes)} index"],
        ["index", f"{config.layout}, {config.num_subspaces} subspaces x {config.num_centroids} centroids"],
        ["index per key and KV head", f"{bytes_per_key:.0f} bytes"],
        ["preset", str(manifest.build_notes.get("preset", "unknown"))],
    ]
    out.print(table(f"artifact {spec.artifact_id}", ["", ""], rows))
    return result


def verify(path: Path) -> dict[str, Any]:
    path = resolve_artifact(path)
    with open_artifact(path) as artifact:
        total = artifact.size_bytes
    seen = 0
    with counting("verifying", total, "bytes") as count:

        def progress(done: int, total: int) -> None:
            nonlocal seen
            count(done - seen)
            seen = done

        manifest = verify_artifact(path, progress)
    out.print(f"artifact {manifest.spec.artifact_id} is intact: {size(total)} in {len(manifest.files)} files")
    return {"artifact": manifest.spec.artifact_id, "intact": True, "size_bytes": total, "files": len(manifest.files)}


def listing(store: Path) -> dict[str, Any]:
    summaries, broken = list_store(store), broken_artifacts(store)
    rows = [
        [item.artifact_id, item.model_name, str(item.context_len), item.layout, size(item.size_bytes)]
        for item in summaries
    ]
    out.print(table(f"{len(rows)} artifacts in {store}", ["artifact", "model", "tokens", "index", "size"], rows))
    for path, error in broken.items():
        err.print(f"not usable: {path.name}: {error}", markup=False)
    return {
        "store": str(store),
        "artifacts": [
            {
                "artifact": item.artifact_id,
                "path": str(item.path),
                "model": item.model_name,
                "context_len": item.context_len,
                "size_bytes": item.size_bytes,
            }
            for item in summaries
        ],
        "broken": {path.name: str(error) for path, error in broken.items()},
    }


def clean(store: Path) -> dict[str, Any]:
    removed = collect_garbage(store)
    out.print(f"removed {len(removed)} unfinished builds from {store}")
    return {"store": str(store), "removed": [str(path) for path in removed]}
