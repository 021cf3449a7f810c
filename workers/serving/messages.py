"""What crosses between the HTTP side and the side that decodes: plain data, no arrays."""

import re
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Literal

from csattn.config import RestKind
from csattn.errors import CsattnError
from csattn.selector_names import SelectorName

Selector = SelectorName
Finish = Literal["stop", "length", "tool_calls"]
ContextState = Literal["building", "ready", "failed"]
CONTEXT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
BEGINNING = 1024  # characters, or tokens, by which prompts that may share something are known


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn, and when to stop. Checked where the request comes in."""

    max_new_tokens: int
    temperature: float = 0.0  # 0: the likeliest token
    top_p: float = 1.0
    top_k: int = 0  # of the likeliest tokens; 0: all
    min_p: float = 0.0  # of the likeliest token's share
    presence_penalty: float = 0.0  # off a token that the answer has
    frequency_penalty: float = 0.0  # off it for each time
    repetition_penalty: float = 1.0  # dividing where context, question or answer has the token
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id, and what its logit is raised by
    seed: int | None = None
    stop: tuple[str, ...] = ()  # the answer ends before the first of them
    stop_token_ids: tuple[int, ...] = ()  # likewise
    min_tokens: int = 0  # that come before any end
    ignore_eos: bool = False  # the answer goes on past the model's own end
    top_logprobs: int | None = None  # how many beside the drawn token's; None: no logprobs at all


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that an assistant's message has made."""

    call_id: str
    name: str
    arguments: dict[str, Any] | str  # as it came, where it is not the text of an object


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    calls: tuple[ToolCall, ...] = ()  # of an assistant
    call_id: str = ""  # which call a tool answers
    reasoning: str = ""  # of an assistant


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the client can call. `parameters`: a JSON schema."""

    name: str
    parameters: dict[str, Any]
    description: str | None = None
    strict: bool = False  # its arguments match their schema also where the model decides whether to call


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What the model's own chat template writes."""

    turns: tuple[Turn, ...] = ()
    continues: bool = False  # the last turn is the beginning of the answer
    turns_field: str = "messages"  # what the client calls them
    template_options: dict[str, Any] = field(default_factory=dict)  # what the chat template is given besides
    reasoning_effort: str | None = None  # as the chat template has a switch for it; None: as it is
    tools: tuple[Tool, ...] = ()

    @property
    def field(self) -> str:
        """Where the client wrote what it asks."""
        return self.turns_field


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask(Conversation):
    """One request, checked where it comes in: either `turns` (chat), the last of them to be answered or gone on with,
    or `prompt` (text or tokens that go on where the context ends)."""

    request_id: str
    context: str  # name, as registered; empty: the longest that the prompt begins with
    cache_salt: str = ""  # only requests with the same find what this one leaves behind
    prompt: str | tuple[int, ...] | None = None
    echo: bool = False  # the prompt's text comes first, and its scores where logprobs are asked for
    must_call: tuple[str, ...] = ()  # one of these tools, whatever the model would like
    parallel_calls: bool = True  # several in an answer
    schema: dict[str, Any] | bool | None = None  # JSON schema of the answer
    sampling: Sampling
    tells_usage: bool = False  # each piece says what was used so far
    keep: float | None = None  # None: as the service is set
    lookahead: int | None = None
    rest: RestKind | None = None
    selector: Selector | None = None

    @property
    def field(self) -> str:
        return self.turns_field if self.prompt is None else "prompt"

    @property
    def asked_for(self) -> str:
        """The context's name, or how the prompt begins and for whom: all turns of a conversation have it."""
        if self.context:
            return self.context
        text = "".join(turn.content for turn in self.turns) if self.prompt is None else self.prompt
        beginning = f"{self.cache_salt}\n{text[:BEGINNING]}".encode(errors="surrogatepass")
        return f"~{sha256(beginning).hexdigest()[:32]}"


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token and its log-probability before temperature; `top`: the likeliest ones (text, bytes, logprob)."""

    token_id: int
    text: str  # `surrogateescape` has made it: bytes that are no whole character are half surrogates
    logprob: float | None  # None: of a prompt's first token
    top: tuple[tuple[str, bytes, float], ...] = ()
    is_told: bool = True  # False: a special token, of which the answer's text has nothing


@dataclass(frozen=True, slots=True)
class CallPart:
    """A part of a call. A call's first part has its id and name; the parts' arguments together are JSON."""

    index: int  # of the call in the answer
    arguments: str = ""
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens that a request has taken."""

    context_tokens: int
    question_tokens: int
    cached_tokens: int  # of both, those that were there already
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that no further token can change; may be empty where only `scores` have come."""

    text: str
    scores: tuple[TokenScore, ...] = ()
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()
    usage: Usage | None = None  # so far, where the request wants it told


@dataclass(frozen=True, slots=True, kw_only=True)
class Done(Usage):
    """The last event of a request."""

    reason: Finish


Event = Piece | Done


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeAsk(Conversation):
    """What is to be told as tokens: a text, or a conversation as the model's own template writes it."""

    text: str | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True  # the model speaks next, unless it goes on with the last turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """A text as the model's tokens."""

    ids: tuple[int, ...]
    texts: tuple[str, ...]  # of each
    max_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextInfo:
    """A registered context, as told to users."""

    name: str
    state: ContextState
    artifact_id: str | None = None
    num_tokens: int | None = None
    created_at: float = 0.0  # seconds since the epoch
    progress: float = 0.0  # of its building, 0 to 1
    what: str = ""  # what its building is at, why it failed, or why this service cannot answer from it


@dataclass(frozen=True, slots=True)
class Held:
    """A context that an attention worker has loaded."""

    path: str  # of its artifact, in the store
    asked_for: tuple[str, ...]  # by which requests have come to it, the newest last: see `Ask.asked_for`
    num_bytes: int
    num_users: int
    idle_s: float = 0.0  # since its last user left


@dataclass(frozen=True, slots=True)
class FailedBuild:
    """Of a context that prompts bring: it is tried again for the first that comes after the wait."""

    num_tokens: int
    num_tries: int
    why: str
    retry_in_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What an attention worker has to do, holds, and can hold."""

    since: float  # when its process began, seconds since the epoch
    num_running: int
    num_slots: int  # requests that it decodes at the same time
    budget_bytes: int | None = None  # of contexts that are loaded; None: as far as there is memory
    has_room: bool = True  # for one more context, as large as the largest that it holds
    held: tuple[Held, ...] = ()
    failed_builds: tuple[FailedBuild, ...] = ()  # the newest first

    @property
    def held_bytes(self) -> int:
        return sum(held.num_bytes for held in self.held)

    def has(self, asked_for: str) -> bool:
        return any(asked_for in held.asked_for for held in self.held)


@dataclass(frozen=True, slots=True)
class Health:
    """Whether requests can be answered now; if not, a sentence why."""

    ready: bool
    why: str = ""


class ServingError(CsattnError):
    """A request that cannot be answered. `code` is for programs, `status` is HTTP's, `param` the field at fault.

    detail: what the log is told in the message's place: of files, say, which are no client's business.
    """

    code = "internal_error"
    status = 500

    def __init__(
        self, message: str, param: str | None = None, retry_after_s: float | None = None, detail: str = ""
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.retry_after_s, self.detail = message, param, retry_after_s, detail

    # it crosses processes; and it is copied where several requests are told the same, for it belongs to one of them
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.param, self.retry_after_s, self.detail)


class BadRequestError(ServingError):
    """The request can never be answered as it is."""

    code = "invalid_request"
    status = 400


class ContextTooLongError(BadRequestError):
    """Context, question and answer do not fit into the model's positions or a request's rows."""

    code = "context_length_exceeded"


class UnknownModelError(ServingError):
    """A request names a model, which a context is to it, that is not there."""

    code = "model_not_found"
    status = 404


class UnknownContextError(ServingError):
    """No context has this name."""

    code = "context_not_found"
    status = 404


class ContextNotReadyError(ServingError):
    """The context is still being built, or its building failed."""

    code = "context_not_ready"
    status = 409


class ContextExistsError(ServingError):
    """Another text has this name already."""

    code = "context_exists"
    status = 409


class OverloadedError(ServingError):
    """The queue is full; `retry_after_s` says when to come again."""

    code = "overloaded"
    status = 429


class TimedOutError(ServingError):
    """The request took longer than it may."""

    code = "timeout"
    status = 504


class WorkerLostError(ServingError):
    """The process that was to answer ended, or does not answer; the request may be sent again."""

    code = "worker_lost"
    status = 503


class StorageUnavailableError(ServingError):
    """The store's disk is full or cannot be written."""

    code = "storage_unavailable"
    status = 503


def closing() -> WorkerLostError:
    """What is told from when on the service closes."""
    return WorkerLostError("the service is shutting down; send the request again when it is back")
