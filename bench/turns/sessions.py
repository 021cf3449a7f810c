"""What do sessions cost that begin alike and go on differently, as those of an agent's program do?

    python -m bench.turns.sessions [--sessions 4] [--json FILE]

The sessions come one after another, with the `openai` client and the demo model. All of them begin with 22,000
characters of a speech, in one of two places: as instructions (the system message), or as a document in the first
message. Then each has a task of its own, 3600 characters of another text. Gates: once a context ends where the sessions
part, which is from the second session on with instructions and from the third with a document, a session computes its
own task and less than a step of contexts more; with instructions, its answer is that of a service without the others.
"""

import tempfile
from pathlib import Path
from typing import Any

from bench.timing import end_as_interrupted, finish, gate, options_parser
from bench.turns.service import TEXTS, Reply, ask, serving, user
from csattn.models import load_model
from workers.serving.kept_rows import BLOCK_ROWS
from workers.serving.prompt_contexts import STEP

COMMON = (TEXTS / "speech.txt").read_text()[:22_000]
TASKS = (TEXTS / "novel.txt").read_text()
TASK_CHARS, MAX_TOKENS = 3600, 24
FIRST_CHEAP = {"instructions": 1, "document": 2}  # by place of the common text, number of that session


def messages(place: str, session: int) -> list[Any]:
    task = f"{TASKS[session * TASK_CHARS :][:TASK_CHARS]}\n\nWho is speaking here?"
    if place == "instructions":
        return [{"role": "system", "content": COMMON}, user(task)]
    return [user(f"{COMMON}\n\n{task}")]


def measure(place: str, num_sessions: int, tokenizer: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as store, serving(Path(store)) as service, service.client() as client:
        replies = [ask(client, messages(place, number), MAX_TOKENS) for number in range(num_sessions)]
    case = {
        "common_text": place,
        "prompt_tokens": [reply.prompt_tokens for reply in replies],
        "computed_tokens": [reply.computed for reply in replies],
        "ttft_s": [round(reply.ttft_s, 2) for reply in replies],
    }
    print(case, flush=True)
    for number in range(FIRST_CHEAP[place], num_sessions):
        reply, others = replies[number], own_tokens(place, number, tokenizer)
        gate(reply.computed < others + STEP + BLOCK_ROWS, f"session {number + 1} computed {reply.computed} tokens")
    if place == "instructions":
        gate(alone(place, num_sessions - 1).text == replies[-1].text, "an answer depends on the sessions before it")
    return case


def own_tokens(place: str, number: int, tokenizer: Any) -> int:
    """The tokens of a session's own text, and of the template around it."""
    text = messages(place, number)[-1]["content"].removeprefix(COMMON)
    return len(tokenizer.apply_chat_template([user(text)], add_generation_prompt=True, return_dict=True)["input_ids"])


def alone(place: str, number: int) -> Reply:
    with tempfile.TemporaryDirectory() as store, serving(Path(store)) as service, service.client() as client:
        return ask(client, messages(place, number), MAX_TOKENS)


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--sessions", type=int, default=4)
    options = parser.parse_args()
    end_as_interrupted()
    tokenizer = load_model().tokenizer
    cases = [measure(place, options.sessions, tokenizer) for place in FIRST_CHEAP]
    finish({"bench": "turns.sessions", "common_chars": len(COMMON), "cases": cases, "wrong_answers": 0}, options.json)


if __name__ == "__main__":
    main()
