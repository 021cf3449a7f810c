"""`csattn eval`: compare presets and selectors on one text with full attention."""

import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from csattn.artifact import open_artifact
from csattn.config import SearchConfig, preset
from csattn.errors import ConfigError, ContextError
from csattn.models import LoadedModel
from csattn.models.description import describe
from csattn.selector_names import SelectorName
from csattn.selectors import resolve_rest
from index_build.inputs import read_text
from index_build.plan import make_plan
from offload.codecs.formats import KvFormat
from workers.cli.building import run_build, show_loading, use_threads
from workers.cli.terminal import counting, err, out, table
from workers.context_layers import require_received
from workers.engine.model_choice import require_plain_rows
from workers.evaluate import full_attention, measure

_CHOOSE_NOTHING: tuple[SelectorName, ...] = ("window", "full")  # so there is nothing to look ahead for


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to evaluate on the text."""

    context_len: int  # tokens that are prefilled and indexed
    eval_len: int  # tokens after them whose successors are predicted
    config: SearchConfig
    presets: list[str]
    selectors: list[SelectorName]
    lookaheads: list[int]  # of all runs that choose rows
    kv_format: KvFormat | None = None  # format of the context's rows for all but full attention

    def __post_init__(self) -> None:
        if not self.presets and not self.selectors:
            raise ConfigError("there is nothing to evaluate; give a preset with --presets, or one of --selectors")
        if not self.lookaheads:
            raise ConfigError("no lookahead was given; give --lookahead 0, 1 or 0,1")

    @property
    def indexed(self) -> list[str]:
        """The presets to build, at least one: selectors are measured over the first one's artifact."""
        return self.presets or ["default"]

    @property
    def runs(self) -> list["Run"]:
        """The runs in the order in which they are shown. Raises ConfigError for options that do not go together."""
        of_presets = [Run("preset", name, name, "csattn", ahead) for name in self.presets for ahead in self.lookaheads]
        of_selectors = [
            Run("selector", name, self.indexed[0], name, ahead)
            for name in self.selectors
            for ahead in ((0,) if name in _CHOOSE_NOTHING else self.lookaheads)
        ]
        for run in (*of_presets, *of_selectors):
            resolve_rest(self.config, run.selector, preset(run.preset).layout)
        return of_presets + of_selectors


@dataclass(frozen=True, slots=True)
class Run:
    """One preset or selector that is compared."""

    kind: Literal["preset", "selector"]
    name: str  # as in the option
    preset: str  # whose artifact it reads
    selector: SelectorName
    lookahead: int


def compare(
    text: Path,
    plan: Plan,
    model: str | None,
    dtype: str,
    stretch: float,  # factor by which YaRN extends the model's positions
    store: Path | None,
    threads: int | None,
    weights: str | None,  # what weights are rounded to
) -> dict[str, Any]:
    """Evaluate, and return the command's JSON object."""
    use_threads(threads)
    content = read_text(str(text))
    runs = plan.runs  # refuses what does not go together, before a model is loaded
    loaded = show_loading(model, dtype, stretch=stretch, weights=weights)
    spec = describe(loaded.model.config)
    require_plain_rows(spec, "an evaluation")
    if "h2o" in plan.selectors and plan.config.keep < 1:
        require_received(loaded)
    is_capped = any(spec.layers[layer_idx].attention.logit_cap is not None for layer_idx in spec.indexed_layers)
    context, following = _cut(text, content, loaded, plan)
    results = []
    with ExitStack() as stack:
        place = store or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="csattn-eval-")))
        artifacts = {}
        for name in plan.indexed:
            err.print(f"context, preset {name}")
            to_build = make_plan(loaded, context, preset(name), {"wrapping": "none", "preset": name})
            report = run_build(loaded, to_build, place)
            artifacts[name] = stack.enter_context(open_artifact(report.path))
        with counting("full attention", plan.eval_len, "token"):
            baseline = full_attention(loaded, artifacts[plan.indexed[0]], following)
        for run in runs:
            artifact, search = artifacts[run.preset], replace(plan.config, lookahead=run.lookahead)
            with counting(f"{run.name}, lookahead {run.lookahead}", plan.eval_len, "token") as bar:
                quality = measure(
                    loaded, artifact, search, run.selector, following, baseline, bar.advance, plan.kv_format
                )
            rest = resolve_rest(search, run.selector, artifact.spec.index_config.layout, is_capped)
            shown = {run.kind: run.name, "lookahead": run.lookahead, "keep": search.keep}
            shown["rest"] = "none" if search.keep == 1 else rest  # all rows are read then
            results.append({**shown, **quality.to_json()})
    title = f"{_named(text)}: keep {100 * plan.config.keep:g} %; full attention has NLL {baseline.nll:.4f}"
    out.print(_results_table(title, baseline.nll, results))
    return {
        "text": str(text),
        "model": loaded.name,
        "stretch": stretch,
        "weights": weights,
        "context_len": plan.context_len,
        "eval_len": plan.eval_len,
        "search": {name: of for name, of in asdict(plan.config).items() if name not in ("lookahead", "rest")},
        "kv_codec": None if plan.kv_format is None else str(plan.kv_format),
        "nll_full": round(baseline.nll, 6),
        "results": results,
    }


def names(option: str, value: str, allowed: tuple[str, ...]) -> list[str]:
    """Return the parts of a comma-separated option, each once. Raises ConfigError for one that is not allowed."""
    given = list(dict.fromkeys(name.strip() for name in value.split(",") if name.strip()))
    for name in given:
        if name not in allowed:
            raise ConfigError(f"--{option} got {name!r}; choose from {', '.join(allowed)}")
    return given


def _cut(text: Path, content: str, loaded: LoadedModel, plan: Plan) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the context's ids, and the ids that follow: one more than are fed, because each predicts the next."""
    token_ids = np.asarray(loaded.tokenizer(content).input_ids, dtype=np.int32)
    needed = plan.context_len + plan.eval_len + 1
    if len(token_ids) < needed:
        raise ContextError(
            f"{_named(text)} has {len(token_ids)} tokens, context and evaluation need {needed}; "
            "give a longer text, or a smaller --context-len or --eval-len"
        )
    if needed - 1 > loaded.geometry.max_positions:
        raise ContextError(
            f"context and evaluation take {needed - 1} positions, the model has {loaded.geometry.max_positions}; "
            "give a smaller --context-len or --eval-len, or a --stretch"
        )
    return token_ids[: plan.context_len], token_ids[plan.context_len : needed]


def _named(text: Path) -> str:
    return "standard input" if str(text) == "-" else text.name


def _results_table(title: str, nll_full: float, results: list[dict[str, Any]]) -> Any:
    rows = [
        [
            f"{result.get('preset', result.get('selector'))}{', lookahead 1' if result['lookahead'] else ''}",
            result["rest"],
            f"{result['nll'] - nll_full:+.4f}",
            f"{result['kl']:.4f}",
            f"{result['top1_agreement']:.3f}",
            f"{result['recall_at_k']:.3f}",
            f"{result['attention_mass']:.3f}",
            f"{result['output_error']:.3f}",
            f"{100 * result['rows_read_share']:.1f} %",
            f"{result['index_bytes_per_key']:.0f}",
            f"{result['search_bytes_per_step'] / 1e3:.0f}",
            f"{result['rest_bytes_per_step'] / 1e3:.0f}",
            f"{result['search_ms_per_step']:.1f}",
        ]
        for result in results
    ]
    quality = ["NLL gap", "KL", "top-1", "recall", "mass", "error", "rows read"]
    columns = ["", "rest", *quality, "bytes/key", "search KB/step", "rest KB/step", "search ms/step"]
    return table(title, columns, rows)
