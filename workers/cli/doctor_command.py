"""`csattn doctor`: show findings about this machine, and what to do about them."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from csattn.errors import ConfigError
from workers.cli.terminal import err, out
from workers.doctor import Finding, examine, gather_facts
from workers.words import counted, printable

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def doctor(store: Path, model: str | None, weights: str | None) -> dict[str, Any]:
    """Show the findings, and return the command's JSON object."""
    if weights is not None and model is None:
        raise ConfigError("--weights says how a model is rounded, and no model was given; name one, or leave it out")
    err.print("examining this machine and its libraries")
    facts = gather_facts(store)
    findings = examine(facts)
    if model is not None:
        from workers.doctor.model import examine_model  # imports torch

        findings += examine_model(model, facts, weights)
    out.print(_table(findings))
    counts = {status: sum(finding.status == status for finding in findings) for status in _STYLES}
    out.print(f"{counted(counts['problem'], 'problem')}, {counted(counts['warning'], 'warning')}")
    return {
        "healthy": counts["problem"] == 0,
        "problems": counts["problem"],
        "warnings": counts["warning"],
        "findings": [asdict(finding) for finding in findings],
        "packages": dict(facts.packages),
    }


def _table(findings: list[Finding]) -> Table:
    shown = Table(box=None, show_header=False, pad_edge=False)
    for finding in findings:
        words = Text(printable(finding.text))
        if finding.remedy:
            words.append(f"\n→ {printable(finding.remedy)}", style="bold")
        shown.add_row(Text(finding.status, style=_STYLES[finding.status]), Text(finding.check), words)
    return shown
