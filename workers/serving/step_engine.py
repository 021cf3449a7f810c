"""The interface of an engine to the scheduler: decode steps whose rows belong to any requests, over any contexts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from csattn.artifact import Artifact
from csattn.config import SearchConfig
from csattn.selector_names import SelectorName

NO_CONTEXT = -1  # context_id of a request without a context


Allowed = Callable[[], NDArray[np.bool_]]  # returns [vocab_size]: whether each token may be drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawSpec:
    """How to sample the token that follows a row; `draw_reference` is the definition."""

    temperature: float  # above 0
    top_p: float
    top_k: int  # 0: all; 1: the argmax, for which temperature, top_p, min_p and at are ignored
    min_p: float  # at most 1
    at: float  # in [0, 1): the uniform variate, a place in the cumulative distribution of the kept tokens
    repeated: NDArray[np.bool_] | None = None  # [vocab_size]: tokens that `penalty` applies to; None: none
    penalty: float = 1.0  # repetition penalty: divides logits above 0, multiplies others
    added_ids: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))  # each token once
    added: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))  # to logits, after the penalty
    # Takes vocab_size, starts to compute which tokens may be drawn, and returns a function that waits for the result.
    # Neither raises. Called once, while the step is under way, so that the computation does not hold the step up.
    allowed: Callable[[int], Allowed] | None = None
    num_top: int | None = None  # how many of the most likely tokens to report with the drawn one; None: no logprobs


@dataclass(frozen=True, slots=True)
class StepRow:
    """An input token of an open request. A step may have several tokens of one request, in order."""

    request_slot: int
    token_id: int
    wants_token: bool = True  # the next token is wanted; of other rows, next_ids and logits of the result are undefined
    is_draft: bool = False  # the token is a guess, whose row may be dropped; the request has no other rows after it
    draw: DrawSpec | None = None  # for an engine with `draws`; None: take the argmax


@dataclass(frozen=True, slots=True)
class Likelihood:
    """How likely a token was, before penalties and biases changed its logit."""

    logit: float
    log_total: float  # log-sum-exp of all logits: a logit less this is a log-probability
    top: tuple[tuple[int, float], ...]  # the most likely tokens and their logits, by (logit descending, id ascending)


@dataclass(frozen=True, slots=True)
class Fidelity:
    """One layer's selection for one row, compared with exact attention; means over heads."""

    recall: float  # share of the exact top-k that was chosen
    mass: float  # attention mass of the rows that were read: their share of exact attention's weights


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of a step, row by row."""

    next_ids: NDArray[np.int64]  # [num_rows]: argmax, or drawn; -1 where the greatest logit is NaN or infinite
    logits: NDArray[np.float32] | None  # [num_rows, vocab_size], if wanted; valid until the next step
    fidelity: Fidelity | None = None  # of the watched row
    likelihoods: Sequence[Likelihood | None] = ()  # [num_rows], from an engine with `draws`; None without num_top


@dataclass(frozen=True, slots=True)
class Reading:
    """How many rows a request has read so far."""

    selector: str
    rows: float  # of context and tail, per token: mean over tokens, layers and heads


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounts:
    """Counters of an engine since it was made, and the memory that it uses."""

    search_s: float = 0.0
    attend_s: float = 0.0
    slot_lookups: int = 0  # rows looked up in the slot cache
    slot_hits: int = 0
    kv_bytes: int = 0  # of loaded contexts, in any memory
    index_bytes: int = 0
    device_bytes: int = 0


class StepEngine(Protocol):
    """An engine that makes decode steps. One thread uses it; only `preparation` may be called from any.

    Results depend neither on the other rows of a step nor on how a question is cut into steps.
    """

    draws: bool  # the engine samples as `StepRow.draw` says; if not, the caller samples from logits
    max_rows: int  # of one step
    alike_rows: int  # in steps of up to so many, a row's results have the same bits as in a step of its own
    max_requests: int  # requests at the same time
    tail_capacity: int  # rows of question and answer that one request may have
    max_positions: int
    num_layers: int

    def add_context(self, context_id: int, artifact: Artifact, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Load a context. The artifact must stay open until `remove_context`. Raises an error if it does not fit.

        meanwhile: called now and then during a long load; it may do anything but load and remove contexts.
        """
        ...

    def remove_context(self, context_id: int) -> None:
        """Unload a context. No request may be open on it."""
        ...

    def preparation(self, context_id: int, config: SearchConfig, selector: SelectorName) -> Callable[[], None] | None:
        """Return the work that makes what such a request needs of its context; None if all of it is made already.

        It may take as long as a prefill. Call this and run the work on any thread, beside the steps, while the context
        stays loaded; if the work is run twice, its result is made once. Raises ConfigError for what this engine cannot
        do.
        """
        return None

    def open(self, request_slot: int, context_id: int, config: SearchConfig, selector: SelectorName) -> None:
        """Begin a request with an empty tail. If `preparation` has not been run, this does its work, and steps wait.

        Raises ConfigError for what this engine cannot do.
        """
        ...

    def write_rows(self, request_slot: int, rows: Tensor) -> None:
        """Append rows to the request's tail instead of feeding their tokens. Its search_period must be 1.

        rows: [num_layers, num_kv_heads, num_rows, 2, head_dim], from `read_rows` of a request with the same beginning;
        they must not be written to before the next step is over.
        """
        ...

    def read_rows(self, request_slot: int, start: int, stop: int) -> Callable[[], Tensor]:
        """Start to copy rows of the request's tail. The returned function may be called on any thread: it waits for the
        copy and returns it in the layout of `write_rows`."""
        ...

    def step(
        self,
        rows: Sequence[StepRow],
        want_logits: bool = False,
        watch: tuple[int, int] | None = None,  # row and layer whose fidelity is measured
    ) -> StepResult: ...

    def takes_drafts(self, artifact: Artifact | None, config: SearchConfig, selector: SelectorName) -> bool:
        """Whether rows of such requests can be drafts: nothing that a step leaves behind, but rows, depends on them.

        artifact: of the context; None: there is none.
        """
        ...

    def drop_rows(self, request_slot: int, num_rows: int) -> None:
        """Drop the request's last rows, drafts of the last step, from its tail."""
        ...

    def reading(self, request_slot: int) -> Reading: ...

    def close_request(self, request_slot: int) -> None: ...

    def counts(self) -> EngineCounts: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
