"""The measurements on a small scale: what they measure, and that cases in a file are not measured again."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.accuracy import selectors, tasks
from bench.accuracy.answering import FULL
from bench.accuracy.contenders import ALL, find_contenders
from bench.accuracy.odd import ODD
from bench.accuracy.task_report import kept, table
from bench.accuracy.texts import TEXTS, cut_text, find_text, named_texts
from bench.records import RESULTS, Records, load_cases
from bench.selector_cases import VERSION, selector_cases
from bench.timing import GateError
from csattn.selector_names import SELECTOR_NAMES
from tests.tiny import byte_tokenizer, loaded, save

KEEP = 0.1
CONTEXT_LEN, EVAL_LEN = 320, 6


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with figures of three selectors on one text."""
    place = tmp_path_factory.mktemp("selectors")
    measure(place, "default,exact,window")
    return place


def measure(place: Path, names: str) -> Records:
    records = Records(place / "figures.json", {"bench": "selectors"}, selectors.KEY)
    lengths = CONTEXT_LEN, EVAL_LEN
    selectors.compare(loaded(), "novel", lengths, find_contenders(names), [KEEP], place / "store", records)
    return records


def test_each_selectors_figures_have_the_expected_costs(measured):
    by_name = {case["contender"]: case for case in measure(measured, "default").cases}
    model = loaded().geometry
    row_bytes = 2 * model.head_dim * 4 * model.num_kv_heads * model.num_layers
    assert by_name["exact"]["moved_bytes_per_step"] == round(KEEP * CONTEXT_LEN) * row_bytes
    assert by_name["default"]["moved_bytes_per_step"] == by_name["exact"]["moved_bytes_per_step"]
    assert by_name["window"]["moved_bytes_per_step"] == by_name["window"]["index_bytes_per_key"] == 0
    assert by_name["exact"]["recall_at_k"] == 1 > by_name["window"]["recall_at_k"]
    assert by_name["window"]["kl"] >= by_name["exact"]["kl"] >= 0
    assert by_name["default"]["index_bytes_per_key"] > 0 < by_name["default"]["search_ms_per_step"]
    assert selectors.table(list(by_name.values())).count("| ") > 30


def test_recorded_cases_are_not_measured_again(measured, monkeypatch):
    def refuse(*arguments: object) -> None:
        raise AssertionError("measured again")

    before = (measured / "figures.json").read_text()
    with monkeypatch.context() as patch:
        patch.setattr(selectors, "measure", refuse)
        patch.setattr(selectors, "full_attention", refuse)
        measure(measured, "window,default,exact")
    assert (measured / "figures.json").read_text() == before
    contexts = sorted(path.name for path in (measured / "store").iterdir())
    again = measure(measured, "exact,default+ahead")  # measures only what is missing, over the existing context
    assert [case["contender"] for case in again.cases] == ["default", "exact", "window", "default+ahead"]
    assert sorted(path.name for path in (measured / "store").iterdir()) == contexts
    assert json.loads((measured / "figures.json").read_text())["cases"] == again.cases


def test_figures_of_another_version_do_not_count_as_measured(measured, monkeypatch):
    monkeypatch.setattr(selectors, "VERSION", selectors.VERSION + 1)
    records = Records(measured / "figures.json", {}, selectors.KEY)
    assert not records.has(**{**records.cases[0], "version": selectors.VERSION})


def test_texts_are_cut_to_length_and_short_or_unknown_ones_refused(tmp_path):
    cut = cut_text(TEXTS["spanish"], byte_tokenizer(), 300, 5)
    assert len(cut.context) == 300 and len(cut.following) == 6
    with pytest.raises(GateError, match="context and evaluation need 99999999"):
        cut_text(TEXTS["spanish"], byte_tokenizer(), 99_999_990, 8)
    with pytest.raises(GateError, match="neither a text"):
        selectors.find_text(str(tmp_path / "none.txt"))


def test_odd_texts_are_long_enough_and_reproducible():
    names = named_texts("novel,odd")
    assert names == ["novel", *ODD]
    texts = [find_text(name).content() for name in names]
    assert min(map(len, texts)) >= 24_000 and len(set(texts)) == len(texts)
    assert texts == [find_text(name).content() for name in names]


def test_contenders_are_found_by_name_and_unknown_names_refused():
    names = [contender.name for contender in find_contenders("all")]
    assert names == list(ALL) and {c.selector for c in find_contenders("all,full")} == set(SELECTOR_NAMES)
    ahead, paper, own = find_contenders("csattn+ahead, paper,csattn")
    assert (ahead.name, ahead.search(0.1).lookahead, ahead.preset) == ("default+ahead", 1, "default")
    assert (paper.selector, paper.preset, own.name) == ("csattn", "paper", "default")
    rested, best, bare = find_contenders("csattn+ahead+rest=moments,exact+rest=sketch,default+rest=none")
    assert (rested.name, rested.search(0.1).rest, rested.lookahead) == ("default+ahead+rest=moments", "moments", 1)
    assert (best.name, best.selector, best.search(0.1).rest) == ("exact+rest=sketch", "exact", "sketch")
    assert (bare.search(0.1).rest, own.search(0.1).rest) == ("none", None)
    wrong_names = (
        "exact+ahead",
        "none",
        "default+behind",
        "quest+rest=moments",
        "default+rest=none+ahead",
        "default+rest",
    )
    for wrong in (*wrong_names, "default+rest=codes", "lists+rest=sketch", "paper+rest=sketch"):
        with pytest.raises(GateError, match="unknown selector"):
            find_contenders(wrong)


@pytest.mark.parametrize(("task", "question"), [("multikey", "sparse"), ("passkey", "dense")])
def test_tasks_are_answered_once(tmp_path, monkeypatch, task, question):
    monkeypatch.setitem(tasks.TASKS, task, replace(tasks.TASKS[task], max_new_tokens=4))
    runs = [(FULL, 1.0), *((contender, KEEP) for contender in find_contenders("window"))]
    depths = [0.0, 1.0]
    for _ in range(2):
        records = Records(tmp_path / "answers.json", {}, tasks.KEY)
        before = len(records.cases)
        tasks.run_task(loaded(), task, 700, depths, 0, question, runs, records)
    assert before == len(records.cases) == len(runs) * len(depths)
    assert {case["depth"] for case in records.cases} == set(depths)
    assert all(case["score"] in (0, 1) for case in records.cases)
    assert f"| {task}, 700 |" in table(records.cases)


def test_answers_for_another_number_of_depths_are_not_mixed(tmp_path):
    (tmp_path / "answers.json").write_text(json.dumps({"depths": 5, "cases": []}))
    parser = argparse.ArgumentParser()
    tasks.add_arguments(parser)
    given = ["--tasks", "multikey", "--lengths", "700", "--depths", "3", "--samples", "1", "--selectors", "window"]
    arguments = parser.parse_args(
        [*given, "--model", str(save(tmp_path / "model")), "--json", str(tmp_path / "answers.json")]
    )
    with pytest.raises(GateError, match="was measured with depths 5, not 3; name another file"):
        tasks._ask_all(arguments)


def test_tasks_that_do_not_fit_the_model_are_refused_in_advance():
    with pytest.raises(GateError, match=r"multikey at 960 tokens needs 1\d+ positions with question and answer"):
        tasks._require_room(loaded(), ["multikey"], [0.0], [700, 960])
    with pytest.raises(GateError, match="tokens are too few, the task alone takes"):
        tasks._require_room(loaded(), ["tracking"], [0.0], [300])


def test_prompts_have_the_requested_length():
    (haystack,) = tasks.TASKS["multikey"].make(tasks.Random(1), [0.0, 0.5], 640)
    first, second = tasks.make_prompts(loaded(), haystack, 640)
    assert len(first.context) == 640 and (first.context == second.context).all()
    decode = loaded().tokenizer.decode
    assert decode(first.question).endswith("[assistant]" + haystack.questions[0].answer_start)
    easy = second.set_up("dense")
    assert len(easy.context) == 640 + len(second.question) - 1 and len(easy.question) == 1


def make_answers() -> list[dict[str, object]]:
    """Full attention finds all at depth 0 and nothing at depth 1; the selector finds half at either depth."""
    answers = []
    for depth, sample, by_full, by_ours in [(0.0, 0, 1.0, 1.0), (0.0, 1, 1.0, 0.0), (1.0, 0, 0.0, 1.0), (1.0, 1, 0, 0)]:
        where = {"model": "m", "task": "passkey", "length": 1024, "depth": depth, "sample": sample}
        where |= {"question": "sparse"}
        answers.append({**where, "contender": "full", "keep": 1.0, "score": by_full})
        answers.append({**where, "contender": "ours", "keep": 0.05, "score": by_ours})
    return answers


def test_scores_of_several_models_in_one_file_are_not_averaged(tmp_path, capsys):
    answers = [{**of, "version": tasks.VERSION, "model": name} for name in ("a", "b") for of in make_answers()]
    worse = [{**of, "score": 0.0} if of["model"] == "b" else of for of in answers]
    (tmp_path / "answers.json").write_text(json.dumps({"cases": worse}))
    tasks.run(SimpleNamespace(show=True, json=tmp_path / "answers.json", question="sparse"))
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("| passkey")] == [
        "| passkey, 1024 | 50 | 50 (50 %) |",
        "| passkey, 1024 | 0 | 0 (×) |",
    ]


def test_answers_that_full_attention_misses_do_not_count_against_a_selector():
    answers = make_answers()
    shown = table(answers)
    assert "| passkey, 1024 | 50 | 50 (50 %) |" in shown
    nothing = [answer for answer in answers if answer["depth"] == 1.0]
    assert "| passkey, 1024 | 0 | 50 (×) |" in table(nothing)
    assert kept([], {}) is None


def test_figures_of_version_2_are_counted_as_those_of_version_3(tmp_path):
    """`default` on SmolLM2-135M has 16 bytes of codes a key, transforms of 48 coordinates, and a bit of marks a key."""
    num_lists, context_len = 30 * 3, 7680
    [stored] = [
        case
        for case in load_cases(RESULTS / "selectors.json")
        if (case["contender"], case["text"], case["keep"], case["version"]) == ("default", "novel", 0.02, 2)
    ]
    others = {"index_bytes_per_key": 10.0, "search_bytes_per_step": 20.0, "moved_bytes_per_step": 8.0}
    cases = [
        stored,
        stored | {"contender": "quest", **others},
        stored | {"contender": "exact", "version": 1, **others},
        stored | {"contender": "default+ahead"},
    ]
    (file := tmp_path / "figures.json").write_text(json.dumps({"cases": cases}))
    default, quest = selector_cases(file)
    searched = 16 * context_len + 64 * 4 + 64 * 48 * 2
    held = searched + context_len // 8 + 64 * 4 + 64 * 48 * 2
    assert default["search_bytes_per_step"] == pytest.approx(num_lists * searched)
    assert default["rest_bytes_per_step"] == pytest.approx(num_lists * held, rel=1e-4)
    assert default["index_bytes_per_key"] == pytest.approx(held / context_len, rel=1e-4)
    assert {name: quest[name] for name in others} == {name: of / 2 for name, of in others.items()}
    assert quest["rest_bytes_per_step"] == 0
    newer = stored | {"version": VERSION, "rest_bytes_per_step": 3.0, **others}
    file.write_text(json.dumps({"cases": [newer, *cases]}))
    assert selector_cases(file) == [newer | {"moved_bytes_per_step": 4.0}, quest]


def test_stored_costs_of_selectors_are_counted_over_16_bit_kv():
    """SmolLM2-135M at 7680 tokens: a key of 64 dimensions has 128 bytes."""
    cases = {case["contender"]: case for case in selector_cases(RESULTS / "selectors.json") if case["keep"] == 0.02}
    num_lists, context_len = 30 * 3, 7680
    keys = num_lists * context_len * 128
    codes = 2 + 256 * 128 / context_len  # codes, and centroids
    searched = {"exact": keys, "quest": keys / 8, "sparq": keys / 4, "pqcache": num_lists * context_len * codes}
    for name, num_bytes in searched.items():
        assert cases[name]["search_bytes_per_step"] == pytest.approx(num_bytes, rel=0.02), name
    held = {"quest": 16, "sparq": 128, "pqcache": codes, "default": 17.8, "h2o": 4}
    for name, num_bytes in held.items():
        assert cases[name]["index_bytes_per_key"] == pytest.approx(num_bytes, rel=0.01), name
    assert {round(cases[name]["moved_bytes_per_step"]) for name in ("exact", "default", "quest")} == {
        num_lists * 154 * 256
    }
