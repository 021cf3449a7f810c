"""`csattn generate`: one question, one artifact, tokens as they come; full attention beside it on request."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

from csattn.artifact import Artifact, open_artifact
from csattn.config import RestKind, SearchConfig
from csattn.errors import ConfigError
from csattn.models import LoadedModel
from csattn.selector_names import SelectorName
from csattn.selectors import resolve_rest
from index_build.inputs import require_utf8
from offload.codecs.formats import KvFormat
from offload.sizes import parse_size
from workers.cli.building import show_loading, use_threads
from workers.cli.terminal import out, steps, table
from workers.decode import Observer
from workers.engine.memory import PLACEMENTS
from workers.generate import Answer, answer
from workers.serving.step_engine import StepEngine
from workers.session import csattn_session


def search_config(keep: float, lookahead: int, search_period: int, window_len: int, rest: str | None) -> SearchConfig:
    return SearchConfig(
        keep=keep,
        lookahead=lookahead,
        search_period=search_period,
        window_len=window_len,
        rest=cast(RestKind | None, rest),  # refuses others by name
    )


def ask(
    place: Path | str,
    prompt: str,
    config: SearchConfig,
    selector: str,
    max_new_tokens: int,
    compare: bool,
    model: str | None,
    threads: int | None,
    placement: str | None = None,  # cpu, or where index and KV lie for a GPU; None: cpu
    kv_codec: str | None = None,  # how the context's rows are kept; None: as they were built
    host_budget: str | None = None,  # of host memory for the context's rows; None: all that they take
) -> dict[str, Any]:
    """Answer, and return the verb's JSON object."""
    require_utf8("--prompt", prompt)
    kv_format = None if kv_codec is None else KvFormat.parse(kv_codec)
    budget = None if host_budget is None else parse_size(host_budget)
    use_threads(threads)
    placement = placement or "cpu"
    if placement not in ("cpu", *PLACEMENTS):
        raise ConfigError(f"unknown placement {placement!r}; choose one of cpu, {', '.join(PLACEMENTS)}")
    if placement != "cpu" and (selector != "csattn" or compare):
        raise ConfigError("a placement decodes with csattn's own selector; leave out --selector and --compare")
    if placement != "cpu" and kv_format is not None:
        raise ConfigError(f"on a GPU, rows are kept as they were built; leave out --kv-codec {kv_format}")
    if placement != "cpu" and budget is not None:
        raise ConfigError("a host budget is for decoding on the CPU; leave out --host-budget, or choose placement cpu")
    with open_artifact(place) as artifact:
        loaded = show_loading(model or artifact.spec.model_name, artifact.spec.kv_dtype)
        if placement != "cpu" or (selector == "csattn" and budget is None):
            which = placement, prompt, max_new_tokens, threads, kv_format
            sparse = _by_steps(loaded, artifact, config, *which)
        else:
            sparse = stream(
                loaded,
                artifact,
                config,
                selector,
                prompt,
                max_new_tokens,
                kv_format=kv_format,
                host_budget_bytes=budget,
            )
        result = {**sparse.to_json(), **_asked_for(config, sparse, artifact)}
        if compare:
            full = stream(loaded, artifact, config, "full", prompt, max_new_tokens, host_budget_bytes=budget)
            out.print(comparison(f"keep {100 * config.keep:g} %, rest {result['rest']}", sparse, full))
            result["full"] = full.to_json()
    return result


def _asked_for(config: SearchConfig, said: Answer, artifact: Artifact) -> dict[str, Any]:
    """What decided about the answer besides its selector."""
    selector = cast(SelectorName, said.selector)
    rest = resolve_rest(config, selector, artifact.spec.index_config.layout)
    return {"keep": config.keep, "rest": rest}


def _by_steps(
    loaded: LoadedModel,
    artifact: Artifact,
    config: SearchConfig,
    placement: str,
    prompt: str,
    max_new_tokens: int,
    threads: int | None,
    kv_format: KvFormat | None,
) -> Answer:
    """Answer by the steps that the service makes, with the text written out as it comes."""
    from workers.engine import CpuEngine, GpuEngine, answer, question_tokens

    artifact.require_model(loaded.fingerprint)
    artifact.require_tokenizer(loaded.tokenizer_hash)
    ids = question_tokens(loaded, artifact, prompt)
    room = len(ids) + max_new_tokens
    with ExitStack() as stack:
        engine: StepEngine
        if placement == "cpu":
            own = CpuEngine(loaded, num_slots=1, tail_capacity=room, num_threads=threads, kv_format=kv_format)
            engine = stack.enter_context(own)
        else:
            gpu = GpuEngine(
                loaded,
                config,
                placement,
                tail_capacity=room,
                num_threads=threads,
                on_progress=stack.enter_context(steps()),
            )
            engine = stack.enter_context(gpu)
        engine.add_context(0, artifact)
        stack.enter_context(_speaking("csattn" if placement == "cpu" else placement))
        return answer(engine, loaded, artifact, config, ids, max_new_tokens, _write)


def stream(
    loaded: LoadedModel,
    artifact: Artifact,
    config: SearchConfig,
    selector: str,
    prompt: str,
    max_new_tokens: int,
    observer: Observer | None = None,
    kv_format: KvFormat | None = None,
    host_budget_bytes: int | None = None,
) -> Answer:
    """Answer with the text written out as it comes."""
    with (
        csattn_session(loaded, artifact, config, selector, kv_format, host_budget_bytes) as session,
        _speaking(selector),
    ):
        return answer(session, prompt, max_new_tokens, _write, observer)


@contextmanager
def _speaking(name: str) -> Iterator[None]:
    """Who answers, and a line that ends however the answer does."""
    out.print(f"{name}: ", end="", style="bold")
    try:
        yield
    finally:
        out.print()


def comparison(title: str, sparse: Answer, full: Answer) -> Any:
    """Answers side by side: speed and what was read."""
    rows = [
        [
            name,
            said.selector,
            f"{said.first_token_s * 1e3:.0f} ms",
            f"{said.tokens_per_s:.1f}",
            f"{said.rows_read_per_step:.0f}",
            f"{100 * said.rows_read_per_step / said.rows_full_attention:.1f} %",
        ]
        for name, said in (("sparse", sparse), ("full attention", full))
    ]
    return table(title, ["", "selector", "first token", "tokens/s", "rows read per step and head", "of all"], rows)


def _write(text: str) -> None:
    out.print(text, end="", soft_wrap=True)
