"""Answers LongBench's questions (arXiv:2308.14508; v2: arXiv:2412.15204) with every selector: reads its files,
computes its scores.

    python -m bench.accuracy longbench hotpotqa.jsonl --prompts dataset2prompt.json --model ... --json FILE
    python -m bench.accuracy longbench data.json --prompts 0shot.txt --model ... --json FILE

Prompts come from LongBench's own files. A prompt that is too long loses its middle, as in LongBench. Answers are greedy
(LongBench v2's own program samples with a temperature of 0.1). Questions whose answers are in the --json file are not
answered again.
"""

import argparse
import hashlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bench.accuracy.answering import FULL, SET_UPS, Prompt, answer_all
from bench.accuracy.contenders import Contender, find_contenders, shares
from bench.accuracy.contexts import Context
from bench.accuracy.longbench_file import Item, read_items, read_prompts, split_prompt
from bench.accuracy.longbench_scores import DATA_SETS, score_answer
from bench.records import Case, Records, tables
from bench.timing import finish, gate, machine
from csattn.config import SearchConfig
from csattn.errors import ContextError
from csattn.models import LoadedModel, load_model
from csattn.models.prompt import text_ids

# Raise it whenever the meaning of a case changes.
VERSION = 2
KEY = ("version", "model", "data_set", "item", "prompt_sha256", "max_length", "question", "contender", "keep")
_MARGIN = 692  # positions that LongBench leaves for answer and chat template: of 8192, 7500 are for the prompt
_PROBE = "⟨prompt⟩"


def run_item(
    loaded: LoadedModel,
    item: Item,
    template: str,
    max_length: int,
    question: str,
    runs: list[tuple[Contender, float]],
    records: Records,
) -> None:
    """Answer one question with those of `runs` whose answers `records` lacks."""
    data_set = DATA_SETS[item.data_set]
    parts = split_prompt(template, item)
    key = {"version": VERSION, "model": loaded.fingerprint, "data_set": item.data_set, "item": item.id}
    key |= {"prompt_sha256": hashlib.sha256("\0".join(parts).encode()).hexdigest()}
    key |= {"max_length": max_length, "question": question}
    missing = [run for run in runs if not records.has(**key, contender=run[0].name, keep=run[1])]
    if not missing:
        return
    chat = not data_set.few_shot and not data_set.is_code
    prompt = make_prompt(loaded.tokenizer, *parts, max_length, chat).set_up(question)
    options = {}
    if item.data_set == "samsum":  # stop at the line's end, because the model goes on with dialogues of its own
        options["eos_token_id"] = [*loaded.stop_ids, loaded.tokenizer("\n", add_special_tokens=False).input_ids[-1]]
    with tempfile.TemporaryDirectory() as store, Context(loaded, prompt.context, Path(store)) as context:
        for contender, keep in missing:
            case = {**key, "contender": contender.name, "keep": keep, "context_len": len(prompt.context)}
            try:
                artifact = context.any_artifact() if contender is FULL else context.artifact(contender.preset)
            except ContextError as error:
                records.add({**case, "refused": str(error)})
                continue
            ids, new = [prompt.question], data_set.max_new_tokens
            said = answer_all(loaded, artifact, contender, keep, ids, new, **options)[0]
            score = score_answer(data_set, said, item.answers, item.all_classes)
            records.add({**case, "groups": item.groups, "score": round(score, 6), "said": said})


def make_prompt(tokenizer: Any, context: str, question: str, max_length: int, chat: bool) -> Prompt:
    """Return the ids of a prompt, without its middle if it has more than max_length tokens.

    The tokens of the chat template come on top of max_length.
    """
    whole = truncate_middle(tokenizer, context + question, max_length)
    # Decoded halves may differ from the text by a space where they meet, so the question is counted from the end.
    place = max(1, len(whole) - len(question))
    before, after = "", ""
    if chat and tokenizer.chat_template:
        turn = [{"role": "user", "content": _PROBE}]
        rendered = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        before, _, after = rendered.partition(_PROBE)
    start = before + whole[:place]
    first = tokenizer(start, add_special_tokens=False).input_ids if before else text_ids(tokenizer, start)
    rest = tokenizer(whole[place:] + after, add_special_tokens=False).input_ids
    if not rest:  # a prompt that ends with its context
        first, rest = first[:-1], first[-1:]
    return Prompt(np.asarray(first, dtype=np.int32), np.asarray(rest, dtype=np.int32))


def truncate_middle(tokenizer: Any, text: str, max_length: int) -> str:
    """Apply LongBench's rule: a text of more than max_length tokens keeps its first and last max_length // 2."""
    ids = tokenizer(text).input_ids
    if len(ids) <= max_length:
        return text
    half = max_length // 2
    return "".join(tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[-half:]))


def table(cases: list[Case]) -> str:
    """Return a Markdown table: each contender's LongBench score, 0 to 100, on each data set, and their mean.

    LongBench v2's groups of questions (easy, hard, short, ...) have columns of their own, which the mean leaves out.
    """
    scored = [case for case in cases if "score" in case]
    names = list(dict.fromkeys(case["data_set"] for case in scored))
    groups = sorted({group for case in scored for group in case.get("groups", ())})
    lines = ["| | " + " | ".join([*names, "mean", *groups]) + " |", "|---|" + "---:|" * (len(names) + 1 + len(groups))]
    for contender, keep in dict.fromkeys((case["contender"], case["keep"]) for case in scored):
        own = [case for case in scored if (case["contender"], case["keep"]) == (contender, keep)]
        means = [_mean([case["score"] for case in own if case["data_set"] == name]) for name in names]
        of_groups = [_mean([case["score"] for case in own if group in case.get("groups", ())]) for group in groups]
        title = contender if contender == "full" else f"{contender}, keep {100 * keep:g} %"
        cells = [f"{mean:.2f}" for mean in [*means, float(np.mean(means)), *of_groups]]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    refused = {(case["data_set"], case["item"]) for case in cases if "refused" in case}
    if refused:
        lines += ["", f"Left out: {len(refused)} contexts that are too short for an index."]
    return "\n".join(lines)


def _mean(scores: list[float]) -> float:
    """Return the mean in percent; NaN of none."""
    return 100 * sum(scores) / len(scores) if scores else float("nan")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    files, prompts = "LongBench's .jsonl files, or LongBench v2's data.json", "dataset2prompt.json, or v2's 0shot.txt"
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help=files)
    parser.add_argument("--prompts", type=Path, required=True, help=f"LongBench's {prompts}")
    parser.add_argument(
        "--question",
        choices=SET_UPS,
        default="sparse",
        help="sparse, or dense: the question is part of the prefill, which is easier",
    )
    parser.add_argument(
        "--selectors", default="default", help="selectors and presets, or all; full attention is always measured"
    )
    parser.add_argument("--keep", type=shares, default=str(SearchConfig().keep))
    parser.add_argument("--items", type=int, help="use only the first so many items of each file")
    parser.add_argument(
        "--max-length", type=int, help="most tokens of a prompt [default: the model's positions less 692]"
    )
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--json", type=Path, help="file for the answers; questions whose answers are in it are not asked again"
    )


def run(arguments: argparse.Namespace) -> None:
    prompts = read_prompts(arguments.prompts)
    items = [item for file in arguments.files for item in read_items(file)[: arguments.items]]
    lacking = sorted({item.data_set for item in items} - prompts.keys())
    gate(not lacking, f"{arguments.prompts} has no prompt for {', '.join(lacking)}")
    contenders = [c for c in find_contenders(arguments.selectors) if c != FULL]
    runs = [(FULL, 1.0), *((c, keep) for keep in arguments.keep for c in contenders)]
    loaded = load_model(arguments.model, arguments.dtype)
    max_length = arguments.max_length or loaded.geometry.max_positions - _MARGIN
    gate(max_length > 1, f"prompts need tokens, got --max-length {max_length}; give a larger one")
    records = Records(arguments.json, {"bench": "longbench", "model": loaded.name, "machine": machine()}, KEY)
    for item in items:
        run_item(loaded, item, prompts[item.data_set], max_length, arguments.question, runs, records)
    cases = [c for c in records.cases if c["version"] == VERSION and c["question"] == arguments.question]
    print(tables(cases, ("model", "max_length"), table))
    finish(records.content, None)
