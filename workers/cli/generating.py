"""`csattn generate`: answer one question from one artifact, token by token; on request with full attention too."""

import gc
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from numba.core.event import Event, TimingListener, install_listener

from csattn.artifact import Artifact, open_artifact
from csattn.artifact.manifest import NOT_ROUNDED
from csattn.build_options import AUTO
from csattn.config import RestKind, SearchConfig
from csattn.models import LoadedModel
from csattn.selector_names import SelectorName, selector_named
from csattn.selectors import resolve_rest
from index_build.inputs import given_prompt
from offload.codecs.formats import KvFormat
from offload.sizes import parse_size
from workers.auto import choose_placement
from workers.cli.building import show_loading, use_threads
from workers.cli.terminal import err, out, reading, steps, table, write
from workers.engine.answer import Answer, answer, question_tokens
from workers.engine.gpu.memory import require_weights
from workers.engine.model_choice import SELECTOR as MODEL_CHOICE
from workers.engine.opening import open_engine, require_together
from workers.serving.step_engine import StepEngine
from workers.settings import EngineSettings

_REPORTED_COMPILE_S = 1.0  # compile time from which it is reported


def search_config(keep: float, lookahead: int, search_period: int, window_len: int, rest: str | None) -> SearchConfig:
    return SearchConfig(
        keep=keep,
        lookahead=lookahead,
        search_period=search_period,
        window_len=window_len,
        rest=cast(RestKind | None, rest),  # SearchConfig refuses others by name
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AskOptions:
    """How a question is answered. Raises ConfigError for options that do not go together."""

    selector: str = "csattn"
    max_new_tokens: int = 128
    compare: bool = False  # answer with full attention, too
    model: str | None = None  # None: the artifact's
    weights: str | None = None  # what weights are rounded to; None: as the artifact's were
    threads: int | None = None  # None: all cores
    placement: str = AUTO  # or cpu or, on a GPU, where index and KV are: device, hybrid, host
    num_devices: int = 1  # GPUs that share out the model's heads
    kv_codec: str | None = None  # how the context's rows are kept; None: as they were built
    host_budget: str | None = None  # host memory for the context's rows; None: as much as they take

    def __post_init__(self) -> None:
        kv_format = None if self.kv_codec is None else KvFormat.parse(self.kv_codec)
        budget_bytes = None if self.host_budget is None else parse_size(self.host_budget)
        if self.placement != AUTO:
            require_together(self.placement, self.selector, budget_bytes, self.num_devices, kv_format)


def ask(place: Path | str, prompt: str, config: SearchConfig, options: AskOptions) -> dict[str, Any]:
    """Answer the question, and return the command's JSON object."""
    prompt = given_prompt(prompt)
    use_threads(options.threads)
    with open_artifact(place) as artifact:
        resolve_rest(config, selector_named(options.selector), artifact.spec.index_config.layout)  # before loading
        name, dtype = options.model or artifact.spec.model_name, artifact.spec.kv_dtype
        then = artifact.manifest.weights
        weights = options.weights or (None if then == NOT_ROUNDED else then)
        if options.placement == AUTO:
            options = _placed(options, name, weights, artifact)
        elif options.placement != "cpu" and options.num_devices == 1:
            require_weights(name, dtype, weights, options.placement)
        loaded = show_loading(name, dtype, weights=weights)
        with install_listener("numba:compile", CompileTimer()) as compiling:
            sparse = _answer(loaded, artifact, config, options.selector, prompt, options)
        compile_s = compiling.duration if compiling.done else 0.0
        result = {**sparse.to_json(), **_requested(config, sparse, artifact), "compile_s": compile_s}
        if compile_s > _REPORTED_COMPILE_S:
            out.print(
                f"Compiling kernels took {compile_s:.0f} s, once for this machine: partly before the question was "
                "read, partly within the time to its first token."
            )
        if options.compare:
            gc.collect()  # frees what the first engine has left on the device
            full = _answer(loaded, artifact, config, "full", prompt, replace(options, kv_codec=None, num_devices=1))
            out.print(comparison(f"keep {100 * config.keep:g} %, rest {result['rest']}", sparse, full))
            result["full"] = full.to_json()
    return result


class CompileTimer(TimingListener):  # type: ignore[misc]  # numba has no types
    """Times how long kernels are compiled, and says so when it begins: nothing else is shown meanwhile."""

    def on_start(self, event: Event) -> None:
        if self._depth == 0 and not self.done:
            err.print("compiling kernels, once for this machine")
        super().on_start(event)


def _placed(options: AskOptions, name: str, weights: str | None, artifact: Artifact) -> AskOptions:
    """Choose a placement for this artifact."""
    placement, reason = "cpu", ""
    if options.host_budget is None:
        of = EngineSettings(
            selector=cast(SelectorName, options.selector),
            kv_codec=options.kv_codec,
            num_devices=options.num_devices,
            num_contexts=1,
        )
        placement, reason = choose_placement(name, artifact.spec.kv_dtype, weights, of, artifact.spec)
    if reason:
        err.print(f"decoding on the CPU: {reason}", soft_wrap=True)
    return replace(options, placement=placement)


def _requested(config: SearchConfig, result: Answer, artifact: Artifact) -> dict[str, Any]:
    """Return the options, besides the selector, that the answer depends on."""
    if result.selector == MODEL_CHOICE:
        return {"keep": None, "rest": "none"}
    selector = cast(SelectorName, result.selector)
    rest = resolve_rest(config, selector, artifact.spec.index_config.layout)
    return {"keep": config.keep, "rest": rest}


def _answer(
    loaded: LoadedModel, artifact: Artifact, config: SearchConfig, selector: str, prompt: str, options: AskOptions
) -> Answer:
    ids, at_most, where = question_tokens(loaded, artifact, prompt), options.max_new_tokens, options.placement
    with ExitStack() as stack:
        told: dict[str, Any] = {} if where == "cpu" else {"on_progress": stack.enter_context(steps())}
        engine = open_engine(
            loaded,
            artifact,
            config,
            selector,
            placement=where,
            num_devices=options.num_devices,
            kv_format=options.kv_codec,
            host_budget_bytes=options.host_budget,
            max_requests=1,
            tail_capacity=len(ids) + at_most,
            num_threads=options.threads,
            **told,
        )
        stack.enter_context(engine)
        name = selector if where == "cpu" else f"{selector}, {where}"
        return speak(engine, loaded, artifact, config, cast(SelectorName, selector), ids, at_most, name)


def speak(
    engine: StepEngine,
    loaded: LoadedModel,
    artifact: Artifact,
    config: SearchConfig,
    selector: SelectorName,
    ids: list[int],  # the question's
    max_new_tokens: int,
    name: str,
) -> Answer:
    """Answer, printing the name once the question is read, and then the text as it comes."""
    with reading("reading the question") as show, ExitStack() as line:

        def on_read(done: int, total: int) -> None:
            show(done, total)
            if done == total:
                out.print(f"{name}: ", end="", style="bold")
                line.callback(out.print)  # ends the line

        return answer(engine, loaded, artifact, config, ids, max_new_tokens, write, selector, on_read=on_read)


def comparison(title: str, sparse: Answer, full: Answer) -> Any:
    """Return a table of both answers' speed and rows read."""
    rows = [
        [
            "the model's own choice" if result.selector == MODEL_CHOICE else name,
            result.selector,
            f"{result.first_token_s * 1e3:.0f} ms",
            f"{result.tokens_per_s:.1f}",
            f"{result.rows_read_per_step:.0f}",
            f"{100 * result.rows_read_per_step / result.rows_full_attention:.1f} %",
        ]
        for name, result in (("sparse", sparse), ("full attention", full))
    ]
    return table(title, ["", "selector", "first token", "tokens/s", "rows read per step and head", "of all"], rows)
