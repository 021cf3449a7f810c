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
# Where the question goes. Sparse: only the context is prefilled with full attention, the question is read by sparse
# attention as the answer is. Dense: the question is prefilled too, all but its last token, so that what it needs of
# the context is in it already. The hard one, and the easy one.
SET_UPS = ("sparse", "dense")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a question, and of what is prefilled before it."""

    context: NDArray[np.int32]
    question: NDArray[np.int32]  # at least one

    def set_up(self, question: str) -> "Prompt":
        """The same ids, prefilled as one of `SET_UPS` says."""
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
    **options: Any,  # of `generate`
) -> list[str]:
    """What the model says after each question, as if it were the only one."""
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
