"""Whether a model finds what is hidden in its context: passkeys and keys by depth and length, chains, common words.

Contexts are made by `ruler.py`, with exactly the given number of tokens, and are the same for the same seed. Every
score is shown with full attention's: what full attention does not find is not counted as a selector's failure.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from bench.accuracy.answering import FULL, SET_UPS, Prompt, answer_all
from bench.accuracy.contenders import Contender, find_contenders, shares
from bench.accuracy.contexts import Context
from bench.accuracy.fitting import fit
from bench.accuracy.ruler import TASKS, Haystack, Question, string_match
from bench.accuracy.task_report import table
from bench.records import Records, load_cases, tables
from bench.timing import finish, gate, machine
from csattn.config import SearchConfig
from csattn.models import LoadedModel, load_model
from csattn.models.prompt import choose_wrapping, context_ids, question_ids

# Raise it whenever the meaning of a case changes, because a generator, a prompt or a score has changed.
VERSION = 2
KEY = ("version", "model", "task", "length", "depth", "sample", "question", "contender", "keep")


def run_task(
    loaded: LoadedModel,
    task: str,
    length: int,
    depths: list[float],
    sample: int,
    question: str,
    runs: list[tuple[Contender, float]],
    records: Records,
    stretch: float = 1.0,  # of the model's positions, only recorded: the model's fingerprint already depends on it
) -> None:
    """Ask the questions of one sample of a task with those of `runs` whose answers `records` lacks."""
    key = {"version": VERSION, "model": loaded.fingerprint, "task": task, "length": length, "sample": sample}
    key |= {"question": question}
    for haystack in TASKS[task].make(Random(f"{task} {length} {sample}"), depths, length):
        missing = [
            run
            for run in runs
            if not all(
                records.has(**key, depth=item.depth, contender=run[0].name, keep=run[1]) for item in haystack.questions
            )
        ]
        for items, prompts in _prefills(loaded, haystack, length, question) if missing else ():
            with tempfile.TemporaryDirectory() as store, Context(loaded, prompts[0].context, Path(store)) as context:
                for contender, keep in missing:
                    artifact = context.any_artifact() if contender is FULL else context.artifact(contender.preset)
                    ids = [prompt.question for prompt in prompts]
                    said = answer_all(loaded, artifact, contender, keep, ids, TASKS[task].max_new_tokens)
                    for one, text in zip(items, said, strict=True):
                        score = string_match(text, one.answers)
                        case = {**key, "depth": one.depth, "contender": contender.name, "keep": keep}
                        case |= {"stretch": stretch, "score": round(score, 4), "answers": one.answers, "said": text}
                        records.add(case)


def _prefills(
    loaded: LoadedModel, haystack: Haystack, length: int, question: str
) -> Iterator[tuple[list[Question], list[Prompt]]]:
    """Yield the questions that share a prefill, with their prompts."""
    prompts = make_prompts(loaded, haystack, length)
    if question == "sparse":
        yield list(haystack.questions), prompts
    else:
        for item, prompt in zip(haystack.questions, prompts, strict=True):
            yield [item], [prompt.set_up(question)]


def make_prompts(loaded: LoadedModel, haystack: Haystack, length: int) -> list[Prompt]:
    """Return a prompt for each question, over one context of exactly `length` tokens, in the model's chat template."""
    tokenizer = loaded.tokenizer
    wrapping = choose_wrapping(tokenizer)
    text = fit(haystack.text, lambda text: len(context_ids(tokenizer, text, wrapping)), length)
    context = context_ids(tokenizer, text, wrapping)
    before = "" if wrapping != "none" else "\n"
    prompts = []
    for item in haystack.questions:
        ids = question_ids(tokenizer, context, before + item.text, wrapping)
        start = tokenizer(("\n" if before else "") + item.answer_start, add_special_tokens=False).input_ids
        prompts.append(Prompt(context, np.concatenate([ids, np.asarray(start, dtype=np.int32)])))
    return prompts


def _require_room(loaded: LoadedModel, tasks: list[str], depths: list[float], lengths: list[int]) -> None:
    """Raise GateError at once, not after an hour, if a task does not fit into a length, or a length into the model."""
    for task in tasks:
        for length in {min(lengths), max(lengths)}:
            haystack = TASKS[task].make(Random(task), depths, length)[0]
            prompt = make_prompts(loaded, haystack, length)[0]
            needed = length + len(prompt.question) + TASKS[task].max_new_tokens
            gate(
                needed <= loaded.geometry.max_positions,
                f"{task} at {length} tokens needs {needed} positions with question and answer, the model has "
                f"{loaded.geometry.max_positions}; give a smaller length",
            )


def _lengths(text: str) -> list[int]:
    return [int(length) for length in text.split(",")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument(
        "--lengths", type=_lengths, default="1024,2048,4096,7680", help="lengths of contexts, in tokens"
    )
    parser.add_argument(
        "--depths", type=int, default=5, help="number of depths at which an answer is placed, from first to last"
    )
    parser.add_argument(
        "--samples", type=int, default=3, help="contexts per task and length, and per depth where depth varies"
    )
    parser.add_argument(
        "--question",
        choices=SET_UPS,
        default="sparse",
        help="sparse, or dense: the question is part of the prefill, which is easier",
    )
    parser.add_argument(
        "--selectors",
        default="default,exact,window",
        help="selectors and presets, or all; full attention is always measured",
    )
    parser.add_argument("--keep", type=shares, default=str(SearchConfig().keep))
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu", help="cuda: answer with the engine on a GPU")
    parser.add_argument("--stretch", type=float, default=1.0, help="factor by which YaRN extends the model's positions")
    parser.add_argument(
        "--json", type=Path, help="file for the answers; questions whose answers are in it are not asked again"
    )
    parser.add_argument("--show", action="store_true", help="only show what --json holds")


def run(arguments: argparse.Namespace) -> None:
    if arguments.show:
        gate(arguments.json is not None and arguments.json.exists(), "--show needs a --json file with answers")
        content: dict[str, Any] = {"bench": "tasks", "cases": load_cases(arguments.json)}
    else:
        content = _ask_all(arguments)
    cases = [c for c in content["cases"] if c["version"] == VERSION and c["question"] == arguments.question]
    print(tables(cases, ("model",), table))
    finish(content, None)


def _ask_all(arguments: argparse.Namespace) -> dict[str, Any]:
    names = arguments.tasks.split(",")
    unknown = [name for name in names if name not in TASKS]
    gate(arguments.depths > 0 < arguments.samples, "--depths and --samples must be at least 1")
    gate(not unknown, f"there is no task {', '.join(unknown)}; choose from {', '.join(TASKS)}")
    contenders = [c for c in find_contenders(arguments.selectors) if c != FULL]
    runs = [(FULL, 1.0), *((c, keep) for keep in arguments.keep for c in contenders)]
    depths = [float(depth) for depth in np.linspace(0, 1, arguments.depths).round(4)]
    loaded = load_model(arguments.model, device=arguments.device, dtype=arguments.dtype, stretch=arguments.stretch)
    _require_room(loaded, names, depths, arguments.lengths)
    header = {"bench": "tasks", "model": loaded.name, "machine": machine(), "dtype": arguments.dtype}
    header["depths"] = arguments.depths  # multikey hides a number at each, so with others it is another task
    records = Records(arguments.json, header, KEY, fixed_fields=("dtype", "depths"))
    for length in arguments.lengths:
        for name in names:
            for sample in range(arguments.samples):
                run_task(loaded, name, length, depths, sample, arguments.question, runs, records, arguments.stretch)
    return records.content
