"""What drafts save: how fast answers about documents are with and without.

    python -m bench.drafts [--texts speech,dialogue,code] [--chars 12000] [--tokens 160] [--drafts 7,15]
                           [--model M --dtype bfloat16 --weights int4] [--placement hybrid] [--threads N]
                           [--shape llama-3.1-8b --context-len 32768] [--store DIR] [--json FILE]

Each question is answered greedily without drafts, then with drafts of up to so many tokens. Gate: the same tokens.
`x` is how many times as fast the tokens after the first come; the answers to one question follow each other, so that
other load on the machine affects them alike.

With --shape, steps are those of a model of this shape with random weights, over a context of that many tokens. Its next
tokens are replaced by the answers of the model above: so the speed is the shape's, and what repeats a real answer's.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.accuracy.texts import find_text, named_texts, sha256_of
from bench.build import byte_ids, random_model
from bench.records import called
from bench.timing import finish, gate, numbers, options_parser
from csattn.artifact import Artifact, open_artifact
from csattn.config import SearchConfig, preset
from csattn.cpus import available_cpus
from csattn.models import LoadedModel, load_model
from index_build import build_context
from index_build.pipeline import build_artifact
from workers.engine.answer import answer, question_tokens
from workers.engine.gpu.memory import PLACEMENTS
from workers.engine.opening import open_engine
from workers.serving.step_engine import StepEngine, StepResult, StepRow

QUESTIONS = (
    "Summarize the text in a few sentences.",
    "Quote the most important sentence of the text, word for word.",
    "List the main points of the text.",
    "What is it about? Quote the passages that say so.",
    "Which names occur, and what is said about each?",
)


class Replayed:
    """An engine whose request says given tokens, whatever its own next tokens are; otherwise it is the engine given."""

    def __init__(self, engine: StepEngine, said: Sequence[int]) -> None:
        """said: the request's tokens: question and answer."""
        self._engine, self._said, self._num_rows = engine, said, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, rows: Sequence[StepRow]) -> StepResult:
        result, start = self._engine.step(rows), self._num_rows + 1
        self._num_rows += len(rows)
        following = [*self._said[start : start + len(rows)], *[0] * len(rows)]  # what follows the last is not used
        return replace(result, next_ids=np.array(following[: len(rows)]))

    def drop_rows(self, request_slot: int, num_rows: int) -> None:
        self._engine.drop_rows(request_slot, num_rows)
        self._num_rows -= num_rows


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    loaded, cases = load_model(args.model, dtype=args.dtype, weights=args.weights), list[dict[str, Any]]()
    options: dict[str, Any] = {"max_requests": 1, "num_threads": args.threads}
    with ExitStack() as stack:
        timed = stack.enter_context(_engine_of_shape(args, options)) if args.shape else None
        for name in args.texts:
            text = find_text(name)
            built = build_context(loaded, text.content()[: args.chars], args.store)
            placement = "cpu" if args.shape else args.placement
            with (
                open_artifact(built.place) as artifact,
                open_engine(loaded, artifact, SearchConfig(), **options, placement=placement) as engine,
            ):
                _answers(engine, timed, loaded, artifact, QUESTIONS[1], 32, args.drafts)  # compiles, and fills caches
                for question in QUESTIONS:
                    case = {
                        "text": name,
                        "text_sha256": sha256_of(text),
                        "context_len": args.context_len if args.shape else artifact.spec.context_len,
                        "question": question,
                    }
                    found = _answers(engine, timed, loaded, artifact, question, args.tokens, args.drafts)
                    cases += [case | of for of in found]
                    print(json.dumps(cases[-1]), flush=True)
    of_drafts = {most: [case for case in cases if case["draft_tokens"] == most] for most in (0, *args.drafts)}
    seconds = {most: sum(case["seconds"] for case in of) for most, of in of_drafts.items()}
    report = {
        "bench": "drafts",
        "model": called(args.model or "demo"),
        "dtype": args.dtype,
        "weights": args.weights,
        "threads": args.threads,
        "placement": args.placement,
        **({"shape": args.shape} if args.shape else {}),
        "x": {most: round(seconds[0] / seconds[most], 2) for most in args.drafts},
        "least_x": {most: min(case["x"] for case in of_drafts[most]) for most in args.drafts},
        "tokens_a_step": {
            most: round(sum(case["tokens"] for case in of) / sum(case["steps"] for case in of), 2)
            for most, of in of_drafts.items()
        },
        "cases": cases,
    }
    finish(report, args.json)


@contextmanager
def _engine_of_shape(args: argparse.Namespace, options: dict[str, Any]) -> Iterator[StepEngine]:
    """Open an engine of the shape's model, with random weights, over a context of that length."""
    model = random_model(args.shape, args.layers, "cpu" if args.placement == "cpu" else "cuda")
    ids = byte_ids(args.context_len)
    where = {"placement": args.placement, "tail_capacity": 4096}
    with (
        tempfile.TemporaryDirectory() as store,
        open_artifact(build_artifact(model, ids, preset("default"), Path(store)).path) as artifact,
        open_engine(model, artifact, SearchConfig(), **options, **where) as engine,
    ):
        yield engine


def _answers(
    engine: StepEngine,
    timed: StepEngine | None,  # whose steps are timed; None: the engine's own
    loaded: LoadedModel,
    artifact: Artifact,
    question: str,
    num_tokens: int,
    drafts: list[int],
) -> list[dict[str, Any]]:
    """Return the figures of one question's answer without drafts, then with each length of drafts."""
    ids, found, config = question_tokens(loaded, artifact, question), list[dict[str, Any]](), SearchConfig()
    first = answer(engine, loaded, artifact, config, ids, num_tokens, draft_tokens=0)
    for most in (0, *drafts):
        got = first
        if most or timed is not None:
            decodes = engine if timed is None else Replayed(timed, [*ids, *first.token_ids])
            got = answer(decodes, loaded, artifact, config, ids, num_tokens, draft_tokens=most)  # type: ignore[arg-type]
        gate(got.token_ids == first.token_ids, f"with drafts of {most} the answer to {question!r} has other tokens")
        num_after, seconds = len(first.token_ids) - 1, (len(got.token_ids) - 1) / got.tokens_per_s
        found.append({"draft_tokens": most, "tokens": num_after, "steps": got.num_steps, "seconds": round(seconds, 3)})
        found[-1] |= {"x": round(found[0]["seconds"] / seconds, 2)}
    return found


def _arguments() -> argparse.Namespace:
    parser = options_parser(__doc__)
    parser.add_argument("--texts", type=named_texts, default=named_texts("speech,dialogue,code"))
    parser.add_argument("--chars", type=int, default=12000, help="of a text that are its context")
    parser.add_argument("--tokens", type=int, default=160, help="most tokens of an answer")
    parser.add_argument("--drafts", type=numbers, default=[7, 15], help="most tokens of a draft, comma-separated")
    parser.add_argument("--model", help="model directory, .gguf file or hub id [default: the demo model]")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--weights", help="format that linear layers are rounded to: int4 or fp8")
    parser.add_argument("--placement", default="cpu", choices=("cpu", *PLACEMENTS))
    parser.add_argument("--shape", help="published model whose steps are timed, such as llama-3.1-8b")
    parser.add_argument("--layers", type=int, help="layers of the shape to use [default: all]")
    parser.add_argument("--context-len", type=int, default=32768, help="tokens of the shape's context")
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--store", type=Path, default=Path("~/.cache/csattn/bench").expanduser())
    return parser.parse_args()


if __name__ == "__main__":
    main()
