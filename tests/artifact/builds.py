"""Builds that stop half-way, and what must be true afterwards."""

from pathlib import Path

import torch

from csattn.artifact import ArtifactSpec, ArtifactWriter, open_artifact, scan_store, verify_artifact
from tests.artifact.synthetic import build, hidden_state, make_layer, make_spec, make_token_ids, write_layer

SPEC = make_spec(num_layers=2, num_kv_heads=1)


def building_dir(store: Path, spec: ArtifactSpec = SPEC) -> Path:
    return store / f".building-{spec.artifact_id}"


def write_layers(store: Path, num_layers: int, spec: ArtifactSpec = SPEC) -> None:
    """Start a build that stops after some layers."""
    with ArtifactWriter(store, spec, make_token_ids(spec.context_len)) as writer:
        for layer_idx in range(num_layers):
            write_layer(writer, layer_idx, *make_layer(spec, layer_idx))
            writer.work.save_checkpoint(layer_idx + 1, hidden_state(spec, layer_idx + 1))


def assert_store_is_sound(store: Path) -> None:
    """Assert that only whole artifacts are listed."""
    assert not scan_store(store)[1]
    for summary in scan_store(store)[0]:
        verify_artifact(summary.path)


def assert_completes(store: Path, spec: ArtifactSpec = SPEC) -> None:
    """Assert that a second build finishes what the first left, and leaves nothing but the artifact."""
    path = build(store, spec)
    verify_artifact(path)
    assert [entry.name for entry in store.iterdir()] == [spec.artifact_id]
    with open_artifact(path) as artifact:
        for layer_idx in range(spec.model.num_layers):
            assert torch.equal(artifact.layer_kv(layer_idx), make_layer(spec, layer_idx)[0])
