"""Do the tests notice faults? Changes one token of csattn's code at a time, and runs the tests.

python -m bench.mutants [--number 300] [--seed 0] [--only csattn/sketch] [--whole] [--processes 2] [--json FILE]

An operator, a bound or a constant is changed in a copy of the last commit, and the tests of its package run until one
fails; with --whole, all tests run if none of those fails. FILE has the results so far; its mutants are not tested
again. Survivors are listed: each one needs a test, or does not change behaviour. Gate: without a fault, the tests pass.
"""

import argparse
import ast
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue
from threading import Lock
from typing import Any

from bench.timing import finish, gate, options_parser, write_json

ROOT = Path(__file__).parents[1]
PACKAGES = ("csattn", "offload", "index_build", "workers")
TIMEOUT_S = 1200.0  # of a package's tests; a fault that makes them hang counts as noticed
OPERATORS = {
    **{"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="},
    **{"+": "-", "-": "+", "*": "+", "//": "*", "/": "*", "%": "+", "<<": ">>", ">>": "<<", "&": "|", "|": "&"},
    **{"and": "or", "or": "and", "&&": "||", "||": "&&", "min": "max", "max": "min"},
}
_IN_C = re.compile(r"(?<= )(<=|>=|<|>|==|!=|\+|-|&&|\|\|)(?= )|\b(min|max)(?=\()|(?<![\w.\"])(\d+)(?![\w.\"])")
_NO_CODE = re.compile(r"//[^\n]*|/\*.*?\*/|#[^\n]*|\basm\b.*?;|static_assert.*?;", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One token of a file, and the token that replaces it."""

    file: str
    line: int
    at: int  # in the file's text
    before: str
    after: str

    def of(self, text: str) -> str:
        assert text[self.at :].startswith(self.before)
        return text[: self.at] + self.after + text[self.at + len(self.before) :]


def mutants_of(file: Path) -> Iterator[Mutant]:
    """Yield all mutants of a file."""
    text = file.read_text()
    found = in_python(text) if file.suffix == ".py" else in_c(text)
    for at, before in found:
        after = OPERATORS.get(before) or {"True": "False", "False": "True"}.get(before) or str(int(before, 0) + 1)
        yield Mutant(str(file.relative_to(ROOT)), text.count("\n", 0, at) + 1, at, before, after)


def in_python(text: str) -> Iterator[tuple[int, str]]:
    """Yield offset and text of operators and constants in functions, except in annotations and messages."""
    lines = [0]
    for line in text.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    as_bytes = text.encode()

    def place(line: int, column: int) -> int:
        return len(as_bytes[: lines[line - 1] + column].decode())

    def between(left: ast.expr, right: ast.expr, pattern: str) -> Iterator[tuple[int, str]]:
        start, stop = place(left.end_lineno or 0, left.end_col_offset or 0), place(right.lineno, right.col_offset)
        if match := re.search(pattern, text[start:stop]):
            yield start + match.start(), match[0]

    def walk(node: ast.AST) -> Iterator[tuple[int, str]]:
        match node:
            case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom() | ast.AnnAssign():
                return
            case ast.keyword(arg="strict"):  # zip's check: unequal lengths never occur
                return
            case ast.Compare():
                for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
                    yield from between(left, right, r"[<>]=?|==|!=")
            case ast.BinOp():
                yield from between(node.left, node.right, r"//|<<|>>|[-+*/%&|]")
            case ast.BoolOp():
                for left, right in zip(node.values, node.values[1:], strict=False):
                    yield from between(left, right, r"\b(and|or)\b")
            case ast.Call(func=ast.Name(id="min" | "max" as name)):
                yield place(node.lineno, node.col_offset), name
            case ast.Constant(value=bool() | int()):
                yield place(node.lineno, node.col_offset), ast.get_source_segment(text, node) or ""
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                for part in node.body:
                    yield from walk(part)
                return
        for child in ast.iter_child_nodes(node):
            yield from walk(child)

    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    yield from sorted({found for node in functions for found in walk(node)})


def in_c(text: str) -> Iterator[tuple[int, str]]:
    code = _NO_CODE.sub(lambda found: " " * len(found[0]), text)
    yield from ((found.start(), found[0]) for found in _IN_C.finditer(code))


def tests_of(file: str) -> str:
    """Return the folder with the tests of a file's package, or the nearest one above that exists."""
    parts = Path(file).parts[:-1]
    folder = Path("tests", *(parts[1:] if parts[0] == "csattn" else parts))
    while not (ROOT / folder).is_dir():
        folder = folder.parent
    return str(folder)


def notices(checkout: Path, mutant: Mutant, tests: str) -> str | None:
    """Return the test that fails with that fault, or another sign of it; None: the tests pass."""
    file = checkout / mutant.file
    text = file.read_text()
    file.write_text(mutant.of(text))
    try:
        return failure(checkout, tests)
    finally:
        file.write_text(text)


def failure(checkout: Path, tests: str) -> str | None:
    """Return the test that fails, or another sign that they do not pass; None: they pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", tests]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "NUMBA_CACHE_DIR": str(checkout / ".numba")}
    try:
        done = subprocess.run(
            command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "hangs"
    if done.returncode == 0:
        return None
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed[0] if failed else f"pytest exits with {done.returncode}"


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="change only files whose path begins with this")
    parser.add_argument("--whole", action="store_true", help="run all tests if those of the package do not fail")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    files = subprocess.check_output(["git", "ls-files", *PACKAGES], cwd=ROOT, text=True).split()
    files = [name for name in files if name.endswith((".py", ".cu", ".cuh")) and name.startswith(options.only)]
    every = [mutant for name in files for mutant in mutants_of(ROOT / name)]
    chosen = random.Random(options.seed).sample(every, min(options.number, len(every)))
    finish(run(chosen, options), options.json)


def run(chosen: list[Mutant], options: argparse.Namespace) -> dict[str, Any]:
    known = json.loads(options.json.read_text())["mutants"] if options.json and options.json.is_file() else []
    results = {(of["file"], of["at"], of["after"]): of for of in known}
    checkouts: Queue[Path] = Queue()
    writing = Lock()

    def judge(mutant: Mutant) -> None:
        key = mutant.file, mutant.at, mutant.after
        if key in results:
            return
        checkout = checkouts.get()
        try:
            by = notices(checkout, mutant, tests_of(mutant.file))
            if by is None and options.whole:
                by = notices(checkout, mutant, "tests")
        finally:
            checkouts.put(checkout)
        with writing:
            results[key] = {**asdict(mutant), "noticed_by": by}
            if options.json is not None:
                write_json(options.json, summary())
        print(f"{mutant.file}:{mutant.line}: {mutant.before} → {mutant.after}: {by or 'NOT NOTICED'}", flush=True)

    def summary() -> dict[str, Any]:
        noticed = sum(of["noticed_by"] is not None for of in results.values())
        return {"seed": options.seed, "faults": len(results), "noticed": noticed, "mutants": list(results.values())}

    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.processes) as pool:
        for number in range(options.processes):
            checkouts.put(Path(scratch, str(number)))
            subprocess.run(["git", "clone", "-q", str(ROOT), f"{scratch}/{number}"], check=True)
        folders = {tests_of(of.file) for of in chosen if (of.file, of.at, of.after) not in results}
        for tests in sorted(folders | ({"tests"} if folders and options.whole else set())):
            by = failure(Path(scratch, "0"), tests)
            gate(by is None, f"the tests do not pass without a fault either: {by}; mend them first")
        list(pool.map(judge, chosen))
    return summary()


if __name__ == "__main__":
    main()
