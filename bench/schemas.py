"""Do answers conform to the JSON schema of their request, and how many schemas are refused?

    python -m bench.schemas --url URL --model MODEL@CONTEXT [--num 300] [--seed 0] [--key KEY] [--json FILE]

Gate: every answer that ended by itself is JSON that conforms to its schema, including formats; at most one in twenty
was cut off by max_tokens, and at most one in twenty schemas was refused. `logit_bias` favours characters that end
strings, lists and objects, so that answers of models with random weights, the hardest case, come to an end.
"""

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx2
import openai
from jsonschema import Draft202012Validator

from bench.schema_cases import Schema, schema_cases
from bench.timing import finish, gate, options_parser

MAX_TOKENS = 4000
BIAS = {'"': 6, "}": 4, "]": 4, "<think>": -100}  # used for those that are one token


@dataclass
class Report:
    """The outcomes for all schemas."""

    counts: Counter[str] = field(default_factory=Counter)  # valid, invalid, cut, refused
    faults: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--num", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--key", default="none")
    args = parser.parse_args()
    report = ask_all(args.url, args.model, args.num, args.seed, args.key)
    print(*report.refusals, sep="\n")
    require_sound(report)
    finish({"bench": "schemas", "num": args.num, "seed": args.seed, **report.counts}, args.json)


def require_sound(report: Report) -> None:
    num = report.counts.total()
    gate(not report.faults, "\n".join(report.faults[:5]))
    gate(report.counts["cut"] <= num / 20, f"{report.counts['cut']} of {num} answers were cut off")
    gate(report.counts["refused"] <= num / 20, "\n".join(report.refusals))


def ask_all(url: str, model: str, num: int, seed: int, key: str = "none", num_at_once: int = 16) -> Report:
    report = Report()
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=5, timeout=600) as client:
        bias = _endings(url, key)

        def ask(number: int, schema: Schema) -> None:
            outcome, detail = _ask(client, model, schema, seed + number, bias)
            report.counts[outcome] += 1
            if outcome == "invalid":
                report.faults.append(f"{json.dumps(schema)}: {detail}")
            elif outcome == "refused":
                report.refusals.append(f"{json.dumps(schema)}: {detail}")

        with ThreadPoolExecutor(num_at_once) as pool:
            for done in [pool.submit(ask, *case) for case in enumerate(schema_cases(num, seed))]:
                done.result()
    return report


def _ask(client: openai.OpenAI, model: str, schema: Schema, seed: int, bias: dict[str, int]) -> tuple[str, str]:
    form: Any = {"type": "json_schema", "json_schema": {"name": "case", "strict": True, "schema": schema}}
    try:
        answer = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Answer in JSON."}], response_format=form,
            temperature=1.0, seed=seed, max_tokens=MAX_TOKENS, logit_bias=bias,
        )  # fmt: skip
    except openai.BadRequestError as error:
        return "refused", error.message
    text = answer.choices[0].message.content or ""
    if answer.choices[0].finish_reason == "length":
        return "cut", text
    try:
        value = json.loads(text)
    except ValueError:
        return "invalid", text
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    fault = next(validator.iter_errors(value), None)
    return ("valid", text) if fault is None else ("invalid", f"{text!r}: {fault.message}")


def _endings(url: str, key: str) -> dict[str, int]:
    """Return a logit bias towards tokens that end strings, lists and objects, and against thinking."""
    bias = {}
    for text, value in BIAS.items():
        reply = httpx2.post(f"{url}/tokenize", json={"prompt": text}, headers={"Authorization": f"Bearer {key}"})
        token_ids = reply.raise_for_status().json()["tokens"]
        if len(token_ids) == 1:
            bias[str(token_ids[0])] = value
    return bias


if __name__ == "__main__":
    main()
