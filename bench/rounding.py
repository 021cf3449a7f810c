"""What rounding a model's weights to 8 or 4 bits costs: the KL from its unrounded next-token distributions in float32.

python -m bench.rounding [--model M] [--texts speech,code] [--weights fp8,int4] [--len 2048] [--json FILE]

`--weights bfloat16` computes in bfloat16. Predictions count from a text's 513th token on, because earlier ones have
little context. Gate: there are such tokens.
"""

from typing import Any

import torch
from torch import Tensor

from bench.accuracy.texts import find_text, tokenize
from bench.timing import finish, gate, options_parser
from csattn.models import load_model
from csattn.models.loader import DTYPES

SKIPPED = 512  # first tokens of a text, whose predictions do not count


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--model")
    parser.add_argument("--texts", default="speech,code")
    parser.add_argument("--weights", default="fp8,int4")
    parser.add_argument("--len", type=int, default=2048, help="tokens of each text")
    arguments = parser.parse_args()
    loaded, cases = load_model(arguments.model, "float32"), []
    texts = {name: tokenize(find_text(name), loaded.tokenizer)[: arguments.len] for name in arguments.texts.split(",")}
    for name, token_ids in texts.items():
        gate(
            len(token_ids) > SKIPPED,
            f"{name} has {len(token_ids)} tokens here, and only those after {SKIPPED} count; raise --len",
        )
    exact = {name: log_probs(loaded.model, token_ids) for name, token_ids in texts.items()}
    for weights in arguments.weights.split(","):
        dtype, rounding = (weights, None) if weights in DTYPES else ("float32", weights)
        rounded = load_model(arguments.model, dtype, weights=rounding).model
        for name, token_ids in texts.items():
            cases.append({"text": name, "weights": weights, **distance(exact[name], log_probs(rounded, token_ids))})
            line = "{text:8} {weights:5} KL {kl:.4f}, same most likely token {top1_agreement:.3f}"
            print(line.format(**cases[-1]), flush=True)
    header = {"bench": "rounding", "model": loaded.name, "len": arguments.len, "unjudged": SKIPPED}
    finish({**header, "cases": cases}, arguments.json)


def log_probs(model: Any, token_ids: Any) -> Tensor:
    """Return log-probabilities [num_tokens - SKIPPED, vocab_size]."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor(token_ids).long()[None]).logits[0, SKIPPED:]
    return logits.float().log_softmax(-1)


def distance(exact: Tensor, rounded: Tensor) -> dict[str, float]:
    kl = (exact.exp() * (exact - rounded)).sum(-1).mean()
    same = (exact.argmax(-1) == rounded.argmax(-1)).float().mean()
    return {"kl": round(float(kl), 5), "top1_agreement": round(float(same), 4)}


if __name__ == "__main__":
    main()
