"""Checks of a store, and of what services keep in it."""

import shlex
from collections.abc import Iterator

from workers.doctor.facts import Facts
from workers.doctor.findings import GIB, Finding, gib, sentence
from workers.words import counted, size

LOW_DISK_BYTES = 2 * GIB


def check_store(facts: Facts) -> Iterator[Finding]:
    store, path = facts.probes["store"], facts.store
    if "error" in store:
        text = f"The store at {path} cannot be examined: {sentence(store['error'])}"
        remedy = "Give another one with --store, or correct its permissions."
        yield Finding("store", "problem", text, "Repair torch first." if "error" in facts.probes["torch"] else remedy)
        return
    if not store["is_directory"]:
        text = f"The store at {path} is, or lies below, something that is not a directory."
        yield Finding("store", "problem", text, "Give a directory with --store.")
        return
    yield _store_itself(facts)
    if store["writable"] and store["free_bytes"] < LOW_DISK_BYTES:
        text = f"The disk of the store at {path} has {gib(store['free_bytes'])} free."
        yield Finding("store", "warning", text, "Free some space: `csattn gc` removes unfinished builds.")
    for name, why in store["broken"].items():
        remedy = f"Remove it and build it again: rm -r {shlex.quote(str(path / name))}"
        yield Finding("store", "problem", f"Artifact {name} is not usable: {sentence(why)}", remedy)


def check_kept(facts: Facts) -> Iterator[Finding]:
    """Report what services keep of prompts and turns; no finding if they keep nothing."""
    kept, place = facts.probes["kept"], facts.store / "kept"
    if "error" in kept:
        text = f"The size of what services keep in {place} is unknown: {sentence(kept['error'])}"
        yield Finding("kept", "warning", text)
    elif there := kept["context_bytes"] + kept["row_bytes"]:
        text = (
            f"What services have kept of prompts and turns in {place} takes {size(there)}, of at most "
            f"{size(kept['most_bytes'])}; contexts and rows may each fill up to half of the space that is free without "
            "them."
        )
        yield Finding("kept", "ok", text)


def _store_itself(facts: Facts) -> Finding:
    store, path = facts.probes["store"], facts.store
    if not store["writable"]:
        refusal = store.get("refusal", "unknown")
        text = f"The store at {path} cannot be written to ({refusal}): it can only be decoded from."
        return Finding("store", "warning", text, "To build, correct its permissions or give another one with --store.")
    if not store["exists"]:
        return Finding("store", "ok", f"The store at {path} does not exist yet; the first build makes it.")
    artifacts = f"{counted(store['artifacts'], 'usable artifact')} of format {store['format_version']}"
    text = f"The store at {path} has {artifacts} ({size(store['size_bytes'])}), and {size(store['free_bytes'])} free."
    return Finding("store", "ok", text)
