"""Reads the files of LongBench (questions as JSON lines, and a JSON object with a prompt for each data set) and of
LongBench v2 (a JSON list of questions with four choices, and a text file with their prompt).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.accuracy.longbench_scores import DATA_SETS, LETTERS, V2, classification
from bench.timing import gate

_SHOWN = 5  # most faults of a file that are reported
# what LongBench v2's prompt files leave open, and the field of a question that goes there
_V2_BLANKS = {"$Q$": "question"} | {f"$C_{letter}$": f"choice_{letter}" for letter in LETTERS}


@dataclass(frozen=True, slots=True)
class Item:
    """A question about a context."""

    id: str
    data_set: str
    context: str
    blanks: dict[str, str]  # what else the prompt leaves open: `input`, or `question` and `choice_A` to `choice_D`
    answers: tuple[str, ...]
    all_classes: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()  # of LongBench v2: difficulty and length


def read_items(path: Path) -> list[Item]:
    """Return all questions of a file. Raises GateError, with line numbers, if any line is not a question."""
    gate(path.is_file(), f"there is no file {path}; give LongBench's .jsonl files or LongBench v2's data.json")
    content = path.read_bytes()
    items, faults = [], []
    if content.lstrip().startswith(b"["):
        try:
            entries = [(f"question {number}", entry) for number, entry in enumerate(json.loads(content), start=1)]
        except ValueError as error:  # includes JSONDecodeError and UnicodeDecodeError
            gate(False, f"{path} is not LongBench's format; {error}")
    else:
        lines = enumerate(content.splitlines(), start=1)
        entries = [(f"line {number}", line) for number, line in lines if line.strip()]
    for place, entry in entries:
        try:
            items.append(_item(json.loads(entry.decode("utf-8")) if isinstance(entry, bytes) else entry))
        except ValueError as error:
            faults.append(f"{place}: {error}")
    more = [f"and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
    gate(not faults, f"{path} is not LongBench's format; " + "; ".join(faults[:_SHOWN] + more))
    gate(bool(items), f"{path} has no questions")
    return items


def read_prompts(path: Path) -> dict[str, str]:
    """Return prompts by data set: texts with {context} and other fields in braces.

    path: LongBench's dataset2prompt.json, or LongBench v2's 0shot.txt.
    """
    wanted = "give LongBench's config/dataset2prompt.json, or LongBench v2's prompts/0shot.txt"
    gate(path.is_file(), f"there is no file {path}; {wanted}")
    if path.suffix == ".txt":
        return {V2: _v2_prompt(path)}
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
    return before.format(**item.blanks) + item.context, after.format(**item.blanks)


def _v2_prompt(path: Path) -> str:
    prompt = path.read_text(encoding="utf-8")
    blanks = ["$DOC$", *_V2_BLANKS]
    wrong = [blank for blank in blanks if prompt.count(blank) != 1]
    gate(not wrong, f"{path} should have {', '.join(blanks)} once each; it has {', '.join(wrong)} never or repeatedly")
    prompt = prompt.replace("{", "{{").replace("}", "}}").replace("$DOC$", "{context}")
    for blank, field in _V2_BLANKS.items():
        prompt = prompt.replace(blank, f"{{{field}}}")
    return prompt


def _item(line: Any) -> Item:
    if not isinstance(line, dict):
        raise ValueError("a JSON object was expected")
    if "choice_A" in line:
        return _v2_item(line)
    name = _text(line, "dataset").removesuffix("_e")
    if name not in DATA_SETS:
        raise ValueError(f"unknown dataset {name!r}")
    answers = _texts(line, "answers")
    if not answers:
        raise ValueError("answers is empty")
    classes = _texts(line, "all_classes") if line.get("all_classes") is not None else ()
    if DATA_SETS[name].score is classification and not classes:
        raise ValueError(f"all_classes is empty, and {name} is scored by them")
    blanks = {"input": _text(line, "input")}
    return Item(_text(line, "_id"), name, _text(line, "context"), blanks, answers, classes)


def _v2_item(line: dict[str, Any]) -> Item:
    blanks = {field: _text(line, field).strip() for field in _V2_BLANKS.values()}
    answer = _text(line, "answer")
    if answer not in list(LETTERS):
        raise ValueError(f"answer should be one of {LETTERS}, got {answer!r:.60}")
    groups = (_text(line, "difficulty"), _text(line, "length"))
    return Item(_text(line, "_id"), V2, _text(line, "context").strip(), blanks, (answer,), groups=groups)


def _text(line: dict[str, Any], field: str) -> str:
    if not isinstance(line.get(field), str):
        raise ValueError(f"{field} should be a text, got {line.get(field)!r:.60}")
    return str(line[field])


def _texts(line: dict[str, Any], field: str) -> tuple[str, ...]:
    value = line.get(field)
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"{field} should be a list of texts, got {value!r:.60}")
    return tuple(value)
