"""LongBench: bad files are refused with clear messages, prompts are made as LongBench does, answers are stored."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import processors

from bench.accuracy import longbench
from bench.accuracy.answering import FULL
from bench.accuracy.contenders import find_contenders
from bench.accuracy.longbench import KEY, make_prompt, run_item, table, truncate_middle
from bench.accuracy.longbench_file import read_items, read_prompts, split_prompt
from bench.records import Records
from bench.timing import GateError
from tests.tiny import byte_tokenizer, loaded, save

LINE = {
    "input": "Who?",
    "context": "The keeper of the inn is Ada. " * 12,
    "answers": ["Ada", "Ada B."],
    "length": 84,
    "dataset": "hotpotqa",
    "language": "en",
    "all_classes": None,
    "_id": "x1",
}
QUESTION = {
    "_id": "y1",
    "domain": "Single-Document QA",
    "sub_domain": "Literary",
    "difficulty": "easy",
    "length": "short",
    "question": " Who keeps the inn? ",
    "choice_A": "Ada",
    "choice_B": "Bob {the elder}",
    "choice_C": "Cy",
    "choice_D": "Di",
    "answer": "A",
    "context": "\nThe keeper of the {inn} is Ada. " * 12,
}
V2_PROMPT = "Read {this}.\n<text>\n$DOC$\n</text>\n$Q$\n(A) $C_A$\n(B) $C_B$\n(C) $C_C$\n(D) $C_D$"
PROMPTS = {
    "hotpotqa": "Read.\n{context}\nQuestion: {input}\nAnswer:",
    "samsum": "{context}\n{input}",
    "lcc": "{context}Next:\n",
}


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_lines_are_parsed_into_items(tmp_path):
    items = read_items(write(tmp_path / "a.jsonl", LINE, "", {**LINE, "dataset": "hotpotqa_e", "_id": "x2"}))
    assert [item.id for item in items] == ["x1", "x2"]
    assert items[0].answers == ("Ada", "Ada B.") and items[1].data_set == "hotpotqa"


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"input": ', "line 2: Expecting value"),
        ("[1]", "line 2: a JSON object was expected"),
        ({**LINE, "dataset": "squad"}, "line 2: unknown dataset 'squad'"),
        ({**LINE, "answers": []}, "line 2: answers is empty"),
        ({**LINE, "answers": "Ada"}, "line 2: answers should be a list of texts, got 'Ada'"),
        ({**LINE, "context": 3}, "line 2: context should be a text, got 3"),
        ({k: v for k, v in LINE.items() if k != "_id"}, "line 2: _id should be a text, got None"),
        ({**LINE, "dataset": "trec"}, "line 2: all_classes is empty, and trec is scored by them"),
        ({**LINE, "all_classes": [1]}, "line 2: all_classes should be a list of texts"),
    ],
)
def test_invalid_lines_are_reported_with_their_fault(tmp_path, line, fault):
    with pytest.raises(GateError, match="not LongBench's format") as error:
        read_items(write(tmp_path / "a.jsonl", LINE, line, LINE))
    assert fault in str(error.value)


def test_many_invalid_lines_are_counted_and_unreadable_files_refused(tmp_path):
    with pytest.raises(GateError, match=r"line 5: .*; and 4 more"):
        read_items(write(tmp_path / "a.jsonl", *["{"] * 9))
    with pytest.raises(GateError, match="no questions"):
        read_items(write(tmp_path / "b.jsonl", ""))
    with pytest.raises(GateError, match="there is no file"):
        read_items(tmp_path / "none.jsonl")
    (tmp_path / "c.jsonl").write_bytes(b'{"input": "\xff"}\n')
    with pytest.raises(GateError, match=r"line 1: .*utf-8"):
        read_items(tmp_path / "c.jsonl")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("{", "is not JSON"),
        ("[]", "should be a JSON object"),
        ('{"lcc": "no place"}', "the prompt of lcc should be a text with one {context}"),
        ('{"lcc": "{context} {what}"}', "braces besides"),
        ('{"lcc": "{context} {"}', "braces besides"),
    ],
)
def test_invalid_prompts_are_refused_with_the_reason(tmp_path, content, fault):
    with pytest.raises(GateError) as error:
        read_prompts(write(tmp_path / "prompts.json", content))
    assert fault in str(error.value)


def test_a_list_of_multiple_choice_questions_is_read(tmp_path):
    hard = {**QUESTION, "_id": "y2", "difficulty": "hard", "answer": "D"}
    path = tmp_path / "data.json"
    path.write_text(json.dumps([QUESTION, hard]))
    items = read_items(path)
    assert [(item.id, item.data_set, item.answers, item.groups) for item in items] == [
        ("y1", "longbench-v2", ("A",), ("easy", "short")),
        ("y2", "longbench-v2", ("D",), ("hard", "short")),
    ]
    assert read_items(write(tmp_path / "data.jsonl", QUESTION, hard)) == items
    prompt_file = tmp_path / "0shot.txt"
    prompt_file.write_text(V2_PROMPT)
    context, question = split_prompt(read_prompts(prompt_file)["longbench-v2"], items[0])
    assert context == "Read {this}.\n<text>\n" + QUESTION["context"].strip()
    assert question == "\n</text>\nWho keeps the inn?\n(A) Ada\n(B) Bob {the elder}\n(C) Cy\n(D) Di"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"answer": "E"}, "question 2: answer should be one of ABCD, got 'E'"),
        ({"answer": "AB"}, "question 2: answer should be one of ABCD, got 'AB'"),
        ({"answer": ""}, "question 2: answer should be one of ABCD, got ''"),
        ({"choice_C": None}, "question 2: choice_C should be a text, got None"),
        ({"length": 7}, "question 2: length should be a text, got 7"),
    ],
)
def test_invalid_multiple_choice_questions_are_reported_with_their_fault(tmp_path, change, fault):
    path = tmp_path / "data.json"
    path.write_text(json.dumps([QUESTION, {**QUESTION, **change}]))
    with pytest.raises(GateError, match="not LongBench's format") as error:
        read_items(path)
    assert fault in str(error.value)


def test_an_invalid_list_or_v2_prompt_is_refused_with_the_reason(tmp_path):
    with pytest.raises(GateError, match=r"not LongBench's format; Expecting"):
        read_items(write(tmp_path / "data.json", "[{"))
    (tmp_path / "0shot.txt").write_text(V2_PROMPT.replace("$C_B$", "$C_A$"))
    with pytest.raises(GateError, match=r"once each; it has \$C_A\$, \$C_B\$ never or repeatedly"):
        read_prompts(tmp_path / "0shot.txt")


def test_long_texts_are_truncated_in_the_middle():
    tokenizer = byte_tokenizer()
    assert truncate_middle(tokenizer, "0123456789", 10) == "0123456789"
    assert truncate_middle(tokenizer, "0123456789", 6) == "012789"
    assert truncate_middle(tokenizer, "0123456789", 7) == "012789"  # half of 7 is 3


def test_prompts_are_split_where_the_context_ends(tmp_path):
    (item,) = read_items(write(tmp_path / "a.jsonl", {**LINE, "context": "{braces} stay"}))
    context, question = split_prompt(PROMPTS["hotpotqa"], item)
    assert (context, question) == ("Read.\n{braces} stay", "\nQuestion: Who?\nAnswer:")
    plain = make_prompt(byte_tokenizer(), context, question, 100, chat=False)
    decode = byte_tokenizer().decode
    assert (decode(plain.context), decode(plain.question)) == (context, question)
    chat = make_prompt(byte_tokenizer(), "Read.\n" + 60 * "x" + "yz", question, 60, chat=True)
    assert decode(chat.context) == "[user]Read.\n" + 29 * "x" + "yz"  # the first and the last 30 of 91 characters
    assert decode(chat.question) == question + "\n[assistant]"
    easy = plain.set_up("dense")
    assert len(easy.question) == 1 and decode(easy.context) + decode(easy.question) == context + question


def test_an_end_token_that_the_tokenizer_adds_is_not_in_a_prompt():
    tokenizer = byte_tokenizer(None)
    tokenizer.eos_token = "#"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A #", special_tokens=[("#", tokenizer.eos_token_id)]
    )
    prompt = make_prompt(tokenizer, "the context", " and its question", 99, chat=False)
    assert [tokenizer.decode(ids) for ids in (prompt.context, prompt.question)] == ["the context", " and its question"]


def test_a_prompt_without_a_question_uses_its_last_token_as_question():
    prompt = make_prompt(byte_tokenizer(), "abc", "", 100, chat=False)
    assert len(prompt.context) == 2 and len(prompt.question) == 1


@pytest.mark.parametrize("question", ["sparse", "dense"])
def test_items_are_answered_once(tmp_path, question):
    short = {**LINE, "context": "Too short.", "_id": "x2"}
    lines = [LINE, {**LINE, "dataset": "samsum", "_id": "x3"}, short]
    items = read_items(write(tmp_path / "a.jsonl", *lines))
    runs = [(FULL, 1.0), *((contender, 0.2) for contender in find_contenders("default"))]
    for _ in range(2):
        records = Records(tmp_path / "answers.json", {}, KEY)
        before = len(records.cases)
        for item in items:
            run_item(loaded(), item, PROMPTS[item.data_set], 900, question, runs, records)
    assert before == len(records.cases) == 6
    assert all(0 <= case["score"] <= 1 and case["said"] for case in records.cases if case["item"] != "x2")
    assert all("a context this short" in case["refused"] for case in records.cases if case["item"] == "x2")
    shown = table(records.cases)
    assert "| | hotpotqa | samsum | mean |" in shown and "Left out: 1 contexts" in shown
    assert len([line for line in shown.splitlines() if line.startswith(("| full", "| default"))]) == 2


def test_groups_of_questions_have_columns_in_the_table():
    cases = [
        {"contender": "full", "keep": 1.0, "data_set": "longbench-v2", "item": item, "groups": groups, "score": score}
        for item, groups, score in [("a", ["easy", "short"], 1.0), ("b", ["hard", "short"], 0.0), ("c", ["hard"], 0.0)]
    ]
    lines = table(cases).splitlines()
    assert lines[0] == "| | longbench-v2 | mean | easy | hard | short |"
    assert lines[2] == "| full | 33.33 | 33.33 | 100.00 | 0.00 | 50.00 |"


def test_the_longbench_command_answers_items_and_requires_their_prompts(tmp_path, capsys):
    arguments = SimpleNamespace(
        files=[write(tmp_path / "a.jsonl", LINE, {**LINE, "_id": "x2"})], prompts=tmp_path / "prompts.json", keep=[0.2],
        question="sparse", selectors="window", items=1, max_length=None, model=str(save(tmp_path / "model")),
        dtype="float32", json=tmp_path / "answers.json",
    )  # fmt: skip
    write(arguments.prompts, {"lcc": PROMPTS["lcc"]})
    with pytest.raises(GateError, match="has no prompt for hotpotqa"):
        longbench.run(arguments)
    write(arguments.prompts, PROMPTS)
    longbench.run(arguments)
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["cases"]) == 2


def test_the_longbench_command_answers_multiple_choice_questions(tmp_path, capsys):
    (tmp_path / "data.json").write_text(json.dumps([QUESTION]))
    (tmp_path / "0shot.txt").write_text(V2_PROMPT)
    longbench.run(SimpleNamespace(
        files=[tmp_path / "data.json"], prompts=tmp_path / "0shot.txt", keep=[0.2], question="sparse",
        selectors="window", items=None, max_length=None, model=str(save(tmp_path / "model")), dtype="float32",
        json=tmp_path / "answers.json",
    ))  # fmt: skip
    assert "| | longbench-v2 | mean | easy | short |" in capsys.readouterr().out
