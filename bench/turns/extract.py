"""How fast are answers in JSON of a schema, if the text that the schema fixes is guessed, and if it is not?

    python -m bench.turns.extract [--texts speech,dialogue,novel] [--chars 8000] [--rounds 2] [--json FILE]
                                  [--set engine.placement=device]

Each document is sent with two questions, to a service with drafts and to one without, in turns, so that other load on
the machine affects both alike. Answers are greedy, from the model of the demo. `x` is how many times as fast the tokens
after the first piece of text come. Gate: the same answers.
"""

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.accuracy.texts import find_text, named_texts, sha256_of
from bench.timing import finish, gate, options_parser
from bench.turns.service import Service, ask, serving, user
from workers.serving.drafts import MAX_DRAFT


def _text(most: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": most}


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


PERSON = _object(
    full_name=_text(40),
    profession=_text(40),
    is_mentioned_often={"type": "boolean"},
    quotation_about_the_person=_text(120),
)
QUESTIONS = {
    "Which people occur?": _object(people={"type": "array", "items": PERSON, "minItems": 2, "maxItems": 3}),
    "Summarize.": _object(
        title=_text(60),
        summary_in_one_sentence=_text(200),
        main_points={"type": "array", "items": _text(80), "minItems": 3, "maxItems": 4},
        quotation=_text(160),
    ),
}


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--texts", type=named_texts, default=named_texts("speech,dialogue,novel"))
    parser.add_argument("--chars", type=int, default=8000, help="of a text that are a document")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--set", action="append", default=[], help="setting of both services, KEY=VALUE; may be repeated"
    )
    args = parser.parse_args()
    cases = list[dict[str, Any]]()
    with ExitStack() as stack:
        services = {}
        for most in (MAX_DRAFT, 0):
            store = Path(stack.enter_context(TemporaryDirectory()))
            services[most] = stack.enter_context(serving(store, *args.set, f"engine.draft_tokens={most}"))
        for number in range(args.rounds + 1):  # the first one builds contexts, and compiles
            for name in args.texts:
                text = find_text(name)
                for question, schema in QUESTIONS.items():
                    prompt = f"{text.content()[: args.chars]}\n\n{question}"
                    with_drafts, without = (_ask(service, prompt, schema) for service in services.values())
                    gate(with_drafts[0] == without[0], f"with drafts, the answer to {question!r} about {name} differs")
                    case = {"text": name, "text_sha256": sha256_of(text), "question": question}
                    times = {"tokens": without[1], "seconds": without[2], "seconds_with_drafts": with_drafts[2]}
                    cases += [case | times] if number else []
        accepted = services[MAX_DRAFT].metric("csattn_accepted_tokens_total") / (args.rounds + 1) * args.rounds
    tokens = sum(case["tokens"] for case in cases)
    whole, with_drafts_s = (sum(case[of] for case in cases) for of in ("seconds", "seconds_with_drafts"))
    report = {
        "bench": "turns.extract",
        "set": args.set,
        "tokens": tokens,
        "tokens_per_s": round(tokens / whole, 1),
        "tokens_per_s_with_drafts": round(tokens / with_drafts_s, 1),
        "tokens_a_step": round(tokens / (tokens - accepted), 2),
        "x": round(whole / with_drafts_s, 2),
        "least_x": round(min(case["seconds"] / case["seconds_with_drafts"] for case in cases), 2),
        "cases": cases,
    }
    finish(report, args.json)


def _ask(service: Service, prompt: str, schema: dict[str, Any]) -> tuple[str, int, float]:
    """Return the answer's text, its tokens, and the seconds from its first piece to its end."""
    response_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    with service.client() as client:
        reply = ask(client, [user(prompt)], 300, model=service.model, response_format=response_format)
    gate(len(reply.times_s) > 1, "there is no answer")
    return reply.text, reply.new_tokens, reply.times_s[-1] - reply.times_s[0]


if __name__ == "__main__":
    main()
