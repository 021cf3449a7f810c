"""The commands of `csattn` and their options; the work of each is in the module that it imports."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from csattn.build_options import AUTO, BuildOptions
from csattn.config import PRESET_NAMES, SearchConfig
from csattn.selector_names import ABOUT, described, selector_named
from workers.cli.configuring import config
from workers.cli.options import (
    DTYPE_HELP,
    KEEP_HELP,
    MODEL_HELP,
    WEIGHTS_HELP,
    ArtifactPath,
    ConfigFile,
    Devices,
    Dtype,
    Json,
    Keep,
    KvCodec,
    LocalStore,
    Lookahead,
    Model,
    Placement,
    Rest,
    SearchPeriod,
    Store,
    Threads,
    Weights,
    WindowLen,
    directory,
    named,
    only_json,
    place,
)
from workers.cli.streaming import stream
from workers.cli.version import full_version

app = typer.Typer(
    help="Decode from a long, shared context while reading a few percent of its KV cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(config, name="config")


def _print_version(asked: bool) -> None:
    if asked:
        print(f"csattn {full_version()}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of csattn itself."""


# Commands import what they need when they run, so that `csattn --help` does not wait for torch.
_SEARCH, _BUILD = SearchConfig(), BuildOptions()  # the defaults of options that several commands have


@app.command()
def build(
    context: Annotated[str | None, typer.Option(help="Text file to build from, or - for standard input.")] = None,
    tokens: Annotated[Path | None, typer.Option(help="File with token ids, a JSON list, instead of a text.")] = None,
    jobs: Annotated[
        Path | None, typer.Option(help="File with many contexts, one JSON object per line, or - for standard input.")
    ] = None,
    ray: Annotated[
        str | None, typer.Option(help="Ray cluster that builds the contexts of --jobs: an address, auto or local.")
    ] = None,
    model: Model = None,
    store: Store = Path("store"),
    preset: Annotated[str, typer.Option(help=f"Kind of index: {', '.join(PRESET_NAMES)}.")] = _BUILD.preset,
    num_fine: Annotated[
        int | None, typer.Option(help="Preset default: words of 4-bit codes per 64 dimensions of a key.")
    ] = None,
    num_coarse: Annotated[
        int | None, typer.Option(help="Preset default: words of 2-bit codes per 64 dimensions of a key.")
    ] = None,
    segment_len: Annotated[
        int | None, typer.Option(help="Preset default: approximate number of rows that share a transform.")
    ] = None,
    num_subspaces: Annotated[
        int | None, typer.Option(help="Presets lists, paper: number of slices of head_dim (m).")
    ] = None,
    num_centroids: Annotated[int | None, typer.Option(help="Presets lists, paper: centroids per subspace (C).")] = None,
    list_len: Annotated[
        float | None, typer.Option(help="Presets lists, paper: length of a list (L), as a share of the context.")
    ] = None,
    kmeans: Annotated[
        str | None,
        typer.Option(
            help="Presets lists, paper: library that runs k-means, faiss or torch.",
            show_default="torch on a GPU or macOS, else faiss",
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help=f"{DTYPE_HELP} auto: that of the model's files where it is fast, else float32.")
    ] = _BUILD.dtype,
    weights: Weights = None,
    chat: Annotated[bool, typer.Option(help="Wrap the context in the model's chat template.")] = _BUILD.chat,
    threads: Threads = None,
    device: Annotated[
        str, typer.Option(help="Device that builds: cpu, cuda, or auto (a GPU if there is one).")
    ] = "auto",
    sync: Annotated[
        bool,
        typer.Option(
            help="Wait until the data is on the disk. With --no-sync, run `csattn verify` after a power failure."
        ),
    ] = True,
    progress: Annotated[
        str, typer.Option(help="Form of progress reports: auto, or json (one JSON object per line on stderr).")
    ] = "auto",
    json: Json = False,
) -> None:
    """Prefill and index a context, and write it to the store as an artifact. With --jobs, do this for many contexts."""
    from workers.cli import batching, building, terminal
    from workers.words import size

    batching.require_one_source(context, tokens, jobs, ray, sync)
    building.require_progress(progress)
    changes: dict[str, Any] = {"num_fine": num_fine, "num_coarse": num_coarse, "segment_len": segment_len}
    changes |= {"num_subspaces": num_subspaces, "num_centroids": num_centroids, "list_len": list_len, "kmeans": kmeans}
    options = BuildOptions(model=model, preset=preset, dtype=dtype, weights=weights, chat=chat, **changes)
    if jobs is not None:
        report = batching.build_jobs(jobs, options, store, ray, threads, device, progress, sync)
        terminal.end(report, json)
        sys.exit(1 if report["failed"] else 0)
    result = building.build(
        context, tokens, options, store, device=device, threads=threads, progress=progress, sync=sync
    )
    terminal.out.print(f"artifact {result['artifact']} in {result['path']}, {size(result['size_bytes'])}")
    terminal.end(result, json)


@app.command()
def generate(
    artifact: ArtifactPath,
    prompt: Annotated[str, typer.Option(help="The question to ask about the context, or - for standard input.")],
    keep: Keep = _SEARCH.keep,
    selector: Annotated[str, typer.Option(help=f"How rows are chosen. {described()}.")] = "csattn",
    lookahead: Lookahead = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of the answer.")] = 128,
    compare: Annotated[
        bool, typer.Option(help="Also print full attention's answer, and compare speed and rows read.")
    ] = False,
    search_period: SearchPeriod = _SEARCH.search_period,
    window_len: WindowLen = _SEARCH.window_len,
    rest: Rest = None,
    model: Annotated[str | None, typer.Option(callback=named, help=MODEL_HELP, show_default="the artifact's")] = None,
    weights: Annotated[str | None, typer.Option(help=WEIGHTS_HELP, show_default="as the artifact was built")] = None,
    threads: Threads = None,
    placement: Placement = None,
    devices: Devices = None,
    kv_codec: KvCodec = None,
    host_budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Host memory for the context's rows, such as 64MiB; the other rows stay on disk.",
            show_default="all in memory",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Answer a question from an artifact, printing tokens as they come."""
    from workers.cli import generating, terminal
    from workers.settings import default_lookahead

    if lookahead is None:
        lookahead = default_lookahead(placement or AUTO, host_budget is not None)
    config = generating.search_config(keep, lookahead, search_period, window_len, rest)
    options = generating.AskOptions(
        selector=selector,
        max_new_tokens=max_new_tokens,
        compare=compare,
        model=model,
        weights=weights,
        threads=threads,
        placement=placement or AUTO,
        num_devices=1 if devices is None else devices,
        kv_codec=kv_codec,
        host_budget=host_budget,
    )
    terminal.end(generating.ask(artifact, prompt, config, options), json)


app.command()(stream)


@app.command(name="eval")
def evaluate(
    text: Annotated[
        Path, typer.Option(help="Text file of at least context-len + eval-len + 1 tokens, or - for standard input.")
    ],
    model: Model = None,
    context_len: Annotated[int, typer.Option(min=1, help="Tokens that are prefilled and indexed.")] = 7680,
    eval_len: Annotated[int, typer.Option(min=1, help="Tokens after the context that are predicted.")] = 512,
    keep: Keep = _SEARCH.keep,
    presets: Annotated[
        str, typer.Option(help="Presets to build and measure, comma-separated; may be empty.")
    ] = "default,paper",
    selectors: Annotated[
        str, typer.Option(help=f"Selectors to measure too, comma-separated; may be empty. {described()}.")
    ] = "exact,window",
    lookahead: Annotated[str, typer.Option(help="Layers to search ahead: 0, 1, or 0,1 to measure both.")] = "0",
    search_period: SearchPeriod = _SEARCH.search_period,
    window_len: WindowLen = _SEARCH.window_len,
    rest: Rest = None,
    dtype: Dtype = "float32",
    weights: Weights = None,
    stretch: Annotated[float, typer.Option(min=1, help="Factor by which YaRN extends the model's positions.")] = 1.0,
    store: Annotated[
        Path | None,
        typer.Option(
            parser=directory,
            metavar="PATH",
            help="Directory in which to keep the artifacts.",
            show_default="a scratch directory",
        ),
    ] = None,
    threads: Threads = None,
    kv_codec: KvCodec = None,
    json: Json = False,
) -> None:
    """Compare sparse attention with full attention on the next tokens of a text (teacher-forced)."""
    from offload.codecs.formats import KvFormat
    from workers.cli import comparing, generating, terminal

    plan = comparing.Plan(
        context_len=context_len,
        eval_len=eval_len,
        config=generating.search_config(keep, 0, search_period, window_len, rest),
        presets=comparing.names("presets", presets, PRESET_NAMES),
        selectors=[selector_named(name) for name in comparing.names("selectors", selectors, tuple(ABOUT))],
        lookaheads=[int(ahead) for ahead in comparing.names("lookahead", lookahead, ("0", "1"))],
        kv_format=None if kv_codec is None else KvFormat.parse(kv_codec),
    )
    terminal.end(comparing.compare(text, plan, model, dtype, stretch, store, threads, weights), json)


@app.command()
def inspect(artifact: ArtifactPath, json: Json = False) -> None:
    """Show what an artifact holds and how it was made."""
    from workers.cli import store_commands, terminal

    terminal.end(store_commands.inspect(artifact), json)


@app.command()
def verify(artifact: ArtifactPath, json: Json = False) -> None:
    """Check every byte of an artifact, or of all artifacts in a store's directory, against its manifest. Exits with 1
    if one is damaged or has a format that this csattn does not read."""
    from workers.cli import store_commands, terminal

    result = store_commands.verify(artifact)
    terminal.end(result, json)
    sys.exit(0 if result["intact"] else 1)


@app.command()
def ls(store: Store = Path("store"), json: Json = False) -> None:
    """List the finished artifacts of a store. Exits with 0 even if one is not usable (--json lists these in `broken`);
    `csattn verify STORE` exits with 1 then."""
    from workers.cli import store_commands, terminal

    terminal.end(store_commands.listing(store), json)


@app.command()
def rm(
    artifacts: Annotated[
        list[Any],
        typer.Argument(
            parser=place, metavar="ARTIFACT", help="Directories or URLs of artifacts, or STORE/ID, as for `inspect`."
        ),
    ],
    json: Json = False,
) -> None:
    """Remove artifacts from their store. A process that has one open can still read it."""
    from workers.cli import store_commands, terminal

    terminal.end(store_commands.remove(artifacts), json)


@app.command()
def gc(
    store: Store = Path("store"),
    cache_bytes: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Also remove local copies of remote artifacts, least recently used first, until they take at most "
            "this many bytes.",
        ),
    ] = None,
    kept: Annotated[
        bool,
        typer.Option(
            "--kept",
            help="Also remove what services have kept of prompts and turns. Stop the store's services first: this is "
            "refused while one runs on this machine. One on another machine may not be detected; it rebuilds what "
            "was removed.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Remove leftovers of interrupted builds and, on request, copies of remote artifacts and what services kept."""
    from workers.cli import store_commands, terminal

    terminal.end(store_commands.clean(store, cache_bytes, kept), json)


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(parser=directory, metavar="PATH", help="Directory for the picture and the artifact.")
    ] = Path("demo-out"),
    json: Json = False,
) -> None:
    """Build a context from a sample document, ask three questions, and draw which rows were read."""
    from workers.cli import demo, terminal

    terminal.end(demo.run(out), json)


@app.command()
def doctor(
    model: Annotated[
        str | None, typer.Argument(callback=named, help="Also check a model: a directory, a .gguf file or a hub id.")
    ] = None,
    weights: Weights = None,
    store: LocalStore = Path("store"),
    json: Json = False,
) -> None:
    """Check libraries, GPU, pinned memory, free memory and the store, and advise. Exits with 1 if there is a problem.

    For a MODEL, also report how many bytes it takes, or why it is refused; weights are not read.
    """
    from workers.cli import doctor_command, terminal

    result = doctor_command.doctor(store, model, weights)
    terminal.end(result, json)
    sys.exit(0 if result["healthy"] else 1)


@app.command()
def serve(
    file: ConfigFile = None,
    local: Annotated[bool, typer.Option("--local", help="Run in this process only.", show_default="on Ray")] = False,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 chooses a free one.", show_default="8000")] = None,
    store: Annotated[
        Path | None,
        typer.Option(parser=directory, metavar="PATH", help="Directory that holds artifacts.", show_default="store"),
    ] = None,
    context: Annotated[
        list[str] | None, typer.Option(metavar="NAME=ARTIFACT", help="Serve an artifact of the store under this name.")
    ] = None,
    model: Model = None,
    weights: Weights = None,
    placement: Placement = None,
    devices: Devices = None,
    kv_codec: KvCodec = None,
    selector: Annotated[
        str | None,
        typer.Option(help="Selector of requests that name none; full reads all rows.", show_default="csattn"),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads.", show_default="all cores")] = None,
    keep: Annotated[float | None, typer.Option(help=KEEP_HELP, show_default=str(_SEARCH.keep))] = None,
    lookahead: Lookahead = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Set any setting that `csattn config show` lists; may be repeated."
        ),
    ] = None,
    json: Annotated[
        bool,
        typer.Option("--json", callback=only_json, help="Print one JSON object instead of text, when it is ready."),
    ] = False,
) -> None:
    """Serve OpenAI's API over HTTP, from contexts that are built once. Ctrl-C or SIGTERM ends the service."""
    from workers.cli import serving
    from workers.cli.configuring import parse_changes

    flags: dict[str, object] = {"server.host": host, "server.port": port, "store.path": store, "model.name": model}
    flags |= {"engine.placement": placement, "engine.num_threads": threads, "engine.kv_codec": kv_codec}
    flags |= {"engine.selector": selector, "engine.num_devices": devices, "model.weights": weights}
    flags |= {"search.keep": keep, "search.lookahead": lookahead}
    serving.serve(file, flags | parse_changes(changes or []), context or [], local, json)
