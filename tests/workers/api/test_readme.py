"""The documentation of the service's fields agrees with what the service accepts."""

import re
from pathlib import Path

from csattn.selector_names import ABOUT

README = Path(__file__).parents[3] / "workers" / "api" / "README.md"


def test_the_api_readme_lists_every_selector_with_its_source() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.*) \|$", README.read_text(), re.MULTILINE)
    listed = {name: (summary, source) for name, summary, source in rows if name in ABOUT}
    assert listed == {name: (about.summary, about.source) for name, about in ABOUT.items()}
