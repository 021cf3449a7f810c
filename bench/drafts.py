"""What drafts save: how fast answers about documents are with and without.

    python -m bench.drafts [--texts speech,dialogue,code] [--chars 12000] [--tokens 160] [--drafts 3,7]
                           [--model M --dtype bfloat16 --weights int4] [--threads N] [--store DIR] [--json FILE]

Each question is answered greedily without drafts, then with drafts of up to so many tokens. Gate: the same tokens.
`x` is how many times as fast the tokens after the first come; the answers to one question follow each other, so that
other load on the machine affects them alike.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from bench.accuracy.texts import find_text, named_texts, sha256_of
from bench.records import called
from bench.timing import finish, gate, numbers
from csattn.artifact import Artifact, open_artifact
from csattn.config import SearchConfig
from csattn.cpus import available_cpus
from csattn.models import LoadedModel, load_model
from index_build import build_context
from workers.engine.answer import answer, question_tokens
from workers.engine.cpu.engine import CpuEngine

QUESTIONS = (
    "Summarize the text in a few sentences.",
    "Quote the most important sentence of the text, word for word.",
    "List the main points of the text.",
    "What is it about? Quote the passages that say so.",
    "Which names occur, and what is said about each?",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=named_texts, default=named_texts("speech,dialogue,code"))
    parser.add_argument("--chars", type=int, default=12000, help="of a text that are its context")
    parser.add_argument("--tokens", type=int, default=160, help="most tokens of an answer")
    parser.add_argument("--drafts", type=numbers, default=[3, 7], help="most tokens of a draft, comma-separated")
    parser.add_argument("--model", help="model directory, .gguf file or hub id [default: the demo model]")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--weights", help="format that linear layers are rounded to: int4 or fp8")
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--store", type=Path, default=Path("~/.cache/csattn/bench").expanduser())
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    loaded, cases = load_model(args.model, dtype=args.dtype, weights=args.weights), list[dict[str, Any]]()
    for name in args.texts:
        text = find_text(name)
        built = build_context(loaded, text.content()[: args.chars], args.store)
        with (
            open_artifact(built.place) as artifact,
            CpuEngine(loaded, max_requests=1, num_threads=args.threads) as engine,
        ):
            engine.add_context(0, artifact)
            _answers(engine, loaded, artifact, QUESTIONS[1], 32, args.drafts)  # compiles, and fills caches
            for question in QUESTIONS:
                case = {
                    "text": name,
                    "text_sha256": sha256_of(text),
                    "context_len": artifact.spec.context_len,
                    "question": question,
                }
                cases += [case | of for of in _answers(engine, loaded, artifact, question, args.tokens, args.drafts)]
                print(json.dumps(cases[-1]), flush=True)
    of_drafts = {most: [case for case in cases if case["draft_tokens"] == most] for most in (0, *args.drafts)}
    seconds = {most: sum(case["seconds"] for case in of) for most, of in of_drafts.items()}
    report = {
        "bench": "drafts",
        "model": called(args.model or "demo"),
        "dtype": args.dtype,
        "weights": args.weights,
        "threads": args.threads,
        "x": {most: round(seconds[0] / seconds[most], 2) for most in args.drafts},
        "least_x": {most: min(case["x"] for case in of_drafts[most]) for most in args.drafts},
        "tokens_a_step": {
            most: round(sum(case["tokens"] for case in of) / sum(case["steps"] for case in of), 2)
            for most, of in of_drafts.items()
        },
        "cases": cases,
    }
    finish(report, args.json)


def _answers(
    engine: CpuEngine, loaded: LoadedModel, artifact: Artifact, question: str, num_tokens: int, drafts: list[int]
) -> list[dict[str, Any]]:
    """Return the figures of one question's answer without drafts, then with each length of drafts."""
    ids, found, first = question_tokens(loaded, artifact, question), list[dict[str, Any]](), list[int]()
    for most in (0, *drafts):
        got = answer(engine, loaded, artifact, SearchConfig(), ids, num_tokens, draft_tokens=most)
        first = first or got.token_ids
        gate(got.token_ids == first, f"with drafts of {most} the answer to {question!r} has other tokens")
        num_after, seconds = len(first) - 1, (len(got.token_ids) - 1) / got.tokens_per_s
        found.append({"draft_tokens": most, "tokens": num_after, "steps": got.num_steps, "seconds": round(seconds, 3)})
        found[-1] |= {"x": round(found[0]["seconds"] / seconds, 2)}
    return found


if __name__ == "__main__":
    main()
