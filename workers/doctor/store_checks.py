"""Checks of a store, and of what services keep in it."""

import shlex
from collections.abc import Sequence

from workers.doctor.facts import Facts
from workers.doctor.findings import GIB, Finding, gib, sentence
from workers.words import counted, size

LOW_DISK_BYTES = 2 * GIB


def check_store(facts: Facts) -> Sequence[Finding]:
    store, path = facts.probes["store"], facts.store
    if "error" in store:
        text = f"The store at {path} cannot be examined: {sentence(store['error'])}"
        remedy = "Give another one with --store, or correct its permissions."
        return [
            Finding("store", "problem", text, "Repair torch first." if "error" in facts.probes["torch"] else remedy)
        ]
    if not store["is_directory"]:
        text = f"The store at {path} is, or lies below, something that is not a directory."
        return [Finding("store", "problem", text, "Give a directory with --store.")]
    findings = [_store_itself(facts)]
    if store["writable"] and store["free_bytes"] < LOW_DISK_BYTES:
        text = f"The disk of the store at {path} has {gib(store['free_bytes'])} free."
        findings.append(Finding("store", "warning", text, "Free some space: `csattn gc` removes unfinished builds."))
    findings += [
        Finding(
            "store",
            "problem",
            f"Artifact {name} is not usable: {sentence(why)}",
            f"Remove it and build it again: rm -r {shlex.quote(str(path / name))}",
        )
        for name, why in store["broken"].items()
    ]
    return findings


def check_kept(facts: Facts) -> Sequence[Finding]:
    """Report what services keep of prompts and turns; no finding if they keep nothing."""
    kept, place = facts.probes["kept"], facts.store / "kept"
    if "error" in kept:
        return [
            Finding(
                "kept", "warning", f"The size of what services keep in {place} is unknown: {sentence(kept['error'])}"
            )
        ]
    there, most = kept["context_bytes"] + kept["row_bytes"], kept["most_bytes"]
    if not there:
        return []
    text = f"What services have kept of prompts and turns in {place} takes {size(there)}, of at most {size(most)}"
    return [
        Finding(
            "kept", "ok", f"{text}; contexts and rows may each fill up to half of the space that is free without them."
        )
    ]


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
