"""Find artifacts: each is a directory in a store, named by the artifact's id."""

import re
from pathlib import Path
from shlex import quote

from csattn.artifact.layout import MANIFEST_FILE, MANIFEST_HASH_FILE
from csattn.errors import ArtifactError, ArtifactNotFoundError

_ID = re.compile(r"[0-9a-f]{16}")


def is_artifact_id(name: str) -> bool:
    return _ID.fullmatch(name) is not None


def resolve_artifact(path: Path) -> Path:
    """Return the artifact's directory, given its path or `<store>/<prefix of the id>`."""
    try:
        is_there = path.is_dir()
    except OSError as error:  # for example, a sentence instead of a path
        raise ArtifactNotFoundError(
            f"there is no artifact at {str(path)[:60]!r}: {error.strerror}; give its directory, or STORE/start-of-id"
        ) from error
    if path.is_file():
        raise ArtifactNotFoundError(f"{path} is a file; an artifact is a directory: give that, or STORE/start-of-id")
    return path if is_there else find_artifact(path.parent, path.name)


def require_place_for_store(store: Path) -> None:
    """Raise ArtifactError if a store cannot be there: in place of a file, or in an artifact, which it would damage."""
    for place in (store.absolute(), *store.absolute().parents):
        if place.is_file():
            raise ArtifactError(f"cannot make the store {store}: a file is in its place; name a directory")
        if all((place / name).is_file() for name in (MANIFEST_FILE, MANIFEST_HASH_FILE)):
            inside = "" if place == store.absolute() else f"inside {place}, which is "
            raise ArtifactError(
                f"{store} is {inside}an artifact, not a store; give the directory it is in: {place.parent}"
            )


def find_artifact(store: Path, prefix: str) -> Path:
    """Return the directory of the only artifact in the store whose id has this prefix, without opening it."""
    if not store.exists():
        raise ArtifactNotFoundError(f"there is no store at {store}; give STORE/ID, with the store of `csattn build`")
    entries = store_entries(store)
    names = [name for name in entries if is_artifact_id(name)]
    is_one = prefix in entries and (store / prefix / MANIFEST_FILE).is_file()
    if is_one and not any(name.startswith(prefix) for name in names):
        raise ArtifactNotFoundError(
            f"there is no artifact {prefix!r} in {store}: an artifact's directory is named by its id, 16 hexadecimal "
            f"digits; `csattn inspect {quote(str(store / prefix))}` shows the id: rename the directory to it"
        )
    return store / choose_artifact(names, store, prefix)


def choose_artifact(names: list[str], store: Path | str, prefix: str) -> str:
    """Return the only id with this prefix. names: the ids of a store's artifacts."""
    names = [name for name in names if prefix and name.startswith(prefix)]
    if len(names) == 1:
        return names[0]
    if not names:
        raise ArtifactNotFoundError(
            f"there is no artifact {prefix!r} in {store}; give STORE/ID, where the first characters of the id suffice: "
            "`csattn ls --store STORE` lists the ids in a store"
        )
    raise ArtifactNotFoundError(
        f"{len(names)} artifacts in {store} start with {prefix!r} "
        f"({', '.join(names[:4])}{', ...' if len(names) > 4 else ''}); give more digits"
    )


def store_entries(store: Path) -> list[str]:
    """Return the names in a store, sorted; empty if it does not exist yet."""
    try:
        return sorted(entry.name for entry in store.iterdir())
    except FileNotFoundError:
        return []
    except NotADirectoryError as error:
        raise ArtifactNotFoundError(f"{store} is a file, not a store; give a directory with --store") from error
    except OSError as error:
        raise ArtifactError(f"cannot list the store {store}: {error.strerror}; check its permissions") from error
