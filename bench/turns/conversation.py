"""What does a turn cost if the client resends the whole conversation, as all clients do, and is the answer the same?

    python -m bench.turns.conversation [--turns 20] [--json FILE]

A document of 30,000 characters is pasted into the first message, and questions about it are asked for twenty turns, by
the `openai` client. Gates: a turn computes at most its own question and a block; its answer is that of one request in
one engine that is never closed; both hold again with `kill -9` after every turn; two branches of a conversation find
the rows that they have in common; a second client with the same document has its first token within 5 % of the first
client's time.
"""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import openai

from bench.timing import end_as_interrupted, finish, gate, options_parser
from bench.turns.service import TEXTS, Reply, ask, assistant, serving, user
from csattn.artifact import open_artifact
from csattn.config import SearchConfig
from csattn.models import load_model
from workers.engine.cpu.engine import CpuEngine
from workers.serving.kept_rows import BLOCK_ROWS
from workers.serving.kept_store import DIRECTORY
from workers.serving.step_engine import StepRow

DOCUMENT = (TEXTS / "speech.txt").read_text()[:30_000]
ABOUT = ("the first paragraph", "the people", "the law", "money", "peace", "work", "the last paragraph")
MAX_TOKENS = 24
BRANCH_AT = 10  # turns


def question(turn: int) -> str:
    asked = f"What does it say about {ABOUT[turn % len(ABOUT)]}? Answer {turn + 1}."
    return f"{DOCUMENT}\n\n{asked}" if turn == 0 else asked


def talk(client: openai.OpenAI, num_turns: int) -> Iterator[tuple[list[Any], Reply]]:
    """Yield, turn by turn, the messages sent and the reply."""
    messages: list[Any] = []
    for turn in range(num_turns):
        messages = [*messages, user(question(turn))]
        reply = ask(client, messages, MAX_TOKENS)
        yield messages, reply
        messages = [*messages, assistant(reply.text)]


def in_one_service(store: Path, num_turns: int) -> tuple[list[tuple[list[Any], Reply]], dict[str, Any]]:
    with serving(store) as service, service.client() as client:
        turns = list(talk(client, num_turns))
        branches = [
            ask(client, [*turns[min(BRANCH_AT, num_turns) - 1][0][:-1], user(text)], MAX_TOKENS)
            for text in ("Who is speaking?", "When was this said, and where?")
        ]
        with service.client() as other:
            second = ask(other, [user(f"{DOCUMENT}\n\nIs there a word about schools?")], MAX_TOKENS)
        written_s = service.wait_until_written()
    before = turns[min(BRANCH_AT, num_turns) - 1][1].prompt_tokens
    for branch in branches:
        gate(branch.cached_tokens >= before - BLOCK_ROWS - 40, f"a branch found {branch.cached_tokens} of {before}")
    first_s = turns[0][1].ttft_s
    gate(second.ttft_s <= 0.05 * first_s, f"the second client waited {second.ttft_s:.2f} s, the first {first_s:.2f}")
    return turns, {
        "first_ttft_s": round(first_s, 2),
        "second_client_ttft_s": round(second.ttft_s, 3),
        "second_client_share": round(second.ttft_s / first_s, 4),
        "branches_computed": [branch.computed for branch in branches],
        "written_behind_s": round(written_s, 3),
    }


def with_kills(store: Path, num_turns: int) -> tuple[list[tuple[list[Any], Reply]], list[float]]:
    """Hold the conversation with a service that is killed after each turn, once its kept rows are written.

    By then, a client has hardly read the answer.
    """
    turns: list[tuple[list[Any], Reply]] = []
    written: list[float] = []
    messages: list[Any] = []
    for turn in range(num_turns):
        with serving(store) as service, service.client() as client:
            messages = [*messages, user(question(turn))]
            reply = ask(client, messages, MAX_TOKENS)
            written.append(service.wait_until_written())
            service.kill()
        turns.append((messages, reply))
        messages = [*messages, assistant(reply.text)]
    return turns, written


def never_left(store: Path, turns: list[tuple[list[Any], Reply]]) -> list[str]:
    """Return the answers of a single request in one engine, which is fed the tokens that each turn adds."""
    loaded, answers = load_model(None, "float32"), []
    [path] = (store / DIRECTORY).glob("*/*/manifest.json")
    with ExitStack() as stack:
        artifact = stack.enter_context(open_artifact(path.parent))
        engine = stack.enter_context(CpuEngine(loaded, max_rows=16, max_requests=1, tail_capacity=2048))
        engine.add_context(0, artifact)
        engine.open(0, 0, SearchConfig(), "csattn")
        has = artifact.token_ids.tolist()
        for messages, _ in turns:
            text = loaded.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = loaded.tokenizer(text, add_special_tokens=False).input_ids
            gate(ids[: len(has)] == has, "a turn does not begin with what was said before")
            fresh = ids[len(has) :]
            said: list[int] = []
            for start in range(0, len(fresh), 16):
                next_id = engine.step([StepRow(0, i) for i in fresh[start : start + 16]]).next_ids[-1]
            while int(next_id) not in loaded.stop_ids and len(said) < MAX_TOKENS:
                said.append(int(next_id))
                if len(said) < MAX_TOKENS:
                    next_id = engine.step([StepRow(0, said[-1])]).next_ids[-1]
            answers.append(loaded.tokenizer.decode(said, skip_special_tokens=True))
            has = ids + said[: MAX_TOKENS - 1]
    return answers


def require_cheap(turns: list[tuple[list[Any], Reply]], name: str) -> dict[str, Any]:
    """Raise GateError unless each turn computes at most its own question and a block; return the counts."""
    replies = [reply for _, reply in turns]
    own = [0] + [after.prompt_tokens - before.prompt_tokens - before.new_tokens for before, after in pairwise(replies)]
    for turn, (reply, tokens) in enumerate(zip(replies, own, strict=True)):
        if turn:
            message = f"{name}: turn {turn + 1} computed {reply.computed} tokens, and its own are {tokens}"
            gate(reply.computed <= tokens + BLOCK_ROWS + 1, message)
    sent = [reply.prompt_tokens for reply in replies]
    computed = [reply.computed for reply in replies]
    return {
        "prompt_tokens": sent,
        "own_tokens": own,
        "computed_tokens": computed,
        "ttft_s": [round(reply.ttft_s, 2) for reply in replies],
        "times_fewer": round(sum(sent) / sum(computed), 1),
        "times_fewer_after_the_first": round(sum(sent[1:]) / max(1, sum(computed[1:])), 1),
    }


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--turns", type=int, default=20)
    options = parser.parse_args()
    end_as_interrupted()
    with tempfile.TemporaryDirectory() as directory:
        one, other = Path(directory, "one"), Path(directory, "other")
        turns, beside = in_one_service(one, options.turns)
        said = [reply.text for _, reply in turns]
        cheap = require_cheap(turns, "one service")
        print(f"one service: {cheap}", flush=True)
        gate(never_left(one, turns) == said, "a session that never left says something else")
        killed, written = with_kills(other, options.turns)
        gate([reply.text for _, reply in killed] == said, "answers are others after kills")
        after_kills = require_cheap(killed, "killed")
    least = 20 if options.turns >= 20 else 0
    gate(cheap["times_fewer_after_the_first"] >= least, f"only {cheap['times_fewer_after_the_first']} times fewer")
    finish(
        {
            "bench": "turns.conversation",
            "document_chars": len(DOCUMENT),
            "turns": options.turns,
            "one_service": {**cheap, **beside},
            "killed_between_turns": {**after_kills, "written_behind_s": float(np.round(np.median(written), 3))},
            "wrong_answers": 0,
        },
        options.json,
    )


if __name__ == "__main__":
    main()
