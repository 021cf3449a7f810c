"""`csattn config` and `csattn doctor`, and what all commands share: output, interrupts, memory errors, help."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from io import TextIOWrapper
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numba
import numpy as np
import pytest
import torch
from numba.core.event import install_listener
from rich.console import Console

from csattn import __version__
from tests.workers.test_cli import csattn, in_process, result_of
from workers.cli import doctor_command, generating, serving, store_commands, terminal, version
from workers.doctor import Facts, examine, gather_facts
from workers.settings import example
from workers.settings.parts import KEYS, default_lookahead


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "csattn.toml"
    file.write_text("[server]\nport = 8100\nhost = '0.0.0.0'\napi_keys = ['hush']\n\n[search]\nkeep = 0.1\n")
    return file


def test_config_show_reports_the_origin_of_each_value(capsys, monkeypatch, file: Path) -> None:
    monkeypatch.setenv("CSATTN_SEARCH_KEEP", "0.2")
    done = in_process("config", "show", "--config", file, "--set", "server.port=8200", "--json", capsys=capsys)
    result = result_of(done)
    assert result["file"] == str(file)
    assert result["settings"].keys() == KEYS.keys()
    assert result["settings"]["server.port"] == {"value": 8200, "origin": "flag"}
    assert result["settings"]["search.keep"] == {"value": 0.2, "origin": "environment CSATTN_SEARCH_KEEP"}
    assert result["settings"]["server.host"]["origin"] == f"file {file}, line 3"
    assert result["settings"]["store.path"] == {"value": "store", "origin": "default"}
    assert all(key in done.stdout for key in KEYS)
    assert "hush" not in done.stdout + done.stderr and "***" in done.stdout


def test_config_show_reads_the_file_that_config_example_prints(capsys, tmp_path: Path) -> None:
    done = in_process("config", "example", capsys=capsys)
    assert done.returncode == 0 and done.stdout == example()
    assert result_of(in_process("config", "example", "--json", capsys=capsys)) == {"toml": example()}
    (tmp_path / "all.toml").write_text(done.stdout)
    shown = result_of(in_process("config", "show", "--config", tmp_path / "all.toml", "--json", capsys=capsys))
    assert shown["settings"]["server.port"]["value"] == 8000


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (["config", "show", "--set", "server.prt=1"], 1, "did you mean server.port?"),
        (["config", "show", "--set", "server.port"], 1, "--set takes KEY=VALUE"),
        (["config", "show", "--set", "server.port=-1"], 1, "server.port must be at least 0, got -1 (flag)"),
        (["config", "show", "--config", "/no/such.toml"], 1, "cannot read settings from /no/such.toml"),
        (["config", "shew"], 2, "No such command"),
    ],
)
def test_invalid_settings_exit_with_a_code_and_the_reason(capsys, arguments, exit_code, words) -> None:
    done = in_process(*arguments, "--json", capsys=capsys)
    assert done.returncode == exit_code
    assert words in done.stderr and "Traceback" not in done.stderr
    assert words in json.loads(done.stdout)["error"]["message"]


def test_doctor_finds_this_machine_usable(tmp_path: Path, capsys, monkeypatch) -> None:
    found = gather_facts(tmp_path / "store")
    assert found.python == sys.version_info[:2] and found.num_cpus >= 1
    assert "torch" in found.packages and "numba" in found.packages
    for name in ("torch", "numba", "faiss", "memory", "store", "kept"):
        assert "error" not in found.probes[name], found.probes[name]
    assert found.probes["memory"]["available_bytes"] <= found.probes["memory"]["total_bytes"]
    assert found.openmp_waits == os.environ["OMP_WAIT_POLICY"]
    monkeypatch.setattr(doctor_command, "gather_facts", lambda store: found)
    result = result_of(in_process("doctor", "--store", tmp_path / "store", "--json", capsys=capsys))
    assert result["healthy"] and result["problems"] == 0
    assert {"python", "torch", "device", "cupy", "faiss", "numba", "ray", "store"} <= {
        finding["check"] for finding in result["findings"]
    }
    assert not (tmp_path / "store").exists()


def test_doctor_exits_with_1_on_a_problem(capsys, monkeypatch) -> None:
    answers = {
        name: {"error": "it is broken"} for name in ("torch", "numba", "memory", "store", "kept", "faiss", "ray")
    }
    sick = Facts(python=(3, 11), packages={}, probes={**answers, "cupy": {"error": ""}, "triton": {"error": ""}})
    monkeypatch.setattr(doctor_command, "gather_facts", lambda store: sick)
    done = in_process("doctor", "--json", capsys=capsys)
    assert done.returncode == 1
    result = json.loads(done.stdout)
    assert not result["healthy"]
    assert [finding["status"] for finding in result["findings"]] == [finding.status for finding in examine(sick)]
    assert "pip install --force-reinstall torch" in done.stdout


def test_a_table_in_a_narrow_terminal_loses_no_text() -> None:
    console = Console(file=io.StringIO(), width=30)
    console.print(terminal.table("", ["artifact", "dtype", "size"], [["595eb984d497a3ad", "bfloat16", "126.8 MiB"]]))
    letters = "".join(filter(str.isalnum, console.file.getvalue()))  # type: ignore[attr-defined]
    assert len(letters) == len("artifactdtypesize" + "595eb984d497a3ad" + "bfloat16" + "1268MiB")


def test_characters_missing_from_the_terminals_encoding_are_escaped(tmp_path: Path) -> None:
    store = tmp_path / "\u5e97\u00e9"  # Big5 can encode the first character, but not the second
    store.mkdir()
    environment = {**os.environ, "PYTHONIOENCODING": "big5"}

    def printed(*more: str) -> str:
        command = [sys.executable, "-c", "from workers.cli import main; main()", "ls", "--store", str(store), *more]
        done = subprocess.run(command, capture_output=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr.decode("big5")
        return done.stdout.decode("big5")

    assert "\u5e97\\xe9" in printed()
    assert json.loads(printed("--json"))["store"] == str(store)


def test_table_columns_align_with_escaped_characters() -> None:
    written = TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace")
    rows = [["手册.txt", "1"], ["latin\udcfc", "2"], ["plain", "3"]]
    type(terminal.out)(file=written, width=80).print(terminal.table("", ["source", "size"], rows))
    written.seek(0)
    lines = written.read().splitlines()
    assert "\\u624b\\u518c.txt" in lines[3] and len({len(line) for line in lines}) == 1


@pytest.mark.parametrize("verb", [("generate", "store/0"), ("stream",)])
def test_a_prompt_that_is_not_utf_8_is_refused_with_the_reason(capsys, verb) -> None:
    done = in_process(*verb, "--prompt", "a\udcff", capsys=capsys)
    assert done.returncode == 1 and "--prompt is not UTF-8 text (character 1)" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("build", "--context", "text.txt"),
        ("generate", "store/0", "--prompt", "who?"),
        ("eval", "--text", "text.txt"),
        ("stream", "--prompt", "who?"),
        ("serve", "--local"),
        ("doctor",),
    ],
)
def test_an_empty_model_name_is_refused_and_not_the_demo_model(capsys, arguments) -> None:
    given = [""] if arguments == ("doctor",) else ["--model", ""]
    done = in_process(*arguments, *given, capsys=capsys)
    assert done.returncode == 1 and "a hub id, got ''; give one, or leave it out" in done.stderr


def test_doctor_refuses_weights_without_a_model(capsys) -> None:
    done = in_process("doctor", "--weights", "int4", capsys=capsys)
    assert done.returncode == 1 and "no model was given; name one, or leave it out" in done.stderr


def test_markup_in_printed_text_is_shown_literally(capsys) -> None:
    said = "pip install 'csattn[serve]' [/x] :smile:"
    for show in (terminal.out.print, lambda text: terminal.out.print(terminal.table(text, [text], [[text]]))):
        capsys.readouterr()
        show(said)
        assert said in capsys.readouterr().out


def test_an_answers_whitespace_and_brackets_are_printed_unchanged(monkeypatch, capsys) -> None:
    said = "\tif \u4f60:\n\t\treturn \u3000[/x]\t"

    def answer(*given: Any, on_read: Callable[[int, int], None]) -> None:
        on_read(1, 1)
        for piece in said:
            given[6](piece)

    monkeypatch.setattr(generating, "answer", answer)
    generating.speak(*[cast(Any, None)] * 7, "csattn")
    assert capsys.readouterr().out == f"csattn: {said}\n"


def test_the_wait_for_kernels_is_announced_once(capsys) -> None:
    with install_listener("numba:compile", generating.CompileTimer()) as compiling:
        assert not capsys.readouterr().err
        for kernel in (numba.njit(lambda value: value + 1), numba.njit(lambda value: value + 2)):
            kernel(1)
    assert capsys.readouterr().err == "compiling kernels, once for this machine\n" and compiling.duration > 0


@pytest.mark.parametrize("is_terminal", [True, False])
def test_reading_progress_is_shown_only_on_a_terminal(monkeypatch, is_terminal: bool) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=is_terminal, width=80, _environ={"TERM": "xterm"})
    monkeypatch.setattr(terminal, "err", console)
    with terminal.reading("reading") as show:
        for done in (0, 16, 20):
            show(done, 20)
        after = shown.getvalue()
    assert ("reading" in after and "20 of 20 tokens" in after) == is_terminal
    assert shown.getvalue() == after, "it was gone before what follows"
    assert is_terminal or not after


def test_csattn_without_a_command_prints_the_help(capsys) -> None:
    done = in_process(capsys=capsys)
    assert done.returncode == 2 and "Usage" in done.stdout + done.stderr and "error" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_service_interrupted_before_it_is_ready_exits_with_the_signals_code(
    tmp_path: Path, number: signal.Signals
) -> None:
    command = [
        sys.executable,
        "-c",
        "from workers.cli import main; main()",
        "serve",
        "--local",
        "--json",
        "--port",
        "0",
    ]
    with subprocess.Popen([*command, "--store", str(tmp_path)], stdout=-1, stderr=-1, text=True) as process:
        assert process.stderr is not None and process.stdout is not None
        assert "loading the model" in process.stderr.readline()
        process.send_signal(number)
        assert process.wait(60) == 128 + number
        assert json.loads(process.stdout.read())["error"]["type"] == "Interrupted"


@pytest.mark.parametrize(
    "arguments", [("serve", "--port", "0"), ("build", "--jobs", "jobs.jsonl", "--ray", "local")], ids=lambda of: of[0]
)
def test_an_interrupt_handled_by_ray_exits_with_the_signals_code(
    capsys, tmp_path: Path, monkeypatch, arguments
) -> None:
    """While Ray starts, a signal handler of its own exits the process."""
    (tmp_path / "jobs.jsonl").write_text('{"context": "0.txt"}\n')
    (tmp_path / "0.txt").write_text("A lamp.")
    monkeypatch.chdir(tmp_path)
    for name in ("ray", "ray.serve"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    ray = sys.modules["ray"]
    ray.__spec__, ray.serve = ModuleSpec("ray", None), sys.modules["ray.serve"]
    ray.is_initialized, ray.shutdown = lambda: False, lambda: None
    ray.init = lambda **_: sys.exit(signal.SIGTERM)
    done = in_process(*arguments, "--store", tmp_path / "store", "--json", capsys=capsys)
    assert done.returncode == 143 and "error: interrupted" in done.stderr
    assert json.loads(done.stdout)["error"]["type"] == "Interrupted"


def test_an_interrupt_exits_with_130(capsys, monkeypatch) -> None:
    def interrupted(store):
        raise KeyboardInterrupt

    monkeypatch.setattr(store_commands, "listing", interrupted)
    done = in_process("ls", "--json", capsys=capsys)
    assert done.returncode == 130 and "interrupted" in done.stderr and "build" not in done.stderr
    assert json.loads(done.stdout)["error"]["type"] == "Interrupted"


def test_an_interrupt_during_the_first_imports_exits_with_130() -> None:
    code = """
import sys
class Interrupting:
    def find_spec(name, *_):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting)
from workers.cli import main
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (np, "Unable to allocate"),
        (torch, "you tried to allocate 4611686018427387904 bytes"),
        (MemoryError(), "how much was requested is unknown"),
        (RuntimeError("unable to mmap 538 bytes from file <model>: Cannot allocate memory (12)"), "unable to mmap 538"),
        (RuntimeError("CUDA out of memory. Tried to allocate 9.31 GiB.\nGPU 0 has ..."), "Tried to allocate 9.31 GiB"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "Cannot allocate memory"),
    ],
    ids=["numpy", "torch", "Python", "safetensors", "a GPU", "a memory map"],
)
def test_out_of_memory_is_reported_with_the_reason(capsys, monkeypatch, error, words) -> None:
    def listing(store):
        if isinstance(error, Exception):
            raise error
        error.zeros(1 << 62, dtype=error.uint8)

    monkeypatch.setattr(store_commands, "listing", listing)
    done = in_process("ls", "--json", capsys=capsys)
    assert done.returncode == 1
    assert "not enough memory (" in done.stderr and words in done.stderr and "`csattn doctor`" in done.stderr
    assert json.loads(done.stdout)["error"]["type"] == "MemoryError"


def test_an_unexpected_error_keeps_its_traceback(capsys, monkeypatch) -> None:
    def listing(store):
        raise RuntimeError("sizes of tensors must match")

    monkeypatch.setattr(store_commands, "listing", listing)
    with pytest.raises(RuntimeError, match="sizes of tensors"):
        in_process("ls", capsys=capsys)


def test_version_option_prints_the_version(capsys) -> None:
    done = in_process("--version", capsys=capsys)
    assert (done.returncode, done.stdout) == (0, f"csattn {version.full_version()}\n")
    assert "--version" in in_process("--help", capsys=capsys).stdout


@pytest.mark.parametrize("verb", ["build", "generate", "stream", "eval", "serve"])
def test_help_shows_defaults_that_are_computed_later(capsys, monkeypatch, verb) -> None:
    """Square brackets within a help text would be taken for markup and vanish."""
    monkeypatch.setenv("COLUMNS", "200")
    output = in_process(verb, "--help", capsys=capsys).stdout
    model = "the artifact's" if verb == "generate" else "the installed SmolLM2-135M"
    assert f"[default: ({model})]" in output and "all cores" in output


def test_help_lists_the_placements_with_lookahead_by_default(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    ahead = [placement for placement in ("cpu", "device", "hybrid", "host") if default_lookahead(placement)]
    assert default_lookahead("cpu", rows_on_disk=True) == 1
    output = in_process("generate", "--help", capsys=capsys).stdout
    assert f"1 in placement {', '.join(ahead)} or with rows on disk, else 0" in output


def test_importing_the_command_line_loads_no_heavy_library() -> None:
    program = (
        "import sys; import workers.cli.app, workers.cli.doctor_command, workers.settings, workers.doctor.facts; "
        "print([name for name in ('torch', 'numba', 'faiss', 'numpy', 'ray') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("options", "words"), [(("--local",), "needs fastapi, which"), ((), "needs fastapi, ray, which")]
)
def test_serve_without_its_packages_names_the_missing_ones(capsys, monkeypatch, options, words) -> None:
    found = {"prometheus_client", "uvicorn"}
    monkeypatch.setattr(serving, "find_spec", lambda name: object() if name in found else None)
    done = in_process("serve", *options, capsys=capsys)
    assert done.returncode == 1
    assert words in done.stderr and "pip install" in done.stderr


def test_an_unreachable_ray_cluster_is_reported_at_once(tmp_path: Path) -> None:
    """Ray itself retries for minutes, longer than a process may take in these tests."""
    pytest.importorskip("ray", reason="the package ray is not installed; pip install 'csattn[serve]'")
    done = csattn("serve", "--store", tmp_path, "--port", 0, "--set", "ray.address=127.0.0.1:1")
    assert done.returncode == 1 and "no Ray cluster can be reached" in done.stderr


def test_full_version_has_the_commit_of_a_wheel_or_checkout(tmp_path, monkeypatch) -> None:
    package = tmp_path / "csattn"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.setattr(version.csattn, "__file__", str(package / "__init__.py"))
    monkeypatch.setattr(version, "files", lambda _: package)
    assert version.full_version() == __version__

    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True)
    assert version.full_version() == f"{__version__} (commit {head[:12]})"
    (package / "__init__.py").write_text("changed = 1\n")
    assert version.full_version() == f"{__version__} (commit {head[:12]}-dirty)"

    (package / "COMMIT").write_text("0123456789ab\n")
    assert version.full_version() == f"{__version__} (commit 0123456789ab)"
