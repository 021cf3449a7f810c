"""The artifact: the prefilled context on disk. `index_build` writes it, everything else reads it.

It is a directory in a store, named by a hash of its inputs. It contains manifest.json with the hash of every file, the
context's token ids, and for each layer a file of KV rows (or of a state) and one of the index.
"""

from csattn.artifact.find import find_artifact, resolve_artifact
from csattn.artifact.geometry import LayerGeometry, ModelGeometry
from csattn.artifact.manifest import ArtifactSpec, KvDtype, hash_token_ids
from csattn.artifact.places import (
    fetch_artifact,
    is_url,
    local_path,
    open_artifact,
    read_manifest,
    remote_store,
    verify_artifact,
)
from csattn.artifact.reader import Artifact
from csattn.artifact.remote import RemoteStore, cache_store, shrink_cache
from csattn.artifact.store import ArtifactSummary, collect_garbage, is_being_built, scan_store, unfinished_builds
from csattn.artifact.work import WorkDir
from csattn.artifact.writer import ArtifactWriter

__all__ = [
    "Artifact",
    "ArtifactSpec",
    "ArtifactSummary",
    "ArtifactWriter",
    "KvDtype",
    "LayerGeometry",
    "ModelGeometry",
    "RemoteStore",
    "WorkDir",
    "cache_store",
    "collect_garbage",
    "fetch_artifact",
    "find_artifact",
    "hash_token_ids",
    "is_being_built",
    "is_url",
    "local_path",
    "open_artifact",
    "read_manifest",
    "remote_store",
    "resolve_artifact",
    "scan_store",
    "shrink_cache",
    "unfinished_builds",
    "verify_artifact",
]
