"""`csattn generate`: one question, one artifact, tokens as they come; full attention beside it on request."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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
from workers.session import csattn_session


def search_config(keep: float, lookahead: int, search_period: int, window_len: int, rest: str | None) -> SearchConfig:
    return SearchConfig(
        keep=keep,
        lookahead=lookahead,
        search_period=search_period,
        window_len=window_len,
        rest=cast(RestKind | None, rest),  # refuses others by name
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AskOptions:
    """How a question is answered. Raises ConfigError for what does not go together."""

    selector: str = "csattn"
    max_new_tokens: int = 128
    compare: bool = False  # full attention's answer beside it
    model: str | None = None  # None: the artifact's
    threads: int | None = None  # None: all cores
    placement: str = "cpu"  # or where index and KV lie for a GPU
    kv_codec: str | None = None  # how the context's rows are kept; None: as they were built
    host_budget: str | None = None  # of host memory for the context's rows; None: all that they take

    def __post_init__(self) -> None:
        if self.placement not in ("cpu", *PLACEMENTS):
            raise ConfigError(f"unknown placement {self.placement!r}; choose one of cpu, {', '.join(PLACEMENTS)}")
        on_cpu, kv_format, budget = self.placement == "cpu", self.kv_format, self.budget_bytes
        if on_cpu:
            return
        if self.selector != "csattn" or self.compare:
            raise ConfigError("a placement decodes with csattn's own selector; leave out --selector and --compare")
        if kv_format is not None:
            raise ConfigError(f"on a GPU, rows are kept as they were built; leave out --kv-codec {kv_format}")
        if budget is not None:
            raise ConfigError(
                "a host budget is for decoding on the CPU; leave out --host-budget, or choose placement cpu"
            )

    @property
    def kv_format(self) -> KvFormat | None:
        return None if self.kv_codec is None else KvFormat.parse(self.kv_codec)

    @property
    def budget_bytes(self) -> int | None:
        return None if self.host_budget is None else parse_size(self.host_budget)


def ask(place: Path | str, prompt: str, config: SearchConfig, options: AskOptions) -> dict[str, Any]:
    """Answer, and return the verb's JSON object."""
    require_utf8("--prompt", prompt)
    use_threads(options.threads)
    with open_artifact(place) as artifact:
        loaded = show_loading(options.model or artifact.spec.model_name, artifact.spec.kv_dtype)
        which, budget, at_most = (loaded, artifact, config), options.budget_bytes, options.max_new_tokens
        if options.placement != "cpu" or (options.selector == "csattn" and budget is None):
            sparse = _by_steps(*which, prompt, options)
        else:
            asked = options.selector, prompt, at_most
            sparse = stream(*which, *asked, kv_format=options.kv_format, host_budget_bytes=budget)
        result = {**sparse.to_json(), **_asked_for(config, sparse, artifact)}
        if options.compare:
            full = stream(*which, "full", prompt, at_most, host_budget_bytes=budget)
            out.print(comparison(f"keep {100 * config.keep:g} %, rest {result['rest']}", sparse, full))
            result["full"] = full.to_json()
    return result


def _asked_for(config: SearchConfig, said: Answer, artifact: Artifact) -> dict[str, Any]:
    """What decided about the answer besides its selector."""
    selector = cast(SelectorName, said.selector)
    rest = resolve_rest(config, selector, artifact.spec.index_config.layout)
    return {"keep": config.keep, "rest": rest}


def _by_steps(
    loaded: LoadedModel, artifact: Artifact, config: SearchConfig, prompt: str, options: AskOptions
) -> Answer:
    """Answer by the steps that the service makes, with the text written out as it comes."""
    from workers.engine import CpuEngine, GpuEngine, answer, question_tokens

    artifact.require_model(loaded.fingerprint)
    artifact.require_tokenizer(loaded.tokenizer_hash)
    ids = question_tokens(loaded, artifact, prompt)
    room, threads = len(ids) + options.max_new_tokens, options.threads
    with ExitStack() as stack:
        engine: CpuEngine | GpuEngine
        if options.placement == "cpu":
            engine = CpuEngine(
                loaded, num_slots=1, tail_capacity=room, num_threads=threads, kv_format=options.kv_format
            )
        else:
            tell = stack.enter_context(steps())
            placed = loaded, config, options.placement
            engine = GpuEngine(*placed, tail_capacity=room, num_threads=threads, on_progress=tell)
        stack.enter_context(engine)
        engine.add_context(0, artifact)
        stack.enter_context(_speaking("csattn" if options.placement == "cpu" else options.placement))
        return answer(engine, loaded, artifact, config, ids, options.max_new_tokens, _write)


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
