"""Requests, replies and errors, as they pass between the HTTP side and the side that decodes: plain data, no arrays."""

import re
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Literal

from csattn.config import RestKind
from csattn.errors import CsattnError
from csattn.selector_names import SelectorName

Finish = Literal["stop", "length", "tool_calls"]
ContextState = Literal["building", "ready", "failed"]
CONTEXT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
BEGINNING = 1024  # leading characters, or tokens, that identify prompts which may share a context or rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample tokens, and when to stop. Validated where the request comes in."""

    max_new_tokens: int
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    min_p: float = 0.0  # share of the most likely token's probability
    presence_penalty: float = 0.0  # subtracted from the logit of a token that the answer has
    frequency_penalty: float = 0.0  # subtracted for each occurrence of the token in the answer
    repetition_penalty: float = 1.0  # divides positive logits of tokens seen so far, multiplies others
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id, and what is added to its logit
    seed: int | None = None
    stop: tuple[str, ...] = ()  # the answer ends before the first of these strings
    stop_token_ids: tuple[int, ...] = ()  # the answer ends before the first of these tokens
    min_tokens: int = 0  # tokens before any stop token or stop string counts
    ignore_eos: bool = False  # the answer continues past the model's end-of-turn tokens
    top_logprobs: int | None = None  # how many tokens to report beside the drawn one; None: no logprobs at all


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call in an assistant's message."""

    call_id: str
    name: str
    arguments: dict[str, Any] | str  # the string as it came, if it is not a JSON object


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    calls: tuple[ToolCall, ...] = ()  # for role "assistant"
    call_id: str = ""  # for role "tool": the call that it answers
    reasoning: str = ""  # for role "assistant"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the client can call. `parameters`: a JSON schema."""

    name: str
    parameters: dict[str, Any]
    description: str | None = None
    strict: bool = False  # arguments are held to their schema even if the model may choose not to call


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The input of the model's chat template."""

    turns: tuple[Turn, ...] = ()
    continues: bool = False  # the last turn is the beginning of the answer
    turns_field: str = "messages"  # name of the request's field that holds the turns
    template_options: dict[str, Any] = field(default_factory=dict)  # further variables for the chat template
    reasoning_effort: str | None = None  # set by the template's own switch; None: the template's default
    effort_field: str = "reasoning_effort"  # name of the request's field that holds it
    needs_effort: bool = True  # a model whose template has no switch for it is refused; False: it answers as it does
    tools: tuple[Tool, ...] = ()

    @property
    def field(self) -> str:
        """The name of the request's field that holds the prompt, for error messages."""
        return self.turns_field


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask(Conversation):
    """One request, validated where it comes in. It has either `turns` (chat), the last of which is answered or
    continued, or `prompt` (text or token ids that follow the context)."""

    request_id: str
    context: str  # registered name; empty: the longest context that the prompt begins with
    cache_salt: str = ""  # only requests with the same salt find what this one leaves behind
    prompt: str | tuple[int, ...] | None = None
    echo: bool = False  # the prompt's text comes before the answer, with its scores if logprobs are requested
    must_call: tuple[str, ...] = ()  # the answer has to call one of these tools
    parallel_calls: bool = True  # the answer may have several calls
    schema: dict[str, Any] | bool | None = None  # JSON schema of the answer
    schema_field: str = "response_format"  # name of the request's field that holds it
    prediction: str | None = None  # what the answer may contain, for `Drafts`; it does not change the answer
    sampling: Sampling
    reports_usage: bool = False  # each piece reports the usage so far
    keep: float | None = None  # None, here and below: the service's setting
    lookahead: int | None = None
    rest: RestKind | None = None
    selector: SelectorName | None = None

    @property
    def field(self) -> str:
        return self.turns_field if self.prompt is None else "prompt"

    @property
    def routing_key(self) -> str:
        """A routing key: the context's name, or a hash of salt and prompt's beginning, equal in all turns of a
        conversation."""
        if self.context:
            return self.context
        text = "".join(turn.content for turn in self.turns) if self.prompt is None else self.prompt
        beginning = f"{self.cache_salt}\n{text[:BEGINNING]}".encode(errors="surrogatepass")
        return f"~{sha256(beginning).hexdigest()[:32]}"


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token and its log-probability before temperature; `top`: the most likely ones (text, bytes, logprob)."""

    token_id: int
    text: str  # decoded with `surrogateescape`: bytes of an incomplete character are lone surrogates
    logprob: float | None  # None for a prompt's first token
    top: tuple[tuple[str, bytes, float], ...] = ()
    is_visible: bool = True  # False: a special token, which is left out of the answer's text


@dataclass(frozen=True, slots=True)
class CallPart:
    """A part of a tool call. The first part has the call's id and name; the parts' arguments, joined, are JSON."""

    index: int  # of the call in the answer
    arguments: str = ""
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Numbers of tokens that a request has used."""

    context_tokens: int
    question_tokens: int
    cached_tokens: int  # tokens of context and question that did not have to be computed
    new_tokens: int
    guessed_tokens: tuple[int, int] | None = None  # right and wrong ones, of a request with a prediction


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the answer that no further token can change; `text` may be empty beside other fields."""

    text: str
    scores: tuple[TokenScore, ...] = ()
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()
    usage: Usage | None = None  # so far, for a request with `reports_usage`


@dataclass(frozen=True, slots=True, kw_only=True)
class Done(Usage):
    """The last event of a request."""

    reason: Finish
    stop: str | None = None  # the stop string at which the answer ended


Event = Piece | Done


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeAsk(Conversation):
    """A text to tokenise, or a conversation as the model's chat template renders it."""

    text: str | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True  # end with the head of an assistant's turn, unless the last turn is continued


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """A tokenised text."""

    ids: tuple[int, ...]
    texts: tuple[str, ...]  # of each token
    max_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextInfo:
    """A registered context, as clients see it."""

    name: str
    state: ContextState
    artifact_id: str | None = None
    num_tokens: int | None = None
    created_at: float = 0.0  # seconds since the epoch
    progress: float = 0.0  # of the build, 0 to 1
    what: str = ""  # the build's phase, why it failed, or why this service cannot answer from the context


@dataclass(frozen=True, slots=True)
class Held:
    """A context that an attention worker has loaded."""

    path: str  # of its artifact, relative to the store
    routing_keys: tuple[str, ...]  # of the requests that used it, the newest last
    num_bytes: int
    num_users: int
    idle_s: float = 0.0  # since its last user left


@dataclass(frozen=True, slots=True)
class FailedBuild:
    """A failed build of a context from a prompt. The first such prompt after the wait starts it again."""

    num_tokens: int
    num_tries: int
    why: str
    retry_in_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """State of an attention worker: its requests, the contexts that it has loaded, and its limits."""

    since: float  # start of its process, seconds since the epoch
    num_running: int
    max_requests: int  # requests that it decodes at the same time
    budget_bytes: int | None = None  # for loaded contexts; None: limited only by memory
    has_room: bool = True  # for one more context, as large as the largest that it holds
    held: tuple[Held, ...] = ()
    failed_builds: tuple[FailedBuild, ...] = ()  # the newest first

    @property
    def held_bytes(self) -> int:
        return sum(held.num_bytes for held in self.held)

    def has(self, routing_key: str) -> bool:
        return any(routing_key in held.routing_keys for held in self.held)


@dataclass(frozen=True, slots=True)
class Health:
    """Whether requests can be answered now; if not, `why` is a sentence."""

    ready: bool
    why: str = ""


class ServingError(CsattnError):
    """A request that cannot be answered. `code` is for programs, `status` is HTTP's, `param` the field at fault.

    detail: written to the log in place of the message: for what clients should not see, such as paths of files.
    """

    code = "internal_error"
    status = 500

    def __init_subclass__(cls, code: str | None = None, status: int | None = None) -> None:
        """code, status: of all errors of this class, if they are not those of its base class."""
        cls.code, cls.status = code or cls.code, status or cls.status

    def __init__(
        self, message: str, param: str | None = None, retry_after_s: float | None = None, detail: str = ""
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.retry_after_s, self.detail = message, param, retry_after_s, detail

    # for pickling between processes, and for `copy`: several requests may fail alike, and each raises its own copy
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.param, self.retry_after_s, self.detail)


class BadRequestError(ServingError, code="invalid_request", status=400):
    """The request is invalid: sending it again cannot help."""


class ContextTooLongError(BadRequestError, code="context_length_exceeded"):
    """Context, question and answer do not fit into the model's positions or a request's rows."""


class UnknownModelError(ServingError, code="model_not_found", status=404):
    """The request's model does not exist; requests name contexts as models."""


class UnknownContextError(ServingError, code="context_not_found", status=404):
    """No context has this name."""


class ContextNotReadyError(ServingError, code="context_not_ready", status=409):
    """The context is still being built, its build failed, or its artifact cannot be used."""


class ContextExistsError(ServingError, code="context_exists", status=409):
    """The name belongs to another text or artifact already."""


class OverloadedError(ServingError, code="overloaded", status=429):
    """The queue is full, or no context can be loaded; `retry_after_s` says when to retry."""


class TimedOutError(ServingError, code="timeout", status=504):
    """The request exceeded its time limit, or its answer was not read."""


class WorkerLostError(ServingError, code="worker_lost", status=503):
    """The worker's process has ended or does not answer; the request may be sent again."""


class StorageUnavailableError(ServingError, code="storage_unavailable", status=503):
    """The store's disk is full or cannot be written."""


def closing() -> WorkerLostError:
    """Return the error that requests get from the moment the service begins to close."""
    return WorkerLostError("the service is shutting down; send the request again after its restart")
