"""What a wheel or a source distribution tells besides its files: the commit that it was made of."""

import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMMIT = "csattn/COMMIT"


class TellCommit(BuildHookInterface):
    """Adds COMMIT where the sources are a git checkout; a source distribution has it already."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return  # the checkout itself is asked
        asked = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        try:
            commit = subprocess.run(asked, cwd=self.root, check=True, capture_output=True, text=True).stdout
        except (OSError, subprocess.CalledProcessError):
            return
        told = Path(self.directory) / "COMMIT"
        told.parent.mkdir(parents=True, exist_ok=True)
        told.write_text(commit)
        build_data["force_include"][str(told)] = COMMIT

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        (Path(self.directory) / "COMMIT").unlink(missing_ok=True)
