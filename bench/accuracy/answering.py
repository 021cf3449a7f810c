"""Greedy answers to questions about one context, by any contender."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.accuracy.contenders import Contender
from csattn.artifact import Artifact
from csattn.models import LoadedModel
from workers.session import Session, csattn_session

FULL = Contender("full", "full")
# How the question is read. Sparse (the harder set-up): only the context is prefilled with full attention; the question
# and the answer use sparse attention. Dense (the easier one): all of the question but its last token is prefilled with
# full attention too, so its rows already hold what it needs from the context.
SET_UPS = ("sparse", "dense")


@dataclass(frozen=True, slots=True)
class Prompt:
    """The token ids of a question, and of the context that is prefilled before it."""

    context: NDArray[np.int32]
    question: NDArray[np.int32]  # at least one

    def set_up(self, question: str) -> "Prompt":
        """Return the same ids, split into context and question for one of `SET_UPS`."""
        if question == "sparse":
            return self
        return Prompt(np.concatenate([self.context, self.question[:-1]]), self.question[-1:])


def answer_all(
    loaded: LoadedModel,
    artifact: Artifact,
    contender: Contender,
    keep: float,
    questions: Sequence[NDArray[np.int32]],
    max_new_tokens: int,
    **options: Any,  # passed to `generate`
) -> list[str]:
    """Return the model's answer to each question; questions do not see each other."""
    placement = "device" if loaded.device.type == "cuda" else "cpu"
    with csattn_session(loaded, artifact, contender.search(keep), contender.selector, placement=placement) as session:
        return [_answer(session, question, max_new_tokens, options) for question in questions]


@torch.inference_mode()
def _answer(session: Session, question: NDArray[np.int32], max_new_tokens: int, options: dict[str, Any]) -> str:
    arguments = session.continue_with(question)
    prompt_len = arguments["input_ids"].shape[1]
    room = session.room_for(prompt_len, max_new_tokens)
    whole = session.loaded.model.generate(**arguments, max_new_tokens=room, do_sample=False, **options)
    return str(session.loaded.tokenizer.decode(whole[0, prompt_len:], skip_special_tokens=True))
