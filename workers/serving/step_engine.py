"""What the scheduler asks of an engine: steps of rows that belong to any requests, over any contexts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from csattn.artifact import Artifact
from csattn.config import SearchConfig
from workers.serving.messages import Selector

NO_CONTEXT = -1  # in place of a context's number: the request begins with nothing


Allowed = Callable[[], NDArray[np.bool_]]  # gives [vocab_size]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How the token after a row is drawn; see `draw_reference`."""

    temperature: float  # above 0
    top_p: float
    top_k: int  # 0: all; 1: the likeliest, and the other numbers do not count
    min_p: float  # at most 1
    at: float  # in [0, 1): which of those that may be
    repeated: NDArray[np.bool_] | None = None  # [vocab_size]: tokens whose logits the penalty makes less; None: none
    penalty: float = 1.0  # divides logits above 0, multiplies others
    added_ids: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))  # each token once
    added: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))  # then to their logits
    # begins to find which of so many tokens may be drawn; what is returned gives them. Raises nothing, and neither does
    # that. Called once, when the step is under way: whoever finds is not to hold it up
    allowed: Callable[[int], Allowed] | None = None
    num_top: int | None = None  # how many likely tokens are told beside the drawn one; None: no logits


@dataclass(frozen=True, slots=True)
class StepRow:
    """A token of the request in that slot; several tokens of one request may stand in one step, in order."""

    slot: int
    token_id: int
    asks: bool = True  # what follows it; of others a step's next_ids and logits mean nothing
    draw: Draw | None = None  # of an engine that draws: None is the likeliest token


@dataclass(frozen=True, slots=True)
class Likelihood:
    """How likely a token was, before its logit was changed."""

    logit: float
    log_total: float  # what to take off a logit for its log-probability
    top: tuple[tuple[int, float], ...]  # the likeliest tokens and their logits, by (logit descending, id ascending)


@dataclass(frozen=True, slots=True)
class Fidelity:
    """One layer's selection for one row, against exact attention; means over heads."""

    recall: float  # share of the exact top-k that was chosen
    mass: float  # share of exact attention's weight on rows that were read


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of a step, row by row."""

    next_ids: NDArray[np.int64]  # [num_rows]: likeliest, or drawn; -1 where NaN or infinity is the greatest logit
    logits: NDArray[np.float32] | None  # [num_rows, vocab_size], where asked for; valid until the next step
    fidelity: Fidelity | None = None  # of the row that was watched
    likelihoods: Sequence[Likelihood | None] = ()  # [num_rows], of an engine that draws: of drawn tokens, where asked


@dataclass(frozen=True, slots=True)
class Reading:
    """What a request has attended to so far."""

    selector: str
    rows: float  # of context and tail, a token: mean over tokens, layers and heads


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounts:
    """What an engine has done since it was made."""

    search_s: float = 0.0
    attend_s: float = 0.0
    slot_lookups: int = 0  # rows asked of the slot cache
    slot_hits: int = 0
    kv_bytes: int = 0  # of loaded contexts, wherever they lie
    index_bytes: int = 0
    device_bytes: int = 0


class StepEngine(Protocol):
    """Used by one thread, but for `preparation`.

    Results do not depend on what else is in a step, nor on how a question is cut into steps.
    """

    draws: bool  # tokens, as rows ask; else whoever wants one drawn asks for logits
    max_rows: int  # of one step
    num_slots: int  # requests at the same time
    tail_capacity: int  # rows of one request's own, question and answer
    max_positions: int
    num_layers: int

    def add_context(self, context_id: int, artifact: Artifact, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Load; the artifact stays open until `remove_context`. Raises a sentence where it does not fit.

        meanwhile: called now and then where it takes long; it may do all but load and remove contexts.
        """
        ...

    def remove_context(self, context_id: int) -> None:
        """No slot may be open on it."""
        ...

    def preparation(self, context_id: int, config: SearchConfig, selector: Selector) -> Callable[[], None] | None:
        """What such a request needs of its context that is not made yet, and may take as long as a prefill.

        Asked and run on any thread, while steps go on and the context stays loaded; run twice, it is made once.
        None where there is nothing to make. Raises ConfigError for what this engine cannot do.
        """
        ...

    def open(self, slot: int, context_id: int, config: SearchConfig, selector: Selector) -> None:
        """Begin a request with an empty tail. What is not prepared yet is made now, and steps wait for it.

        Raises ConfigError for what this engine cannot do.
        """
        ...

    def write_rows(self, slot: int, rows: Tensor) -> None:
        """Lengthen its tail by rows that `read_rows` gave of a request that began alike, instead of feeding the tokens.

        rows: [num_layers, num_kv_heads, num_rows, 2, head_dim], not written to before the next step is over.
        """
        ...

    def read_rows(self, slot: int, start: int, stop: int) -> Callable[[], Tensor]:
        """Begin to copy these rows of its tail. What is returned may be called on any thread, waits for the copy, and
        gives it, laid out as `write_rows` takes it."""
        ...

    def step(
        self,
        rows: Sequence[StepRow],
        want_logits: bool = False,
        watch: tuple[int, int] | None = None,  # row and layer whose fidelity is measured
    ) -> StepResult: ...

    def reading(self, slot: int) -> Reading: ...

    def close_slot(self, slot: int) -> None: ...

    def counts(self) -> EngineCounts: ...

    def close(self) -> None: ...
