"""Reads LongBench's files: questions as JSON lines, and a JSON object with a prompt for each data set."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.accuracy.longbench_scores import DATA_SETS, classification
from bench.timing import gate

_SHOWN = 5  # most faults of a file that are reported


@dataclass(frozen=True, slots=True)
class Item:
    """A question about a context."""

    id: str
    data_set: str
    input: str
    context: str
    answers: tuple[str, ...]
    all_classes: tuple[str, ...]


def read_items(path: Path) -> list[Item]:
    """Return all questions of a file. Raises GateError, with line numbers, if any line is not a question."""
    gate(path.is_file(), f"there is no file {path}; give one of LongBench's .jsonl files")
    items, faults = [], []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if line.strip():
            try:
                items.append(_item(json.loads(line.decode("utf-8"))))
            except ValueError as error:  # includes JSONDecodeError and UnicodeDecodeError
                faults.append(f"line {number}: {error}")
    more = [f"and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
    gate(not faults, f"{path} is not LongBench's format; " + "; ".join(faults[:_SHOWN] + more))
    gate(bool(items), f"{path} has no questions")
    return items


def read_prompts(path: Path) -> dict[str, str]:
    """Return prompts by data set, from LongBench's dataset2prompt.json: texts with {context} and perhaps {input}."""
    gate(path.is_file(), f"there is no file {path}; give LongBench's config/dataset2prompt.json")
    prompts: Any = None
    try:
        prompts = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        gate(False, f"{path} is not JSON: {error}")
    gate(isinstance(prompts, dict), f"{path} should be a JSON object of prompts by data set")
    for name, prompt in prompts.items():
        gate(
            isinstance(prompt, str) and prompt.count("{context}") == 1,
            f"{path}: the prompt of {name} should be a text with one {{context}}",
        )
        try:
            prompt.format(context="", input="")
        except (KeyError, IndexError, ValueError) as error:
            gate(False, f"{path}: the prompt of {name} has braces besides {{context}} and {{input}} ({error!r})")
    return dict(prompts)


def split_prompt(prompt: str, item: Item) -> tuple[str, str]:
    """Fill in the prompt and split it at the end of the context."""
    before, after = prompt.split("{context}")
    return before.format(input=item.input) + item.context, after.format(input=item.input)


def _item(line: Any) -> Item:
    if not isinstance(line, dict):
        raise ValueError("a JSON object was expected")
    name = _text(line, "dataset").removesuffix("_e")
    if name not in DATA_SETS:
        raise ValueError(f"unknown dataset {name!r}")
    answers = _texts(line, "answers")
    if not answers:
        raise ValueError("answers is empty")
    classes = _texts(line, "all_classes") if line.get("all_classes") is not None else ()
    if DATA_SETS[name].score is classification and not classes:
        raise ValueError(f"all_classes is empty, and {name} is scored by them")
    return Item(_text(line, "_id"), name, _text(line, "input"), _text(line, "context"), answers, classes)


def _text(line: dict[str, Any], field: str) -> str:
    if not isinstance(line.get(field), str):
        raise ValueError(f"{field} should be a text, got {line.get(field)!r:.60}")
    return str(line[field])


def _texts(line: dict[str, Any], field: str) -> tuple[str, ...]:
    value = line.get(field)
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"{field} should be a list of texts, got {value!r:.60}")
    return tuple(value)
