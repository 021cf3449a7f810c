"""Options that several commands of `csattn` have. Imports no heavy library."""

import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from csattn.checks import require_model_name


def place(text: Any) -> Path | str:
    """Parse a directory or URL. An empty text is refused: it comes from a shell variable that is not set."""
    if re.match("[a-z][a-z0-9+]+:/(?!/)", str(text)):
        raise ValueError(f"a URL has two slashes after its colon, got {text}; give ./{text} if it is a directory")
    return text if "://" in str(text) else directory(text)


def directory(text: Any) -> Path:
    """Parse a directory; an empty text is refused, and so is a URL, which would become a directory `s3:`."""
    if not str(text).strip():
        raise ValueError("the path is empty; give one")
    if "://" in str(text):
        raise ValueError(f"wanted a directory of this machine, got the URL {text}; give a path")
    return Path(os.path.expanduser(text))  # a shell leaves `--store=~/x` as it is


def named(model: str | None) -> str | None:
    """Return a model's name or None; an empty name is refused."""
    require_model_name(model)
    return model


def only_json(context: typer.Context, asked: bool) -> bool:
    """With `--json`, keep the command's text away from stdout, which then holds the object alone."""
    from workers.cli import terminal

    if asked:
        context.with_resource(terminal.only_json())
    return asked


Json = Annotated[bool, typer.Option("--json", callback=only_json, help="Print one JSON object instead of text.")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="TOML file with settings.", show_default="$CSATTN_CONFIG, or none")
]
MODEL_HELP = "Model directory, .gguf file or hub id."
Model = Annotated[str | None, typer.Option(callback=named, help=MODEL_HELP, show_default="the installed SmolLM2-135M")]
DTYPE_HELP = "Dtype of the model and of the KV cache: float32, bfloat16 or float16."
Dtype = Annotated[str, typer.Option(help=DTYPE_HELP)]
WEIGHTS_HELP = "Round linear layers and experts to fp8 or int4."
Weights = Annotated[str | None, typer.Option(help=WEIGHTS_HELP, show_default="as published")]
Store = Annotated[
    Any, typer.Option(parser=place, metavar="PLACE", help="Directory or URL (s3://, ...) that holds artifacts.")
]
LocalStore = Annotated[Path, typer.Option(parser=directory, metavar="PATH", help="Directory that holds artifacts.")]
ArtifactPath = Annotated[
    Any,
    typer.Argument(
        parser=place,
        metavar="ARTIFACT",
        help="The artifact's directory or URL, or STORE/ID, where the first characters of the id suffice.",
    ),
]
KEEP_HELP = (
    "Share of the context's rows chosen at each step, in (0, 1]; the first and last rows are always read as well."
)
Keep = Annotated[float, typer.Option(help=KEEP_HELP)]
Placement = Annotated[
    str | None,
    typer.Option(
        help="cpu; or decode on a GPU that holds index and KV (device), the index (hybrid) or neither (host).",
        show_default="device or hybrid where a GPU has room, else cpu",
    ),
]
Devices = Annotated[
    int | None, typer.Option("--devices", help="GPUs that split the model's heads.", min=1, show_default="1")
]
KvCodec = Annotated[
    str | None,
    typer.Option(
        help="Format of the context's keys and values: q8_0, q4_0, fp8, float16, ..., or k=q8_0,v=q4_0.",
        show_default="as built",
    ),
]
Lookahead = Annotated[
    int | None,
    typer.Option(
        help="1: search one layer ahead, with a predicted query; 0: with the layer's own query.",
        show_default="1 in placement host or with rows on disk, else 0",
    ),
]
WindowLen = Annotated[int, typer.Option(help="Last rows of the context and of the request that are always read.")]
SearchPeriod = Annotated[
    int, typer.Option(help="Search at every N-th token of a request; the tokens between reuse its choice.")
]
Threads = Annotated[int | None, typer.Option(help="CPU threads.", show_default="all cores")]
Rest = Annotated[
    str | None,
    typer.Option(
        help="How rows that are not read are attended to: sketch (by their codes), moments (by an estimate) or none.",
        show_default="sketch with the selector csattn over a sketch, else none",
    ),
]
