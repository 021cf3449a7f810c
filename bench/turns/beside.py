"""How much does a long prompt slow down requests that are decoding, and how much do they slow down the prompt?

    python -m bench.turns.beside [--prompt-tokens 4096] [--decoding 4] [--json FILE]
    python -m bench.turns.beside --model llama-3.1-8b --prompt-tokens 32768 --decoding 8 --set engine.placement=hybrid

Requests decode endlessly; then a new prompt arrives, of which no rows are kept. Reported: p50 and p99 of the time
between two tokens of these requests, without the prompt and during its prefill (including the intervals in which it
arrives and ends), and the longest such time; and the prompt's time to first token, alone and among the requests. Gate:
all requests decode until they are stopped. A model given by its shape has random weights and tokens that are bytes.
"""

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.accuracy.texts import find_text
from bench.served_model import saved_model
from bench.timing import end_as_interrupted, finish, gate, options_parser
from bench.turns.service import MODEL, NEVER_ENDS, Service, ask, serving, user
from csattn.models import load_model
from tests.tiny import byte_tokenizer

LETTERS = dict.fromkeys(map(str, range(33, 59)), 100)  # logit bias of a byte model: every token is text at once
QUIET_TOKENS = 150  # of each decoding request, before the prompt arrives


class Decoder(threading.Thread):
    """A request that decodes until `ends` is set."""

    def __init__(self, service: Service, number: int) -> None:
        super().__init__()
        self._service, self._number = service, number
        self._bias = NEVER_ENDS if service.model == MODEL else LETTERS
        self.times_s: list[float] = []
        self.ends = threading.Event()

    def run(self) -> None:
        with self._service.client() as client:
            create: Any = client.chat.completions.create
            with create(
                model=self._service.model,
                messages=[user(f"Count from {self._number} on.")],
                max_tokens=1900,
                stream=True,
                logprobs=True,
                logit_bias=self._bias,
            ) as stream:
                for chunk in stream:
                    if chunk.choices and chunk.choices[0].logprobs:
                        self.times_s += [time.perf_counter()] * len(chunk.choices[0].logprobs.content or [])
                    if self.ends.is_set():
                        return


def gaps_ms(decoders: list[Decoder], since: float, until: float) -> dict[str, float]:
    """Return percentiles of the times between tokens that ended in (since, until]."""
    gaps = []
    for decoder in decoders:
        times = np.array(decoder.times_s)
        gaps.append(np.diff(times)[(times[1:] > since) & (times[1:] <= until)])
    gate(all(len(of) for of in gaps), "a request starves")
    p50, p99 = np.percentile(np.concatenate(gaps), [50, 99]) * 1e3
    return {"p50_ms": round(p50, 1), "p99_ms": round(p99, 1), "most_ms": round(float(max(map(max, gaps))) * 1e3, 1)}


def until_all(decoders: list[Decoder], is_so: Callable[[Decoder], bool]) -> float:
    """Wait until is_so holds for all decoders; return the time. Raises GateError if one has ended before."""
    while waiting := [decoder for decoder in decoders if not is_so(decoder)]:
        gate(all(decoder.is_alive() for decoder in waiting), "a request that decodes has ended before it was told to")
        time.sleep(0.01)
    return time.perf_counter()


def cut_prompts(tokenizer: Any, num_tokens: int) -> list[str]:
    """Return three prompts of as many tokens, so that their prefills take the same time."""
    ids = tokenizer(find_text("manual").content()).input_ids
    gate(
        len(ids) >= 3 * num_tokens,
        f"the manual has {len(ids)} tokens, and three prompts of {num_tokens} are needed; give a smaller "
        "--prompt-tokens",
    )
    return [tokenizer.decode(ids[i * num_tokens : (i + 1) * num_tokens]) for i in range(3)]


def run(service: Service, prompts: list[str], num_decoding: int) -> dict[str, Any]:
    with service.client() as client:
        ask(client, [user(prompts[0])], 1, model=service.model)  # warm-up: compiles kernels
        alone = ask(client, [user(prompts[1])], 1, model=service.model)
        decoders = [Decoder(service, number) for number in range(num_decoding)]
        for decoder in decoders:
            decoder.start()
        started = until_all(decoders, lambda decoder: len(decoder.times_s) >= 10)
        came = until_all(decoders, lambda decoder: len(decoder.times_s) >= QUIET_TOKENS)
        beside = ask(client, [user(prompts[2])], 1, model=service.model)
        answered = time.perf_counter()
        ended = until_all(decoders, lambda decoder: decoder.times_s[-1] > answered)
    for decoder in decoders:
        decoder.ends.set()
    for decoder in decoders:
        decoder.join()
    before, during = gaps_ms(decoders, started, came), gaps_ms(decoders, came, ended)
    gate(alone.cached_tokens == beside.cached_tokens == 0, "the prompt is not new")
    return {
        "prompt_tokens": beside.prompt_tokens,
        "decoding": num_decoding,
        "between_tokens": before,
        "between_tokens_beside_the_prompt": during,
        "p99_ratio": round(during["p99_ms"] / before["p99_ms"], 2),
        "ttft_alone_s": round(alone.ttft_s, 2),
        "ttft_beside_s": round(beside.ttft_s, 2),
        "ttft_ratio": round(beside.ttft_s / alone.ttft_s, 2),
    }


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--decoding", type=int, default=4)
    parser.add_argument("--model", default="demo", help="demo, tiny, or a model shape such as llama-3.1-8b")
    parser.add_argument("--layers", type=int, help="layers of the shape to use [default: all]")
    parser.add_argument("--set", action="append", default=[], help="setting of the service, KEY=VALUE; may be repeated")
    options = parser.parse_args()
    end_as_interrupted()
    tokenizer = load_model().tokenizer if options.model == "demo" else byte_tokenizer()
    prompts = cut_prompts(tokenizer, options.prompt_tokens)
    with tempfile.TemporaryDirectory() as directory:
        path, dtype = saved_model(options.model, options.layers, Path(directory))
        settings = options.set if path is None else [f"build.dtype={dtype}", *options.set]
        with serving(Path(directory, "store"), *settings, model=path) as service:
            result = run(service, prompts, options.decoding)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    header = {"bench": "turns.beside", "model": options.model, "device": device}
    finish({**header, **result, "settings": settings}, options.json)


if __name__ == "__main__":
    main()
