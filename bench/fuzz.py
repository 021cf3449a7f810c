"""What happens with damaged artifacts? `python -m bench.fuzz [--seconds 600] [--seed 0] [--json FILE]`

Small artifacts of a model with random weights, with a sketch and with lists, are damaged in one to three ways. In half
of them all hashes are then corrected, as a forger would do. Each one is opened and asked a question, first with all
bytes verified, then without. Gate: it is refused with an error message of csattn, or it answers; if nothing was forged,
verifying finds the damage, or the answer is unchanged. There is no other exception, no signal and no hang. Each try has
a number: `--seed 0 --only 4711` repeats one.
"""

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.fuzz_kinds import damage
from bench.timing import finish, gate, options_parser
from csattn.artifact import open_artifact, verify_artifact
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
HUNG_S = 60.0  # a try takes about 20 ms
LONGEST_SENTENCE = 1000
QUESTION = [7, 8, 9, 10]
CONFIG = SearchConfig(keep=0.1, window_len=16)
FAULT = "fault: "


def build_all(loaded: LoadedModel, store: Path) -> list[Path]:
    """Build artifacts of two texts, each with a sketch and with lists."""
    options = [BuildOptions(), BuildOptions(preset="lists", num_subspaces=4, num_centroids=8)]
    plans = [plan_tokens(tiny.token_ids(CONTEXT_LEN, text), "", of, loaded, "cpu") for text in (0, 1) for of in options]
    return [Path(build_plan(loaded, plan, store).place) for plan in plans]


def ask(loaded: LoadedModel, path: Path, verify: bool) -> list[int]:
    with open_artifact(path, verify="full" if verify else "size") as artifact:
        engine = open_engine(loaded, artifact, CONFIG, max_requests=1, tail_capacity=64, num_threads=1)
        try:
            return answer(engine, loaded, artifact, CONFIG, QUESTION, NUM_TOKENS).token_ids
        finally:
            engine.close()


def outcome(loaded: LoadedModel, path: Path, verify: bool, right: list[int]) -> str:
    """Return `refused`, `equal`, or `other` (another answer than `right`). Lets unexpected exceptions pass."""
    try:
        return "equal" if ask(loaded, path, verify) == right else "other"
    except CsattnError as error:
        said = str(error)
        said.encode()  # it can be printed
        gate(10 < len(said) <= LONGEST_SENTENCE, f"refused by a sentence of {len(said)} characters: {said[:200]!r}")
        return "refused"


def attempt(
    loaded: LoadedModel, artifacts: list[tuple[Path, list[int]]], scratch: Path, seed: int, number: int
) -> tuple[list[str], str]:
    """Make one try; return the kinds of damage and the outcome."""
    rng = random.Random(f"{seed} {number}")
    source, right = rng.choice(artifacts)
    victim = scratch / source.name
    shutil.rmtree(victim, ignore_errors=True)
    shutil.copytree(source, victim)
    kinds, is_forged = damage(victim, [path for path, _ in artifacts if path != source], rng)
    verified, opened = (outcome(loaded, victim, verify, right) for verify in (True, False))
    gate(is_forged or verified != "other", f"{kinds}: verified, and answers otherwise")
    return kinds, f"{'forged' if is_forged else 'damaged'}: {verified} when verified, {opened} when not"


def attempts(
    loaded: LoadedModel, artifacts: list[tuple[Path, list[int]]], scratch: Path, seed: int, numbers: range, pipe: int
) -> None:
    """Make the tries in a child process, writing a JSON line to `told` before each, and another with its outcome."""
    for number in numbers:
        write_line(pipe, number)
        try:
            kinds, outcome_text = attempt(loaded, artifacts, scratch, seed, number)
        except BaseException:
            kinds, outcome_text = [], FAULT + traceback.format_exc()[-700:]
        write_line(pipe, number, kinds, outcome_text)


def write_line(pipe: int, *what: Any) -> None:
    os.write(pipe, json.dumps(what).encode() + b"\n")


def watch(child: int, lines: int, until: float) -> Iterator[tuple[int, list[str], str]]:
    """Yield each try's number, kinds and outcome until the time is over or the child has ended, maybe by a try."""
    waiting, begun = b"", None
    while (left_s := until - time.monotonic()) > 0:
        if not select.select([lines], [], [], min(HUNG_S, left_s))[0]:
            if left_s > HUNG_S:
                yield begun or 0, [], f"{FAULT}nothing came of it in {HUNG_S:.0f} s"
            break
        if not (data := os.read(lines, 1 << 16)):
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if begun is not None:
                yield begun, [], f"{FAULT}it ended the process ({status})"
            return
        *whole, waiting = (waiting + data).split(b"\n")
        for number, *rest in map(json.loads, whole):
            begun = None if rest else number
            if rest:
                yield number, rest[0], rest[1]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="repeat only the try with this number")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a forked child could not use more
    loaded = tiny.loaded()
    outcomes: Counter[str] = Counter()
    tries: Counter[str] = Counter()  # by kind of damage; most tries combine several
    faults: list[str] = []
    first, end = (0, 10**9) if options.only is None else (options.only, options.only + 1)
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        artifacts = [(path, ask(loaded, path, True)) for path in build_all(loaded, scratch / "store")]
        until = time.monotonic() + options.seconds
        while first < end and time.monotonic() < until:
            lines, pipe = os.pipe()
            if (child := os.fork()) == 0:
                attempts(loaded, artifacts, scratch, options.seed, range(first, end), pipe)
                os._exit(0)
            os.close(pipe)
            for number, kinds, outcome_text in watch(child, lines, until):
                first = number + 1
                is_fault = outcome_text.startswith(FAULT)
                outcomes["fault" if is_fault else outcome_text] += 1
                tries.update(set(kinds))
                if is_fault:
                    faults.append(f"--seed {options.seed} --only {number}: {outcome_text}")
                    print(faults[-1], flush=True)
            os.close(lines)
        for path, _ in artifacts:
            verify_artifact(path)  # only copies were damaged
    gate(outcomes.total() > 0, f"nothing was tried in {options.seconds:g} s; give more --seconds")
    result = {"bench": "fuzz", "seed": options.seed, "tries": outcomes.total(), "faults": len(faults)}
    result |= {"by_kind": dict(sorted(tries.items())), "outcomes": dict(outcomes.most_common())}
    finish(result | {"first_faults": faults[:10]}, options.json)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
