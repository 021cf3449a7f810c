"""`csattn stream`: continue a text for as long as is wanted, in constant memory."""

from typing import Annotated, Any

import typer

from csattn.errors import ConfigError
from workers.cli.options import Dtype, Json, Model, Threads


def stream(
    prompt: Annotated[str, typer.Option(help="The text to continue, or - for standard input.")],
    policy: Annotated[
        str, typer.Option(help="Rows that are kept. window: first and last rows; h2o: heavy hitters and last rows.")
    ] = "window",
    sink_len: Annotated[
        int | None, typer.Option(help="Policy window: first rows that are kept.", show_default="4")
    ] = None,
    window_len: Annotated[
        int | None, typer.Option(help="Last rows that are kept, including the current token's.", show_default="1020")
    ] = None,
    heavy_len: Annotated[
        int | None, typer.Option(help="Policy h2o: heavy hitters that are kept per KV head.", show_default="256")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens to generate; the model may end its text earlier.")
    ] = 256,
    model: Model = None,
    dtype: Dtype = "float32",
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Continue a text endlessly in constant memory, printing tokens as they come."""
    from workers.streaming.config import StreamConfig

    options = {"sink_len": sink_len, "window_len": window_len, "heavy_len": heavy_len}
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    unused = {"window": "heavy_len", "h2o": "sink_len"}.get(policy)
    if unused in given:
        raise ConfigError(f"--{unused.replace('_', '-')} has no meaning for --policy {policy}; leave it out")
    # before torch is imported; refuses other policies by name
    config, texts = StreamConfig(policy=policy, **given), list[str]()  # type: ignore[arg-type]

    from index_build.inputs import given_prompt
    from workers.cli.building import show_loading, use_threads
    from workers.cli.terminal import end, err, write
    from workers.streaming.session import StreamSession
    from workers.streaming.text import stream_text
    from workers.words import size

    def on_text(text: str) -> None:
        write(text)
        if json:  # else it would grow without end
            texts.append(text)

    use_threads(threads)
    text = given_prompt(prompt)
    loaded = show_loading(model, dtype)
    with StreamSession(loaded, config) as session:
        try:
            streamed = stream_text(session, text, max_new_tokens, on_text)
        finally:
            write("\n")
    err.print(
        f"{streamed.num_new_tokens} tokens after {streamed.prompt_len}, {streamed.tokens_per_s:.1f} tokens/s; "
        f"at most {config.max_rows} rows a layer, {size(streamed.kv_bytes)} in all layers",
        soft_wrap=True,
    )
    end({**streamed.to_json(), "text": "".join(texts)}, json)
