"""What becomes of artifacts that were hurt? `python -m bench.fuzz [--seconds 600] [--seed 0] [--json FILE]`

Small ones of a model of random weights, over a sketch and over lists, are hurt in one to three ways, half of them with
all hashes made good again, as a forger would. Each is verified, then opened and asked a question. Gate: a sentence of
ours, or an answer; where nothing was forged, verifying finds it, or the answer is what it was. No other exception, no
signal, nobody left waiting. Each try is a number: `--seed 0 --only 4711` repeats one.
"""

import argparse
import hashlib
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from bench.hostile_requests import places_of
from bench.timing import finish, gate
from csattn.artifact import open_artifact
from csattn.build_options import BuildOptions
from csattn.config import SearchConfig
from csattn.errors import CsattnError
from csattn.models import LoadedModel
from index_build.pipeline import build_plan
from index_build.plan import plan_tokens
from tests import tiny
from workers.engine.answer import answer
from workers.engine.opening import open_engine

CONTEXT_LEN, NUM_TOKENS = 900, 4
HUNG_S = 60.0  # a try takes some 20 ms
LONGEST_SENTENCE = 1000
QUESTION = [7, 8, 9, 10]
CONFIG = SearchConfig(keep=0.1, window_len=16)
FAULT = "fault: "
MANIFEST, MANIFEST_HASH = "manifest.json", "manifest.sha256"


def build_all(loaded: LoadedModel, store: Path) -> list[Path]:
    """Of two texts, over a sketch and over lists."""
    options = [BuildOptions(), BuildOptions(preset="lists", num_subspaces=4, num_centroids=8)]
    plans = [plan_tokens(tiny.token_ids(CONTEXT_LEN, text), of, loaded, "cpu") for text in (0, 1) for of in options]
    return [Path(build_plan(loaded, plan, store).place) for plan in plans]


def hurt(artifact_dir: Path, others: list[Path], rng: random.Random) -> tuple[list[str], bool]:
    """What was done to it, and whether its hashes were made good."""
    kinds = [rng.choice(list(KINDS)) for _ in range(rng.randint(1, 3))]
    for kind in kinds:
        KINDS[kind](artifact_dir, others, rng)
    is_forged = rng.random() < 0.5
    if is_forged:
        reseal(artifact_dir)
    return kinds, is_forged


def some_file(artifact_dir: Path, rng: random.Random) -> Path:
    """A plain one: from a pipe, or a link to a device, this would wait itself."""
    files = sorted(path for path in artifact_dir.iterdir() if path.is_file())
    return rng.choice(files)


def flip_bytes(artifact_dir: Path, others: list[Path], rng: random.Random) -> None:
    """Anywhere, or in the first page, where the header is."""
    path = some_file(artifact_dir, rng)
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 1, 100]) if data else 0):
        data[rng.randrange(rng.choice([len(data), min(len(data), 4096)]))] ^= rng.randrange(1, 256)
    path.write_bytes(data)


def fill_bytes(artifact_dir: Path, others: list[Path], rng: random.Random) -> None:
    """A run of zeros, of ones, or of what reads as NaN, as a lost block of a disk or a bad writer leaves it."""
    path = some_file(artifact_dir, rng)
    data = bytearray(path.read_bytes())
    start = rng.randrange(len(data) + 1)
    end = min(len(data), start + rng.choice([1, 8, 512, 4096, len(data)]))
    data[start:end] = (rng.choice([b"\0", b"\xff", b"\x00\x00\xc0\x7f", b"\x00\x80"]) * len(data))[: end - start]
    path.write_bytes(data)


def cut(artifact_dir: Path, others: list[Path], rng: random.Random) -> None:
    path = some_file(artifact_dir, rng)
    os.truncate(path, rng.choice([0, 7, 4096, rng.randrange(path.stat().st_size + 1)]))


def lengthen(artifact_dir: Path, others: list[Path], rng: random.Random) -> None:
    with some_file(artifact_dir, rng).open("ab") as file:
        file.write(rng.randbytes(rng.choice([1, 64, 4096])))


def swap(artifact_dir: Path, others: list[Path], rng: random.Random) -> None:
    """Two of its files, or one and another artifact's of that name."""
    one, other = some_file(artifact_dir, rng), some_file(artifact_dir, rng)
    source = rng.choice(others) / one.name
    if rng.random() < 0.5 and source.exists():
        shutil.copy(source, one)
    else:
        kept = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(kept)


def remove(artifact_dir: Path, others: list[Path], rng: random.Random) -> None:
    some_file(artifact_dir, rng).unlink()


def replace(artifact_dir: Path, others: list[Path], rng: random.Random) -> None:
    """A file by what is none, or by a link."""
    path = some_file(artifact_dir, rng)
    path.unlink()
    target = rng.choice(["/dev/zero", "/nowhere", path.name, str(rng.choice(others) / path.name)])
    rng.choice([os.mkfifo, os.mkdir, lambda place: os.symlink(target, place)])(path)


def add(artifact_dir: Path, others: list[Path], rng: random.Random) -> None:
    name = rng.choice(["notes.txt", "layer-000.kv.safetensors.new", "layer-999.kv.safetensors", "\u202e", "x" * 200])
    (artifact_dir / name).write_bytes(rng.randbytes(9))


def edit_manifest(artifact_dir: Path, others: list[Path], rng: random.Random) -> None:
    """A value somewhere in it, or a key."""
    path = artifact_dir / MANIFEST
    manifest = read_manifest(path)
    if not (places := list(places_of(manifest))):
        return
    inside, key = rng.choice(places)
    what = rng.random()
    if what < 0.15:
        del inside[key]
    elif what < 0.25 and isinstance(inside, dict):
        inside[rng.choice(["", "files", "x", "spec", "../up"])] = inside.pop(key)
    else:
        inside[key] = other_value(inside[key], rng)
    path.write_text(json.dumps(manifest))


def read_manifest(path: Path) -> Any:
    """None where it is none any more."""
    try:
        return json.loads(path.read_bytes()) if path.is_file() else None
    except (ValueError, RecursionError):
        return None


def other_value(value: Any, rng: random.Random) -> Any:
    values: list[Any] = [
        None,
        True,
        "",
        "x" * 300,
        "\ud800",
        "../../etc",
        -1,
        0,
        1,
        2,
        10**9,
        2**63,
        10**30,
        0.5,
        float("nan"),
        [],
        {},
    ]
    if isinstance(value, int):
        values += [value + 1, value - 1, 2 * value, str(value), float(value)]
    if isinstance(value, str):
        values += [value + "0", value.upper(), value[::-1], [value]]
    return rng.choice(values)


KINDS: dict[str, Callable[[Path, list[Path], random.Random], None]] = {
    make.__name__.replace("_", " "): make
    for make in (flip_bytes, fill_bytes, cut, lengthen, swap, remove, replace, add, edit_manifest)
}


def reseal(artifact_dir: Path) -> None:
    """Let the manifest list what there is, and its hash be right."""
    path, hash_path = artifact_dir / MANIFEST, artifact_dir / MANIFEST_HASH
    manifest = read_manifest(path)
    with suppress(TypeError, KeyError, AttributeError):  # what is no manifest gets its hash alone
        for name, record in manifest["files"].items():
            file = artifact_dir / name
            data = file.read_bytes() if file.is_file() else b""
            record |= {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        path.write_text(json.dumps(manifest))
    if path.is_file() and (hash_path.is_file() or not os.path.lexists(hash_path)):
        hash_path.write_text(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {MANIFEST}\n")


def ask(loaded: LoadedModel, path: Path, verify: bool) -> list[int]:
    with open_artifact(path, verify="full" if verify else "size") as artifact:
        engine = open_engine(loaded, artifact, CONFIG, num_slots=1, tail_capacity=64, num_threads=1)
        try:
            return answer(engine, loaded, artifact, CONFIG, QUESTION, NUM_TOKENS).token_ids
        finally:
            engine.close()


def outcome(loaded: LoadedModel, path: Path, verify: bool, right: list[int]) -> str:
    """`refused`, `equal` or `other`: an answer, but another one. Raises what should not have been raised."""
    try:
        return "equal" if ask(loaded, path, verify) == right else "other"
    except CsattnError as error:
        said = str(error)
        said.encode()  # it can be printed
        gate(10 < len(said) <= LONGEST_SENTENCE, f"refused by a sentence of {len(said)} characters: {said[:200]!r}")
        return "refused"


def attempt(loaded: LoadedModel, artifacts: list[tuple[Path, list[int]]], scratch: Path, seed: int, number: int) -> str:
    """One try: what was done, and what came of it."""
    rng = random.Random(f"{seed} {number}")
    source, right = rng.choice(artifacts)
    victim = scratch / source.name
    shutil.rmtree(victim, ignore_errors=True)
    shutil.copytree(source, victim)
    kinds, is_forged = hurt(victim, [path for path, _ in artifacts if path != source], rng)
    verified, opened = (outcome(loaded, victim, verify, right) for verify in (True, False))
    gate(is_forged or verified != "other", f"{kinds}: verified, and answers otherwise")
    return f"{'forged' if is_forged else 'damaged'}: {verified} when verified, {opened} when not"


def attempts(
    loaded: LoadedModel, artifacts: list[tuple[Path, list[int]]], scratch: Path, seed: int, numbers: range, told: int
) -> None:
    """In a child: a line for each try before it begins, and one with its outcome."""
    for number in numbers:
        os.write(told, f"{number} begins\n".encode())
        try:
            said = attempt(loaded, artifacts, scratch, seed, number)
        except BaseException:
            said = FAULT + traceback.format_exc()[-700:].replace("\n", " | ")
        os.write(told, f"{number} {said}\n".encode())


def watch(child: int, lines: int, until: float) -> Iterator[tuple[int, str]]:
    """Each try's number and outcome, until the time is over or the child has ended: the last may have ended it."""
    waiting, begun = b"", None
    while (left_s := until - time.monotonic()) > 0:
        if not select.select([lines], [], [], min(HUNG_S, left_s))[0]:
            if left_s > HUNG_S:
                yield begun or 0, f"{FAULT}nothing came of it in {HUNG_S:.0f} s"
            break
        if not (data := os.read(lines, 1 << 16)):
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if begun is not None:
                yield begun, f"{FAULT}it ended the process ({status})"
            return
        *whole, waiting = (waiting + data).split(b"\n")
        for line in whole:
            number, _, said = line.decode().partition(" ")
            begun = int(number) if said == "begins" else None
            if begun is None:
                yield int(number), said
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one try")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)  # a child could not use more: they are forked
    loaded = tiny.loaded()
    outcomes: Counter[str] = Counter()
    faults: list[str] = []
    first, end = (0, 10**9) if options.only is None else (options.only, options.only + 1)
    until = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        artifacts = [(path, ask(loaded, path, True)) for path in build_all(loaded, scratch / "store")]
        while first < end and time.monotonic() < until:
            lines, told = os.pipe()
            if (child := os.fork()) == 0:
                attempts(loaded, artifacts, scratch, options.seed, range(first, end), told)
                os._exit(0)
            os.close(told)
            for number, said in watch(child, lines, until):
                first = number + 1
                outcomes[said if not said.startswith(FAULT) else "fault"] += 1
                if said.startswith(FAULT):
                    faults.append(f"--seed {options.seed} --only {number}: {said}")
                    print(faults[-1], flush=True)
            os.close(lines)
    result = {"bench": "fuzz", "seed": options.seed, "tries": outcomes.total(), "faults": len(faults)}
    finish(result | {"outcomes": dict(outcomes.most_common()), "first_faults": faults[:10]}, options.json)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
