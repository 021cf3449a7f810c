"""`csattn config`: the service's settings with their origins, and an example file."""

import os
from typing import Annotated, Any

import typer

from csattn.errors import ConfigError
from workers.cli.options import ConfigFile, Json

config = typer.Typer(help="Show the service's settings, or print an example file.", no_args_is_help=True)


@config.command()
def show(
    file: ConfigFile = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting; may be repeated.")
    ] = None,
    json: Json = False,
) -> None:
    """Show every setting, its value, and its source: flag, environment, file or default."""
    from rich.table import Table

    from workers.cli import terminal
    from workers.settings import describe, load_settings

    loaded = load_settings(file, os.environ, parse_changes(changes or []))
    described = describe(loaded)
    shown = Table(title="settings", title_justify="left", header_style="bold")
    for column in ("setting", "value", "from"):
        shown.add_column(column, overflow="fold")
    for key, leaf in described.items():
        shown.add_row(key, _plain(leaf["value"]), leaf["origin"])
    terminal.out.print(shown)
    terminal.end({"file": None if loaded.file is None else str(loaded.file), "settings": described}, json)


@config.command()
def example(json: Json = False) -> None:
    """Print a TOML file that explains every setting and has it at its default."""
    from workers.cli import terminal
    from workers.settings import example as text

    terminal.write(text())
    terminal.end({"toml": text()}, json)


def parse_changes(changes: list[str]) -> dict[str, object]:
    """Return the KEY=VALUE pairs of --set as flags."""
    pairs = [change.partition("=") for change in changes]
    for key, equals, _ in pairs:
        if not (key and equals):
            raise ConfigError(f"--set takes KEY=VALUE, such as server.port=8000, got {key!r}")
    return {key.strip(): value for key, _, value in pairs}


def _plain(value: Any) -> str:
    if value is None or value == []:
        return "not set"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
