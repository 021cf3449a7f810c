"""The command line as a user runs it: a process, its exit code, its result."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from csattn.artifact import RemoteStore, open_artifact
from csattn.artifact.lock import BuildLock
from csattn.build_options import BuildOptions
from csattn.models import LoadedModel, load_model
from index_build import batch
from index_build.tasks import Builder
from tests.artifact.faults import reseal
from tests.tiny import byte_tokenizer, save
from workers.cli import building, main, serving, terminal
from workers.serving.context_file import FILE_NAME, ContextFile, Record
from workers.serving.contexts import name_artifact

ENV = {**os.environ, "HF_HUB_OFFLINE": "1"}


def in_process(
    *arguments: object, capsys: pytest.CaptureFixture[str], stdin: bytes = b""
) -> subprocess.CompletedProcess[str]:
    """Run csattn in this process: a new process would take seconds to import torch."""
    exit_code = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["csattn", *map(str, arguments)])
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        try:
            main()
        except SystemExit as ended:
            exit_code = int(ended.code or 0)
    printed = capsys.readouterr()
    return subprocess.CompletedProcess(sys.argv, exit_code, printed.out, printed.err)


def csattn(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from workers.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=ENV, timeout=120)


@pytest.mark.parametrize(
    ("package", "absent"),
    [
        ("cli", ("triton", "cupy", "ray", "fastapi", "llguidance", "prometheus_client", "uvicorn", "openai")),
        ("service", ("triton", "cupy", "openai")),
    ],
)
def test_a_cpu_needs_no_more_than_what_is_installed_for_it(
    artifact: Path, package: str, absent: tuple[str, ...]
) -> None:
    """torch's builds for CPUs come without Triton, which this environment has, like what the extras install.

    An answer is generated where all of it is absent.
    """
    start = (
        f"import pkgutil, sys; from importlib import import_module; sys.modules.update(dict.fromkeys({absent}))\n"
        f"of = import_module('workers.{package}')\n"
        "for module in pkgutil.iter_modules(of.__path__): import_module(f'{of.__name__}.{module.name}')\n"
        "from workers.cli import main; main()"
    )
    asked = "generate", str(artifact), "--prompt", "who?", "--max-new-tokens", "2", "--json"
    command = [sys.executable, "-c", start, *(asked if package == "cli" else ["--version"])]
    done = subprocess.run(command, capture_output=True, text=True, env=ENV, timeout=120)
    assert done.returncode == 0, done.stderr
    assert package != "cli" or result_of(done)["token_ids"]


def result_of(done: subprocess.CompletedProcess[str]) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A directory with a model, a text, and a store with one artifact of them."""
    place = tmp_path_factory.mktemp("cli")
    save(place / "model")
    text = "".join(f"Lamp {i} is lit at {i % 12 + 1} o'clock by keeper {i * 7 % 13}. " for i in range(20))
    (place / "text.txt").write_text(text)
    done = csattn(
        "build", "--context", place / "text.txt", "--model", place / "model", "--store", place / "store", "--json"
    )
    (place / "built.json").write_text(json.dumps(result_of(done)))
    assert "layer 3/3" in done.stderr, "progress should show as plain lines without a terminal"
    return place


@pytest.fixture(scope="module")
def artifact(place: Path) -> Path:
    return Path(json.loads((place / "built.json").read_text())["path"])


def test_build_reports_its_artifact_and_reuses_it(capsys, place: Path, artifact: Path) -> None:
    built = json.loads((place / "built.json").read_text())
    assert (artifact / "manifest.json").is_file()
    assert built["artifact"] == artifact.name
    assert built["reused"] is False
    again = in_process(
        "build", "--context", "-", "--model", place / "model", "--store", place / "store", "--json",
        capsys=capsys, stdin=(place / "text.txt").read_bytes(),
    )  # fmt: skip
    assert result_of(again)["reused"] is True


def test_build_takes_a_file_of_token_ids_and_records_its_name(capsys, place: Path, tmp_path: Path) -> None:
    ids = [number % 100 for number in range(300)]
    (tmp_path / "ids.json").write_text(json.dumps(ids))
    where = "--model", place / "model", "--store", tmp_path / "store", "--json"
    built = result_of(in_process("build", "--tokens", tmp_path / "ids.json", *where, capsys=capsys))
    with open_artifact(built["path"]) as artifact:
        assert artifact.token_ids.tolist() == ids
    assert result_of(in_process("inspect", built["path"], "--json", capsys=capsys))["notes"]["source"] == "ids.json"


def test_build_warns_of_special_tokens_in_the_text(capsys, place: Path) -> None:
    """Such tokens may end a message, and the author of the text may not be the user who asks."""
    shutil.copytree(place / "model", place / "special")
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "#"})
    tokenizer.save_pretrained(place / "special")

    def told(text: str, *more: str) -> str:
        build = "build", "--context", "-", "--model", place / "special", "--store", place / "few", *more
        return in_process(*build, capsys=capsys, stdin=text.encode()).stderr

    warning = next(line for line in told("#A lamp.# It is too short.").splitlines() if "special tokens" in line)
    assert warning.startswith("the text holds 2 ") and warning.endswith(", not as text"), "a log has it on one line"
    quiet = "--progress", "json"
    assert "special token" not in told("#A lamp.# It is too short.", *quiet), "they would be why a build has ended"
    assert "special" not in told("A lamp. It is too short.").replace(str(place / "special"), "")


def test_generate_streams_an_answer_and_compares_it_with_full_attention(capsys, artifact: Path) -> None:
    asked = "generate", artifact, "--prompt", "who?", "--keep", "1.0", "--max-new-tokens", 5, "--compare"
    done, result = in_process(*asked, capsys=capsys), result_of(in_process(*asked, "--json", capsys=capsys))
    assert len(result["token_ids"]) == 5
    assert result["token_ids"] == result["full"]["token_ids"], "keep 1.0 is full attention"
    assert (result["keep"], result["rest"]) == (1.0, "none")
    assert "keep 100 %, rest none" in done.stdout
    assert done.stdout.startswith("csattn: ") and "\nfull: " in done.stdout  # an answer may have several lines
    assert "reading" not in done.stderr


def test_generate_labels_answers_of_a_model_with_its_own_selection(capsys, place: Path, tmp_path: Path) -> None:
    save(tmp_path / "model", "deepseek_v32")
    where = "--model", tmp_path / "model", "--store", tmp_path / "store"
    built = result_of(in_process("build", "--context", place / "text.txt", *where, "--json", capsys=capsys))
    asked = "generate", built["path"], "--prompt", "who?", "--max-new-tokens", 2, "--compare"
    said = in_process(*asked, capsys=capsys).stdout
    assert said.count("the model's own choice") == 2 and "full attention" not in said


def test_generate_reads_the_prompt_from_standard_input(capsys, artifact: Path) -> None:
    def asked(prompt: str, stdin: bytes = b"") -> dict:
        arguments = "generate", artifact, "--max-new-tokens", 3, "--json", "--prompt", prompt
        return result_of(in_process(*arguments, capsys=capsys, stdin=stdin))

    assert asked("-", "Who was it, é?".encode())["token_ids"] == asked("Who was it, é?")["token_ids"]


def test_generate_reads_less_than_full_attention(capsys, artifact: Path) -> None:
    result = result_of(
        in_process(
            "generate", artifact, "--prompt", "who?", "--keep", "0.05", "--window-len", 8, "--json", capsys=capsys
        )
    )
    assert result["rows_read_per_step"] < 0.2 * result["rows_full_attention"]
    assert (result["keep"], result["rest"]) == (0.05, "sketch")


def test_a_context_decodes_within_a_host_budget(capsys, artifact: Path) -> None:
    asked = "generate", artifact, "--prompt", "who?", "--max-new-tokens", 4, "--json", "--compare"
    within = result_of(in_process(*asked, "--host-budget", "2MiB", capsys=capsys))
    assert within["full"]["token_ids"] == result_of(in_process(*asked, capsys=capsys))["full"]["token_ids"]
    for wrong, sentence in (
        (["1 potato"], "is not a size; give a number of bytes"),
        (["1kB"], "a host budget of 1,000 bytes is too small for this context"),
        (["1MiB", "--selector", "exact"], "reads all keys from host memory"),
        (["1MiB", "--kv-codec", "fp8"], "a host budget keeps rows as the artifact has them"),
        (["1MiB", "--placement", "device"], "leave out the host budget"),
    ):
        refused = in_process(*asked[:-1], "--host-budget", *wrong, capsys=capsys)
        assert refused.returncode == 1
        assert sentence in " ".join(refused.stderr.split())


ASKED = "generate", "{artifact}", "--prompt", "x"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*ASKED, "--selector", "best"), "unknown selector 'best'; choose one of csattn"),
        ((*ASKED, "--selector", "h2o", "--rest", "moments"), "works only with the selectors csattn and exact"),
        ((*ASKED, "--selector", "h2o", "--host-budget", "1MiB"), "reads all keys from host memory"),
        ((*ASKED, "--kv-codec", "fp8", "--host-budget", "1MiB"), "a host budget keeps rows as the artifact has them"),
        ((*ASKED, "--weights", "int3"), "weights can be rounded to fp8 or int4, not to 'int3'"),
        (("build", "--context", "{place}/text.txt", "--dtype", "int3"), "dtype must be one of float32"),
        (("eval", "--text", "{place}/text.txt", "--dtype", "int3"), "dtype must be one of float32"),
        (("stream", "--prompt", "x", "--dtype", "int3"), "dtype must be one of float32"),
        ((*ASKED[:-1], ""), "--prompt holds no text; give one that is not empty"),
        ((*ASKED[:-1], " \n"), "--prompt holds no text"),
        ((*ASKED[:-1], "-"), "standard input holds no text"),
        (("stream", "--prompt", ""), "--prompt holds no text"),
        (("stream", "--prompt", "-"), "standard input holds no text"),
        (("eval", "--text", "-"), "standard input holds no text"),
        (("eval", "--text", "{place}/text.txt", "--presets", "", "--selectors", ""), "there is nothing to evaluate"),
        (("eval", "--text", "{place}/text.txt", "--lookahead", ""), "give --lookahead 0, 1 or 0,1"),
        (
            ("eval", "--text", "{place}/text.txt", "--presets", "", "--selectors", "exact,quest", "--rest", "sketch"),
            "rest sketch works only with the selectors csattn and exact, and quest works as it was published",
        ),
        (("build", "--context", "-"), "standard input holds no text"),
    ],
)
def test_invalid_options_are_refused_before_a_model_is_loaded(
    capsys, monkeypatch, place, artifact, arguments, words
) -> None:
    monkeypatch.setattr(building, "_load_model", lambda *_, **__: pytest.fail("a model is loaded"))
    done = in_process(*(part.format(place=place, artifact=artifact) for part in arguments), capsys=capsys)
    assert done.returncode == 1 and words in done.stderr and "loading" not in done.stderr and not done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("placement", ["device", "hybrid", "host"])
def test_a_gpu_at_keep_1_equals_full_attention_in_the_requested_kv_codec(
    capsys, artifact: Path, placement: str
) -> None:
    asked = "generate", artifact, "--prompt", "who?", "--max-new-tokens", 4, "--json", "--kv-codec", "fp8"
    want = result_of(in_process(*asked, "--selector", "full", capsys=capsys))
    got = result_of(in_process(*asked, "--keep", 1.0, "--compare", "--placement", placement, capsys=capsys))
    assert got["token_ids"] == got["full"]["token_ids"] == want["token_ids"]
    assert (got["selector"], got["full"]["selector"]) == ("csattn", "full")


@pytest.mark.gpu
def test_a_gpu_decodes_unless_the_cpu_is_asked_for(capsys, artifact: Path) -> None:
    asked = "generate", artifact, "--prompt", "who?", "--max-new-tokens", 2
    assert "csattn, device: " in in_process(*asked, capsys=capsys).stdout
    for on_cpu in (("--placement", "cpu"), ("--host-budget", "1GiB")):
        assert "csattn: " in in_process(*asked, *on_cpu, capsys=capsys).stdout


def test_generate_and_eval_use_the_requested_kv_codec(capsys, place: Path, artifact: Path) -> None:
    """The codec here is fp8: heads are 16 wide, and q8_0 takes multiples of 32."""
    asked = "generate", artifact, "--prompt", "who?", "--max-new-tokens", 4, "--json"
    plain = result_of(in_process(*asked, capsys=capsys))
    assert result_of(in_process(*asked, "--kv-codec", "float32", capsys=capsys))["token_ids"] == plain["token_ids"]
    refused = in_process(*asked, "--kv-codec", "q8_0", capsys=capsys)
    assert refused.returncode == 1 and "head_dim is 16, but q8_0 takes multiples of 32" in refused.stderr
    refused = in_process(*asked, "--placement", "gpu", capsys=capsys)
    assert refused.returncode == 1 and "unknown placement 'gpu'; choose one of cpu, device" in refused.stderr
    refused = in_process(*asked, "--selector", "exact", "--placement", "hybrid", capsys=capsys)
    assert (
        refused.returncode == 1
        and "a GPU decodes with csattn or full, or with exact in placement device" in refused.stderr
    )
    of_text = "eval", "--text", place / "text.txt", "--model", place / "model", "--context-len", 300, "--eval-len", 20
    done = in_process(
        *of_text, "--presets", "", "--selectors", "full", "--kv-codec", "k=fp8,v=float16", "--json", capsys=capsys
    )
    result = result_of(done)
    assert result["kv_codec"] == "k=fp8,v=float16"
    assert 1e-7 < result["results"][0]["kl"] < 0.1
    assert result["results"][0]["output_error"] > 1e-3


def test_a_suggested_command_quotes_a_path_with_spaces(capsys, tmp_path: Path) -> None:
    (store := tmp_path / "my store").mkdir()
    done = in_process("inspect", store, capsys=capsys)
    assert done.returncode == 1 and f"`csattn ls --store '{store}'` lists its artifacts" in done.stderr


def test_an_artifact_is_found_by_the_start_of_its_id(capsys, place: Path, artifact: Path) -> None:
    assert (
        result_of(in_process("inspect", artifact.parent / artifact.name[:6], "--json", capsys=capsys))["artifact"]
        == artifact.name
    )


def test_eval_compares_presets_and_selectors(capsys, place: Path) -> None:
    done = in_process(
        "eval", "--text", place / "text.txt", "--model", place / "model", "--context-len", 400, "--eval-len", 16,
        "--keep", 0.2, "--presets", "default,paper", "--selectors", "exact,window,full,quest,magicpig,h2o,exact",
        "--lookahead", "0,1,0", "--json",
        capsys=capsys,
    )  # fmt: skip
    result = result_of(done)
    by_name = {(r.get("preset") or r["selector"], r["lookahead"]): r for r in result["results"]}
    assert len(by_name) == len(result["results"]), "what is asked for twice is measured once"
    assert set(result["search"]) == {"keep", "sink_len", "window_len", "search_period"}, "results tell the others"
    assert set(by_name) == {
        *((name, ahead) for name in ("default", "paper", "exact", "quest", "magicpig", "h2o") for ahead in (0, 1)),
        ("window", 0), ("full", 0),
    }  # fmt: skip
    for name in ("default", "paper", "exact", "quest"):
        assert by_name[name, 0]["kl"] != by_name[name, 1]["kl"]
    assert by_name["full", 0]["kl"] == pytest.approx(0, abs=1e-5)
    assert by_name["full", 0]["rows_read_share"] == pytest.approx(1)
    assert by_name["exact", 0]["recall_at_k"] == pytest.approx(1)
    assert by_name["exact", 0]["kl"] < by_name["window", 0]["kl"]
    assert by_name["default", 0]["index_bytes_per_key"] > 0
    assert by_name["quest", 0]["index_bytes_per_key"] == 2 * 16 * 4 / 16, "two keys of 16 float32 for a page of 16"
    predictors = 2 * 4 * 17 * 16 * 4  # for the two layers after the first, 4 query heads each, in float32
    for name in ("default", "paper", "exact", "quest"):
        own, ahead = by_name[name, 0], by_name[name, 1]
        assert ahead["index_bytes_per_key"] - own["index_bytes_per_key"] == pytest.approx(predictors / 400 / 6)
        assert ahead["search_bytes_per_step"] - own["search_bytes_per_step"] == pytest.approx(predictors, rel=0.02)
    searched = {name: of["search_bytes_per_step"] for (name, ahead), of in by_name.items() if ahead == 0}
    assert searched["window"] == searched["full"] == searched["h2o"] == 0
    assert 0 < searched["quest"] < searched["exact"]
    assert min(searched["default"], searched["paper"], searched["magicpig"]) > 0


def test_eval_refuses_a_selector_that_the_model_does_not_support_before_it_builds(
    capsys, place: Path, tmp_path: Path
) -> None:
    store, model = tmp_path / "store", save(tmp_path / "model", "nemotron_h")
    done = in_process(
        "eval", "--text", place / "text.txt", "--model", model, "--context-len", 400, "--eval-len", 16,
        "--selectors", "window,h2o", "--store", store,
        capsys=capsys,
    )  # fmt: skip
    assert done.returncode == 1 and "some of whose layers keep no rows" in done.stderr
    assert not store.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_eval_that_is_ended_leaves_no_artifact_behind(place: Path, tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", "from workers.cli import main; main()", "eval", "--text", str(place / "text.txt")]
    command += ["--model", str(place / "model"), "--context-len", "400", "--eval-len", "400"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**ENV, "TMPDIR": str(tmp_path)}) as process:
        while not list(tmp_path.glob("csattn-eval-*/*")):
            assert process.poll() is None, "it ended before it built"
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    assert not list(tmp_path.glob("csattn-eval-*"))


def test_eval_with_keep_1_reports_no_rest(capsys, place: Path) -> None:
    of_text = "eval", "--text", place / "text.txt", "--model", place / "model", "--context-len", 300, "--eval-len", 2
    assert result_of(in_process(*of_text, "--keep", 1, "--json", capsys=capsys))["results"][0]["rest"] == "none"
    assert result_of(in_process(*of_text, "--json", capsys=capsys))["results"][0]["rest"] == "sketch"


@pytest.mark.parametrize(
    "asked", [("build", "--context", "x", "--store"), ("gc", "--store"), ("demo", "--out"), ("inspect",)]
)
def test_an_empty_path_is_refused_and_not_the_current_directory(capsys, asked: tuple[str, ...]) -> None:
    refused = in_process(*asked, "", capsys=capsys)
    assert refused.returncode == 2 and refused.stderr.endswith("the path is empty; give one\n")


@pytest.mark.parametrize(
    "asked", [("eval", "--text", "x", "--store"), ("doctor", "--store"), ("demo", "--out"), ("serve", "--store")]
)
def test_a_url_is_refused_where_a_directory_is_wanted(capsys, asked: tuple[str, ...]) -> None:
    refused = in_process(*asked, "s3://bucket/x", capsys=capsys)
    assert refused.returncode == 2 and "wanted a directory of this machine, got the URL s3://bucket/x" in refused.stderr


def test_eval_stretches_the_model_to_longer_texts(capsys, place: Path) -> None:
    text = place / "longer.txt"
    text.write_text(" ".join((place / "text.txt").read_text().split()[:20] * 200))
    asked = "eval", "--text", text, "--model", place / "model", "--context-len", 1100, "--eval-len", 4, "--json"
    refused = in_process(*asked, "--presets", "", "--selectors", "full", capsys=capsys)
    assert refused.returncode == 1 and "or a --stretch" in refused.stderr
    result = result_of(in_process(*asked, "--presets", "", "--selectors", "full", "--stretch", 2, capsys=capsys))
    assert result["stretch"] == 2
    assert result["results"][0]["kl"] == pytest.approx(0, abs=1e-5)


def test_eval_reports_how_the_rest_is_attended_to(capsys, place: Path) -> None:
    """A selector and the preset with the same index give the same results."""
    arguments = "eval", "--text", place / "text.txt", "--model", place / "model", "--context-len", 400, "--eval-len", 9
    arguments += "--keep", 0.1, "--window-len", 8, "--presets", "default"
    shown = in_process(*arguments, "--selectors", "exact", "--rest", "moments", capsys=capsys).stdout
    assert "keep 10 %" in shown and "moments" in shown
    arguments += ("--json",)
    results = {
        rest: result_of(in_process(*arguments, "--selectors", "csattn,exact", "--rest", rest, capsys=capsys))["results"]
        for rest in ("none", "moments", "sketch")
    }
    for rest, of_rest in results.items():
        assert [(of["rest"], of["keep"]) for of in of_rest] == [(rest, 0.1)] * 3
        assert of_rest[0]["kl"] == of_rest[1]["kl"]
    assert len({exact["kl"] for _, _, exact in results.values()}) == 3
    unsaid = result_of(in_process(*arguments, "--selectors", "csattn,exact,quest", capsys=capsys))["results"]
    assert [of["rest"] for of in unsaid] == ["sketch", "sketch", "none", "none"]
    results = {rest: of_rest[:2] for rest, of_rest in results.items()}
    assert len({ours["kl"] for ours, _ in results.values()}) == 3
    moments = 4 * (2 * 16 + 2 * 16 * 16)  # two means and two matrices of float32, for each of 2 KV heads in 3 layers
    none, estimated, coded = (ours for ours, _ in results.values())
    assert estimated["rest_bytes_per_step"] == pytest.approx(3 * 2 * moments)
    assert estimated["index_bytes_per_key"] - none["index_bytes_per_key"] == pytest.approx(moments / 400)
    assert coded["index_bytes_per_key"] == none["index_bytes_per_key"]
    assert len({ours["search_bytes_per_step"] for ours, _ in results.values()}) == 1
    assert coded["rest_bytes_per_step"] > none["rest_bytes_per_step"] == 0


def test_inspect_verify_and_ls_agree(capsys, place: Path, artifact: Path) -> None:
    inspected, verified = (
        result_of(in_process("inspect", artifact, "--json", capsys=capsys)),
        result_of(in_process("verify", artifact, "--json", capsys=capsys)),
    )
    listed = result_of(in_process("ls", "--store", place / "store", "--json", capsys=capsys))
    assert inspected["size_bytes"] == verified["size_bytes"] == listed["artifacts"][0]["size_bytes"]
    assert verified["intact"] is True
    assert listed["artifacts"][0]["source"] == inspected["notes"]["source"]
    work = place / "store" / f".building-{'0' * 16}"
    work.mkdir()
    shown = in_process("ls", "--store", place / "store", "--json", capsys=capsys)
    told = f"unfinished: {work.name}; the same build continues it, `csattn gc` removes it"
    assert result_of(shown)["unfinished"] == [str(work)] and told in shown.stderr.splitlines()
    lock = BuildLock(work.with_name(f"{work.name}.lock")).acquire()
    shown = in_process("ls", "--store", place / "store", "--json", capsys=capsys)
    assert (result_of(shown)["unfinished"], result_of(shown)["building"]) == ([], [str(work)])
    assert f"being built: {work.name}" in shown.stderr and "csattn gc" not in shown.stderr
    assert result_of(in_process("gc", "--store", place / "store", "--json", capsys=capsys))["removed"] == []
    lock.release()
    for removed in ([str(work)], []):
        assert result_of(in_process("gc", "--store", place / "store", "--json", capsys=capsys))["removed"] == removed


def test_commands_work_with_closed_standard_streams(place: Path, monkeypatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with suppress(BrokenPipeError), os.fdopen(writer, "w") as nobody:
        monkeypatch.setattr(terminal.err, "_file", nobody)
        terminal.err.print("a word")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("stdin", "stdout", "stderr"):  # closed, as by >&-
            patch.setattr(sys, name, None)
        patch.setattr(sys, "argv", ["csattn", "ls", "--store", str(place), "--json"])
        main()
        assert sys.stdin.buffer.read() == b""
        for file in (sys.stdin, sys.stdout, sys.stderr):
            file.close()


def test_verify_checks_a_whole_store_and_reports_every_fault(capsys, artifact: Path, tmp_path: Path) -> None:
    shutil.copytree(artifact, tmp_path / artifact.name)
    broken = tmp_path / ("0" * 16)
    shutil.copytree(artifact, broken)
    done = in_process("verify", tmp_path, "--json", capsys=capsys)
    assert done.returncode == 1 and done.stderr.count("not intact: ") == 1 and "verifying: 2 artifacts" in done.stderr
    assert "intact: 1 of 2 artifacts in" in in_process("verify", tmp_path, capsys=capsys).stdout
    found = json.loads(done.stdout)
    assert found["artifacts"] == [artifact.name] and list(found["broken"]) == [broken.name] and not found["intact"]
    listed = in_process("ls", "--store", tmp_path, "--json", capsys=capsys)
    assert listed.returncode == 0 and list(result_of(listed)["broken"]) == [broken.name]
    reseal(broken, lambda manifest: manifest.update(format_version=1))
    done = in_process("verify", tmp_path, "--json", capsys=capsys)
    assert done.returncode == 1 and "not intact" not in done.stderr and "not readable here: " in done.stderr
    found = json.loads(done.stdout)
    assert list(found["unreadable"]) == [broken.name] and not found["broken"] and not found["intact"]
    shutil.rmtree(broken)
    done = in_process("verify", tmp_path, "--json", capsys=capsys)
    assert result_of(done)["intact"]
    assert "verifying: 1 artifact\n" in done.stderr


def test_terminal_escapes_from_an_artifact_are_not_printed(capsys, artifact: Path, tmp_path: Path) -> None:
    path = tmp_path / artifact.name
    shutil.copytree(artifact, path)

    def forge(manifest: dict[str, Any]) -> None:
        manifest["model"]["name"] = manifest["build_notes"]["preset"] = "evil\x1b]0;mine\x07\x9b31m\u202e"

    reseal(path, forge)
    for verb in (["ls", "--store", tmp_path], ["inspect", path], ["generate", path, "--prompt", "?"]):
        shown = in_process(*verb, capsys=capsys)
        told = shown.stdout + shown.stderr
        assert "evil" in told and not set("\x1b\x07\x9b\u202e") & set(told)
    (path / "\x1b[31m").touch()
    shown = in_process("verify", path, capsys=capsys)
    assert "does not belong" in shown.stderr and "\x1b" not in shown.stderr


def test_ls_shows_the_names_of_registered_contexts(capsys, artifact: Path) -> None:
    store, contexts = artifact.parent, artifact.parent / FILE_NAME
    try:
        record = Record(name="handbook", created_at=1.0, artifact_id=artifact.name)
        ContextFile(store).change(lambda records: records.update(handbook=record))
        listed = result_of(in_process("ls", "--store", store, "--json", capsys=capsys))
        assert {of["artifact"]: of["names"] for of in listed["artifacts"]}[artifact.name] == ["handbook"]
        assert "handbook" in in_process("ls", "--store", store, capsys=capsys).stdout
        contexts.write_text("{")
        listed = result_of(shown := in_process("ls", "--store", store, "--json", capsys=capsys))
        assert artifact.name in {of["artifact"] for of in listed["artifacts"]}
        assert "names of contexts cannot be read" in shown.stderr
    finally:
        contexts.unlink(missing_ok=True)


def test_ls_and_inspect_report_the_quantization_of_an_artifacts_weights(
    capsys, place: Path, artifact: Path, tmp_path: Path
) -> None:
    line = {"context": str(place / "text.txt"), "weights": "fp8", "dtype": "bfloat16"}
    (tmp_path / "jobs").write_text(json.dumps(line))
    store = "--store", tmp_path / "store"
    where = "--model", place / "model", *store, "--json"
    rounded = "build", "--context", place / "text.txt", "--weights", "int4"
    built = Path(result_of(in_process(*rounded, *where, capsys=capsys))["path"])
    result_of(in_process("build", "--jobs", tmp_path / "jobs", *where, capsys=capsys))
    listed = result_of(in_process("ls", *store, "--json", capsys=capsys))
    noted = {(of["weights"], of["kv_dtype"]) for of in listed["artifacts"]}
    assert noted == {("int4", "float32"), ("fp8", "bfloat16")}
    assert "float32, int4" in in_process("ls", *store, capsys=capsys).stdout
    inspected = in_process("inspect", built, capsys=capsys).stdout
    assert "rounded to int4" in inspected and "float32" in inspected
    plain = result_of(in_process("inspect", artifact, "--json", capsys=capsys))
    assert (plain["weights"], plain["notes"]["weights"]) == ("none", "none")
    assert "as published" in in_process("inspect", artifact, capsys=capsys).stdout
    refused = in_process("generate", built, "--prompt", "x", "--weights", "fp8", capsys=capsys)
    assert refused.returncode == 1 and "weights rounded to int4 (add --weights int4" in refused.stderr
    assert result_of(in_process("generate", built, "--prompt", "x", "--json", capsys=capsys))


def test_builds_free_the_quantized_weights(
    capsys, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill multiplies by decoded weights, so a build does not keep the quantized ones."""
    models: list[Any] = []

    def loading(*given: Any, **options: Any) -> LoadedModel:
        models.append((loaded := load_model(*given, **options)).model)
        assert any(hasattr(module, "quantized") for module in loaded.model.modules())
        return loaded

    for user in (building, batch):
        monkeypatch.setattr(user, "load_model", loading)
    options = {"model": str(place / "model"), "weights": "fp8", "dtype": "bfloat16"}
    (tmp_path / "jobs").write_text(json.dumps({"context": str(place / "text.txt"), **options}))
    flags = [word for name, value in options.items() for word in (f"--{name}", value)]
    where = "--store", tmp_path / "store"
    result_of(in_process("build", "--context", place / "text.txt", *flags, *where, "--json", capsys=capsys))
    result_of(in_process("build", "--jobs", tmp_path / "jobs", *where, "--json", capsys=capsys))
    assert Builder()._model(BuildOptions(**options), "cpu").model is models[2]
    assert not [module for model in models for module in model.modules() if hasattr(module, "quantized")]


def test_ls_lists_and_gc_removes_kept_files_on_request(capsys, tmp_path: Path) -> None:
    (made := tmp_path / "kept" / ("0" * 32) / "0123456789abcdef").mkdir(parents=True)
    (made / "layer").write_bytes(b"x" * 5000)
    (tmp_path / "kept" / "0.block").write_bytes(b"x" * 2048)

    def kept() -> dict:
        return result_of(in_process("ls", "--store", tmp_path, "--json", capsys=capsys))["kept"]

    shown = in_process("ls", "--store", tmp_path, capsys=capsys).stdout
    assert f"{tmp_path}/kept has 1 context of prompts (" in shown
    assert "and rows of turns (2.0 KiB); `csattn gc --kept` removes it" in shown
    there = kept()
    assert (there["num_contexts"], there["row_bytes"]) == (1, 2048) and there["context_bytes"] >= 5000
    collect = "gc", "--store", tmp_path, "--json"
    assert result_of(in_process(*collect, capsys=capsys))["removed_kept_bytes"] == 0 and kept() == there
    removed = result_of(in_process(*collect, "--kept", capsys=capsys))["removed_kept_bytes"]
    assert removed == there["context_bytes"] + 2048 and not any(kept().values())
    assert "gc --kept" not in in_process("ls", "--store", tmp_path, capsys=capsys).stdout
    refused = in_process("gc", "--store", "memory://s", "--kept", capsys=capsys)
    assert refused.returncode == 1 and "services keep nothing in a store at a URL" in refused.stderr


def test_rm_removes_artifacts_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], artifact: Path
) -> None:
    store, other = tmp_path / "store", tmp_path / "other" / artifact.name
    shutil.copytree(artifact, store / artifact.name)
    shutil.copytree(artifact, other)
    name_artifact(store, "lamps", artifact.name, "float32")

    def refusal(*given: object) -> str:
        done = in_process("rm", *given, capsys=capsys)
        assert done.returncode == 1 and (store / artifact.name).is_dir()
        return done.stderr

    assert f"{store} is not an artifact" in refusal(store)
    assert "there is no artifact 'fff'" in refusal(store / artifact.name, store / "fff")
    with BuildLock(store / f".building-{artifact.name}.lock").acquire():
        assert "another process builds or removes" in refusal(store / artifact.name[:4])
    with open_artifact(store / artifact.name) as reader:
        done = in_process("rm", store / artifact.name[:4], store / artifact.name, capsys=capsys)
        assert result_of(in_process("rm", other, "--json", capsys=capsys))["removed"] == [str(other)]
        assert f"removed {store / artifact.name}, which services know as lamps\n" in done.stdout
        assert reader.layer_kv(0).any() and not other.exists()
        assert [path.name for path in store.iterdir() if path.is_dir()] == []


def test_rm_removes_an_artifact_behind_a_url_and_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], artifact: Path
) -> None:
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path))
    remote = RemoteStore(f"memory://{tmp_path}")
    remote.upload(artifact)
    copy = remote.fetch(artifact.name)
    assert in_process("rm", f"{remote.url}/{artifact.name[:5]}", capsys=capsys).returncode == 0
    assert remote.artifact_ids() == [] and not copy.exists()
    refused = in_process("rm", f"{remote.url}/{artifact.name}", capsys=capsys)
    assert refused.returncode == 1 and f"there is no artifact {remote.url}/{artifact.name}" in refused.stderr


def test_gc_fails_in_a_store_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write whatever the permissions are
    refused = in_process("gc", "--store", tmp_path, capsys=capsys)
    assert refused.returncode == 1 and "cannot be written" in refused.stderr


@pytest.mark.parametrize("verb", ["ls", "gc"])
def test_a_missing_store_is_refused_and_not_treated_as_empty(capsys, place: Path, verb: str) -> None:
    done = in_process(verb, "--store", place / "stroe", capsys=capsys)
    assert done.returncode == 1 and f"there is no store at {place}/stroe; `csattn build` makes one" in done.stderr
    (place / "notes.txt").touch()
    done = in_process(verb, "--store", place / "notes.txt", capsys=capsys)
    assert done.returncode == 1 and f"{place}/notes.txt is a file, not a store; give a directory with" in done.stderr


@pytest.mark.parametrize(
    "asked",
    [
        ("build", "--context", "{place}/text.txt", "--model", "/no/model"),
        ("ls",),
        ("gc",),
        ("serve", "--local", "--model", "/no/model"),
    ],
    ids=lambda asked: asked[0],
)
def test_an_artifact_in_place_of_a_store_is_refused_before_a_model_is_loaded(capsys, place, artifact, asked) -> None:
    done = in_process(*(word.format(place=place) for word in asked), "--store", artifact, capsys=capsys)
    assert (
        done.returncode == 1
        and f"an artifact, not a store; give the directory it is in: {artifact.parent}" in done.stderr
    )


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (["build", "--context", "{place}/none.txt"], 1, "cannot read"),
        (["build", "--context", "{place}/empty.txt"], 1, "holds no text"),
        (["build", "--context", ""], 1, "the path of the text is empty; give a text file, or - for stdin"),
        (["build", "--context", "{place}/latin.txt"], 1, "not UTF-8"),
        (["build", "--context", "{place}/short.txt", "--model", "{place}/model"], 1, "at least 256"),
        (["build", "--context", "{place}/long.txt", "--model", "{place}/model"], 1, "positions"),
        (["build", "--context", "{place}/text.txt", "--model", "/no/model"], 1, "no model at"),
        (["build", "--context", "{place}/text.txt", "--preset", "fast"], 1, "unknown preset"),
        (
            [
                "build",
                "--context",
                "{place}/text.txt",
                "--model",
                "{place}/model",
                "--preset",
                "lists",
                "--num-subspaces",
                "5",
            ],
            1,
            "subspaces",
        ),
        (["build", "--context", "{place}/text.txt", "--model", "{place}/model", "--list-len", "0.5"], 1, "no meaning"),
        (["build"], 2, "--context"),
        (["generate", "{artifact}", "--prompt", "x", "--keep", "0"], 1, "keep must be more than 0 and at most 1, got"),
        (
            ["generate", "{artifact}", "--prompt", "x", "--keep", "1.5"],
            1,
            "keep must be more than 0 and at most 1, got",
        ),
        (["generate", "{artifact}", "--prompt", "x", "--selector", "best"], 1, "unknown selector"),
        (["generate", "{artifact}", "--prompt", "x", "--selector", "h2o", "--rest", "moments"], 1, "works only with"),
        (["generate", "{artifact}", "--prompt", "x", "--rest", "codes"], 1, "rest must be one of sketch, moments"),
        (
            [
                "eval",
                "--text",
                "{place}/text.txt",
                "--model",
                "{place}/model",
                "--presets",
                "paper",
                "--rest",
                "sketch",
            ],
            1,
            "needs an index that is a sketch",
        ),
        (["generate", "{place}/store/ffff", "--prompt", "x"], 1, "no artifact"),
        (["generate", "{artifact}", "--prompt", "x", "--model", "{place}/other"], 1, "model"),
        (["eval", "--text", "{place}/text.txt", "--model", "{place}/model", "--selectors", "best"], 1, "choose from"),
        (["eval", "--text", "{place}/text.txt", "--model", "{place}/model"], 1, "longer text"),
        (["verify", "{place}"], 1, "artifact"),
        (["ls", "--store", "s3:/bucket"], 2, "a URL has two slashes after its colon, got s3:/bucket"),
        (["ls", "--store", ""], 2, "Invalid value for '--store': the path is empty; give one"),
        (["frobnicate"], 2, "No such command 'frobnicate'; `csattn --help` shows what to give"),
        (["generate", "{artifact}"], 2, "Missing option '--prompt'; `csattn generate --help` shows what to give"),
        (["ls", "handbooks"], 2, "unexpected extra argument(s) (handbooks); did you mean --store handbooks?"),
        (["verify", "{artifact}", "--json=3"], 2, "Option '--json' does not take a value; `--help` shows what to give"),
        (["generate", "{artifact}", "--prompt", "x", "--max-new-tokens", "0"], 2, " 1; `csattn generate --help` shows"),
        (["generate", "{artifact}", "--prompt", "x", "--max-new-tokens", "many"], 2, "'many'"),
        (["generate", "{artifact}", "--prompt", "x", "--keep", "2%"], 2, "'2%'"),
        (["build", "--keep", "3"], 2, "--keep belongs to generate, eval and serve; `csattn build --help` lists"),
        (["verify", "{artifact}", "--set", "a=b"], 2, "--set belongs to serve and config show; `csattn verify --help`"),
        (["ls", "--ray", "auto"], 2, "--ray belongs to build; `csattn ls --help` lists"),
        (["config", "show", "--keep", "3"], 2, "`csattn config show --help` lists"),
        (["build", "--contxt", "a"], 2, "No such option: --contxt"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else None,
)
def test_bad_input_exits_with_a_code_and_the_reason(capsys, place, artifact, arguments, exit_code, words) -> None:
    (place / "empty.txt").write_text("  \n")
    (place / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    (place / "short.txt").write_text("too short")
    (place / "long.txt").write_text("too long " * 200)
    if "{place}/other" in arguments and not (place / "other").exists():
        save(place / "other", seed=5)
    before = sorted((place / "store").iterdir())
    filled = [argument.format(place=place, artifact=artifact) for argument in arguments]
    if filled[0] == "build":
        filled += ["--store", str(place / "store")]
    done = in_process(*filled, "--json", capsys=capsys)
    assert done.returncode == exit_code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert words in json.loads(done.stdout)["error"]["message"]
    assert sorted((place / "store").iterdir()) == before, "nothing may be left half-written"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_full_disk_under_standard_output_is_reported_in_one_line() -> None:
    command = [sys.executable, "-c", "from workers.cli import main; main()", "config", "example", "--json"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=ENV, timeout=120)
    assert done.returncode == 1 and done.stderr.startswith("error: a disk that is written to is full")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_service_whose_output_cannot_be_written_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    monkeypatch.setattr(serving, "_on_signal", lambda act: None)
    monkeypatch.setattr(serving, "_serve_here", lambda settings, named, on_ready: on_ready("http://here", "no GPU"))
    for place in ("/dev/full", write_end):
        with open(place, "w") as output:
            monkeypatch.setattr(sys, "stdout", output)
            serving.serve(None, {"store.path": tmp_path}, [], in_one_process=True, json=True)
