"""The files in docs/deploy, which operators copy. They cannot run here; what they use of csattn is checked."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from workers.settings import load_settings

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "docs" / "deploy"
OPEN_PATHS = ("/health", "/ready")


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def pods(of: Any) -> Iterator[dict[str, Any]]:
    """Yield the pod descriptions in a document, at any depth."""
    if isinstance(of, dict):
        if "containers" in of:
            yield of
        for value in of.values():
            yield from pods(value)
    elif isinstance(of, list):
        for value in of:
            yield from pods(value)


def settings_of(environment: dict[str, str]) -> Any:
    """Return csattn's settings in this environment. Raises ConfigError for an unknown name or an invalid value."""
    return load_settings(None, environment, {}).settings


@pytest.mark.parametrize("name", ["kubernetes.yaml", "kuberay.yaml"])
def test_pods_use_existing_settings_mounts_ports_and_paths(name: str) -> None:
    found = [container for document in documents(name) for pod in pods(document) for container in pod["containers"]]
    assert found
    for container in found:
        assert container["image"] == "csattn"
        environment = {item["name"]: item.get("value", "a-key") for item in container["env"]}
        settings = settings_of(environment)
        assert settings.server.host == "0.0.0.0" and settings.server.api_keys  # otherwise no client is admitted
        assert str(settings.store.path) in {mount["mountPath"] for mount in container["volumeMounts"]}
        for port in container.get("ports", []):
            assert port["name"] != "http" or port["containerPort"] == settings.server.port
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            if kind in container:
                assert container[kind]["httpGet"]["path"] in OPEN_PATHS and container[kind]["httpGet"]["port"] == "http"


@pytest.mark.parametrize("name", ["kubernetes.yaml", "kuberay.yaml"])
def test_pods_run_with_only_the_rights_of_the_images_user(name: str) -> None:
    """Kubernetes' policy `restricted` requires this. Volumes belong to the user's group, or nothing could be stored."""
    for pod in [pod for document in documents(name) for pod in pods(document)]:
        user = pod["securityContext"]
        assert user["runAsNonRoot"] and user["runAsUser"] == user["fsGroup"] == 1000
        assert user["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }


@pytest.mark.parametrize("name", ["kubernetes.yaml", "kuberay.yaml"])
def test_volume_claims_and_service_labels_match(name: str) -> None:
    of_kind: dict[str, list[dict[str, Any]]] = {}
    for document in documents(name):
        of_kind.setdefault(document["kind"], []).append(document)
    text = (DEPLOY / name).read_text()
    claimed = set(re.findall(r"claimName: ([\w-]+)", text))
    assert claimed == {claim["metadata"]["name"] for claim in of_kind["PersistentVolumeClaim"]}
    [service] = of_kind["Service"]
    (label,) = service["spec"]["selector"].items()
    assert f"labels: {{{label[0]}: {label[1]}}}" in text


def test_ray_has_as_many_gpus_as_workers() -> None:
    [job] = [document for document in documents("kuberay.yaml") if document["kind"] == "RayJob"]
    [group] = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    [worker] = group["template"]["spec"]["containers"]
    settings = settings_of({item["name"]: item.get("value", "a-key") for item in worker["env"]})
    assert job["spec"]["entrypoint"] == "csattn serve" and settings.ray.address == "auto"
    gpus = group["replicas"] * worker["resources"]["limits"]["nvidia.com/gpu"]
    assert settings.ray.num_attention_workers == gpus == group["minReplicas"] == group["maxReplicas"]


def test_compose_matches_the_image_and_its_settings() -> None:
    [compose] = documents("compose.yaml")
    service = compose["services"]["csattn"]
    settings = settings_of({**service["environment"], "CSATTN_SERVER_API_KEYS": "a-key"})
    assert service["volumes"] == [f"store:{settings.store.path}"] and "store" in compose["volumes"]
    assert service["ports"] == [f"{settings.server.port}:{settings.server.port}"]
    assert any(f":{settings.server.port}{path}'" in service["healthcheck"]["test"][-1] for path in OPEN_PATHS)
    build = service["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT and (ROOT / build["dockerfile"]).is_file()
    [command] = re.findall(r"^CMD (.*)$", (ROOT / build["dockerfile"]).read_text(), re.MULTILINE)
    assert yaml.safe_load(command) == service["command"] == ["csattn", "serve", "--local"]


def test_the_file_of_api_keys_for_compose_is_ignored_by_docker_and_git() -> None:
    """compose.yaml reads CSATTN_SERVER_API_KEYS from the file `.env` next to it."""
    assert "**/.env" in (ROOT / ".dockerignore").read_text().split()
    assert ".env" in (ROOT / ".gitignore").read_text().split()
