"""Continuous batching: admits requests and decodes them step by step. `plan` composes each step."""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from csattn.artifact import Artifact
from csattn.cpus import available_cpus
from csattn.errors import ConfigError, CsattnError
from offload.errors import OffloadError
from workers.serving.flow import Flow
from workers.serving.health import EngineHealth
from workers.serving.inbox import Call, Inbox
from workers.serving.messages import (
    BadRequestError,
    Done,
    Event,
    Finish,
    Piece,
    ServingError,
    TimedOutError,
    TokenScore,
    WorkerLostError,
)
from workers.serving.metrics import Metrics
from workers.serving.outlet import Outlet
from workers.serving.plan import QuestionRows, plan_drafts, plan_step
from workers.serving.request import Request
from workers.serving.sampling import prepare_draws
from workers.serving.step_engine import DrawSpec, StepEngine, StepResult, StepRow
from workers.serving.step_times import StepTimes

_log = logging.getLogger(__name__)
_Chosen = tuple[int, TokenScore | None] | Exception  # a request's next token, or why there is none
RESTORED_BLOCKS = 4  # kept blocks of rows written between two steps at most: bounds how long other requests wait
WATCH_EVERY = 100  # steps: in one of this many, one layer of one row is compared with exact attention
STALL_S = 30.0  # a request whose reader does not read is paused, and ended after this time
_MAX_MESSAGE_CHARS = 300  # characters of an engine's message that clients get
MANY_TOKENS = 65536  # vocabulary size from which sampling takes some tenths of a millisecond a token
MAX_SAMPLERS = 4  # sampling threads beside the scheduler's own
_ROWS_A_THREAD = 2  # waking a thread takes as long as sampling for one row
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Part:
    """A request's part in a step."""

    request: Request
    num_rows: int  # without those of its draft
    row: int  # the last of these; the rows of its draft follow
    gives_token: bool  # whether the answer's next token follows that row
    draft: list[int]  # tokens, often none


class Scheduler:
    """Decodes requests, for one thread that owns it and calls `turn` again and again.

    Other threads reserve a place in `flow`, then submit to `inbox`. Requests are admitted in the order of their
    arrival, and requests of any contexts share a step.
    """

    def __init__(
        self,
        engine: StepEngine,
        stop_ids: set[int],
        *,
        max_running: int,
        max_queued: int,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_running = min(max_running, engine.max_requests, engine.max_rows)
        self.inbox, self.flow = Inbox(), Flow(self.max_running, max_queued, clock)
        self.metrics, self.clock = metrics, clock
        self.health = EngineHealth(engine)
        self._engine, self._stop_ids = engine, stop_ids
        self._queue: deque[Request] = deque()
        self._calls: deque[Call] = deque()
        self._running: dict[int, Request] = {}  # by request slot, in the order of admission
        self._free_request_slots = list(range(engine.max_requests))
        self._num_steps = self._num_watched = 0
        self._question_rows, self._step_times = QuestionRows(), StepTimes()
        self._touched: dict[Outlet, None] = {}
        self._num_samplers = min(MAX_SAMPLERS, available_cpus() - 1)
        self._samplers = ThreadPoolExecutor(max(1, self._num_samplers), thread_name_prefix="csattn-draw")
        self._samplers.submit(prepare_draws)

    def __repr__(self) -> str:
        return f"<Scheduler {len(self._running)}/{self.max_running} running, {len(self._queue)} queued>"

    def turn(self) -> float | None:
        """Process the inbox, and make one step. Returns how long the thread may wait for the inbox; None: no limit."""
        self._read_inbox()
        self._run_calls()
        self._advance()
        return self._idle_s()

    def load(self, context_id: int, artifact: Artifact) -> None:
        """Load a context that is open, checked and read into memory. Call it on the engine's thread (`Inbox.call`)."""
        self._engine.add_context(context_id, artifact, self._while_loading)
        self.health.contexts.add(context_id)

    def unload(self, context_id: int) -> None:
        """Unload a context that no request uses or will use. Call it on the engine's thread (`Inbox.call`)."""
        self.health.contexts.discard(context_id)
        self._engine.remove_context(context_id)

    def fail_all(self, error: ServingError) -> None:
        """End every request."""
        self._read_inbox()
        self._run_calls()
        for request in [*self._queue, *self._running.values()]:
            self._end(request, "failed", error)
        self._wake_readers()

    def close(self) -> None:
        """Shut the sampling threads down. No turn may follow."""
        self._samplers.shutdown(wait=False, cancel_futures=True)

    def _advance(self) -> None:
        """End late requests, admit new ones, and make a step if any request can take part."""
        now = self.clock()
        self._end_late(now)
        if self.health.fault is not None:
            self._fail_while_broken(now)
        else:
            self._admit(now)
            self._restore()
            ready = [request for request in self._running.values() if request.can_step]
            plan = plan_step(ready, self._engine.max_rows, self._question_rows)
            if plan:
                self._step(plan, plan_drafts(ready, self._engine.alike_rows, self._engine.draws, self._step_times))
        self._wake_readers()

    def _while_loading(self) -> None:
        """Make a turn without the inbox's calls: they may load and remove contexts, so they wait."""
        self._read_inbox()
        self._advance()

    def _run_calls(self) -> None:
        while self._calls:
            _run(self._calls.popleft())

    def _read_inbox(self) -> None:
        arrived, calls = self.inbox.take()
        self._queue.extend(arrived)
        self._calls.extend(calls)
        now = self.clock()
        for request in [*self._queue, *self._running.values()]:
            if request.is_cancelled:  # its deadline may have passed during a long step, before it was cancelled
                self._end(request, "timeout" if now >= request.deadline else "cancelled", None)

    def _end_late(self, now: float) -> None:
        """End requests past their deadline, and those whose reader has stalled."""
        for request in [*self._queue, *self._running.values()]:
            if now >= request.deadline:
                took = f"{now - request.arrived_at:.1f} s, longer than the time limit"
                what = f"the request took {took}; ask for fewer tokens"
                if request.request_slot is None:
                    what = f"the request waited for its turn for {took}; send it again later"
                self._end(request, "timeout", TimedOutError(what))
            elif not request.outlet.is_full:
                request.paused_at = None
            elif request.paused_at is not None and now - request.paused_at >= STALL_S:
                error = TimedOutError(f"the answer was not read for {STALL_S:.0f} s; read it as it comes")
                self._end(request, "timeout", error)

    def _fail_while_broken(self, now: float) -> None:
        """End all requests, and probe the engine: nothing can be answered until it works again."""
        error = self._refuse_if_broken()
        for request in [*self._queue, *self._running.values()]:
            self._end(request, "failed", error)
        self.health.probe_if_due(now, self._free_request_slots[0])
        self._refuse_if_broken()

    def _refuse_if_broken(self) -> WorkerLostError | None:
        fault = self.health.fault
        self.flow.fault = error = None if fault is None else WorkerLostError(f"{fault}; send the request again")
        return error

    def _admit(self, now: float) -> None:
        """Open queued requests, the oldest first."""
        while self._queue and len(self._running) < self.max_running:
            request, request_slot = self._queue[0], self._free_request_slots[-1]
            try:
                self._engine.open(request_slot, request.context_id, request.config, request.selector)
            except Exception as error:
                self._end(request, "failed", _refusal(error))
                continue
            self._queue.popleft()
            self._free_request_slots.pop()
            request.request_slot = request_slot
            self._running[request_slot] = request
            self.metrics.queue_s.observe(now - request.arrived_at)
            self.metrics.context_tokens.inc(request.context_len)

    def _restore(self) -> None:
        """Write kept rows that were found for running requests into the engine, the oldest request's first."""
        room = RESTORED_BLOCKS
        for request in [request for request in self._running.values() if request.kept is not None]:
            assert request.kept is not None and request.request_slot is not None
            while room and request.kept.has_waiting:
                rows = request.kept.take()
                try:
                    self._engine.write_rows(request.request_slot, rows)
                except Exception as error:
                    self._end(request, "failed", _refusal(error))
                    break
                request.num_fed += rows.shape[2]
                request.num_rows += rows.shape[2]
                self.metrics.restored_tokens.inc(rows.shape[2])
                room -= 1

    def _step(self, plan: list[tuple[Request, int]], drafts: dict[Request, list[int]]) -> None:
        rows, parts, want_logits = self._compose(plan, drafts)
        watched = self._choose_watched(plan)
        watch = None if watched is None else (parts[watched[0]].row, watched[1])
        started = self.clock()
        try:
            result = self._engine.step(rows, want_logits, watch)
        except Exception as error:
            self._fail_step([part.request for part in parts], error)
            return
        ended = self.clock()
        num_question_rows = sum(part.num_rows for part in parts if part.request.question_left)
        self._count_step(len(rows), num_question_rows, sum(len(part.draft) for part in parts), ended - started)
        if watched is not None and result.fidelity is not None:
            seen = parts[watched[0]].request
            self.metrics.observe_fidelity(seen.ask.context, seen.arrived_at, result.fidelity)
        wanting = [(part.request, part.row) for part in parts if part.gives_token and part.request.max_new_tokens]
        chosen = self._choose(wanting, rows, result)
        for part in parts:
            request, num_rows = part.request, part.num_rows
            request.num_rows += num_rows
            self._keep(request)
            if request.question_left:
                if request.scores_prompt and result.logits is not None:
                    request.add_prompt_scores(result.logits[part.row + 1 - num_rows : part.row + 1])
                request.num_fed += num_rows
                self.metrics.question_tokens.inc(num_rows)
                self._put(request, request.take_echo())
            if part.gives_token and not request.max_new_tokens:
                self._end(request, "length", request.done("length"))
            elif part.gives_token:
                self._take_token(request, chosen[request], ended)
        self._verify([part for part in parts if part.draft], rows, result, ended)

    def _compose(
        self, plan: list[tuple[Request, int]], drafts: dict[Request, list[int]]
    ) -> tuple[list[StepRow], list[_Part], bool]:
        """Return the rows of a step, the part that each request of the plan has in it, and whether logits are needed on
        the host."""
        rows, parts, want_logits = list[StepRow](), list[_Part](), False
        for request, num_rows in plan:
            assert request.request_slot is not None, "a request without a request slot was planned"
            gives_token, scores_prompt = request.question_left <= num_rows, request.scores_prompt
            *others, last = request.next_inputs(num_rows)
            rows += [StepRow(request.request_slot, token_id, wants_token=scores_prompt) for token_id in others]
            draft = drafts.get(request, [])
            draw, *of_draft = self._draw_specs(request, draft) if gives_token and not scores_prompt else [None]
            rows.append(StepRow(request.request_slot, last, wants_token=scores_prompt or gives_token, draw=draw))
            parts.append(_Part(request, num_rows, len(rows) - 1, gives_token, draft))
            request.num_drafted += len(draft)
            for token_id, how in zip(draft, of_draft, strict=True):
                rows.append(StepRow(request.request_slot, token_id, is_draft=True, draw=how))
            want_logits = want_logits or scores_prompt or (request.needs_logits and gives_token and draw is None)
            if gives_token and request.grammar is not None and draw is None:
                request.grammar.begin()
        return rows, parts, want_logits

    def _count_step(self, num_rows: int, num_question_rows: int, num_drafted: int, seconds: float) -> None:
        self._num_steps += 1
        self._question_rows.add(num_rows - num_question_rows - num_drafted, num_question_rows, seconds)
        self._step_times.count_step()
        if not num_question_rows:
            self._step_times.add(num_rows, seconds)
        self.metrics.step_s.observe(seconds)
        self.metrics.batch_rows.observe(num_rows)

    def _verify(self, parts: list[_Part], rows: list[StepRow], result: StepResult, now: float) -> None:
        """Take the tokens that follow drafts, as long as each token taken is the draft's, and drop the other rows.

        parts: those with drafts. The tokens before these have been taken.
        """
        num_right, right = Counter[Request](), parts
        for nth in range(max((len(part.draft) for part in parts), default=0)):
            right = [x for x in right if not x.request.is_over and x.request.token_ids[-1:] == x.draft[nth : nth + 1]]
            for request in (part.request for part in right):
                num_right[request] += 1
                request.num_accepted += 1
                request.num_rows += 1
                self._keep(request)
            following = [(part.request, part.row + nth + 1) for part in right]
            for request, token in self._choose(following, rows, result).items():
                self._take_token(request, token, now)
        for part in parts:
            request, num_wrong = part.request, len(part.draft) - num_right[part.request]
            self.metrics.drafted_tokens.inc(len(part.draft))
            self.metrics.accepted_tokens.inc(num_right[request])
            if not request.is_over and num_wrong:
                assert request.request_slot is not None
                self._engine.drop_rows(request.request_slot, num_wrong)

    def _draw_specs(self, request: Request, draft: Sequence[int]) -> list[DrawSpec | None]:
        """`Request.draw_specs`, for an engine that draws; None also if it raises. `_choose` then meets the error and
        ends this request alone."""
        none: list[DrawSpec | None] = [None] * (len(draft) + 1)
        if not self._engine.draws:
            return none
        try:
            return request.draw_specs(self._stop_ids, draft)
        except Exception:
            return none

    def _keep(self, request: Request) -> None:
        """Keep the blocks of the request's rows that have become complete. A failure does not end the request."""
        if request.kept is None or not request.kept.has_whole(request.num_rows):
            return
        token_ids = [*request.question_ids, *request.token_ids][: request.num_rows]
        assert request.request_slot is not None
        try:
            request.kept.keep(token_ids, partial(self._engine.read_rows, request.request_slot))
        except Exception:
            _log.exception("rows could not be kept")
            request.kept.keeps = False

    def _choose_watched(self, plan: list[tuple[Request, int]]) -> tuple[int, int] | None:
        """In every WATCH_EVERY-th step, choose a request of the plan and a layer, for `Fidelity`; both round-robin."""
        if self._num_steps % WATCH_EVERY:
            return None
        sparse = [i for i, (request, _) in enumerate(plan) if request.selector != "full" and request.context_len]
        if not sparse or not self._engine.num_layers:  # 0 layers: the model chooses its rows itself
            return None
        turn, layer_idx = divmod(self._num_watched, self._engine.num_layers)
        self._num_watched += 1
        return sparse[turn % len(sparse)], layer_idx

    def _choose(
        self, wanting: list[tuple[Request, int]], rows: list[StepRow], result: StepResult
    ) -> dict[Request, _Chosen]:
        """Return the next token of each (request, row). Those sampled from logits are shared out among threads."""

        def is_sampled_on_host(request: Request, row: int) -> bool:
            return request.needs_logits and rows[row].draw is None

        def choose(request: Request, row: int) -> _Chosen:
            try:
                if is_sampled_on_host(request, row):
                    assert result.logits is not None, "the step was asked for logits"
                    (spec,) = request.draw_specs(self._stop_ids)
                    assert spec is not None
                    return request.choose(result.logits[row], spec)
                return request.take(int(result.next_ids[row]), result.likelihoods[row] if result.likelihoods else None)
            except Exception as error:  # ends this request alone
                return error

        def choose_all(share: Sequence[tuple[Request, int]]) -> list[_Chosen]:
            return [choose(request, row) for request, row in share]

        is_long = result.logits is not None and result.logits.shape[1] >= MANY_TOKENS
        num_drawn = sum(is_sampled_on_host(request, row) for request, row in wanting) if is_long else 0
        first, *others = in_shares(wanting, num_drawn, self._num_samplers)
        submitted = [(share, self._samplers.submit(choose_all, share)) for share in others]
        chosen = dict(zip([request for request, _ in first], choose_all(first), strict=True))
        for share, drawn in submitted:
            chosen |= zip([request for request, _ in share], drawn.result(), strict=True)
        return chosen

    def _take_token(self, request: Request, chosen: _Chosen, now: float) -> None:
        if isinstance(chosen, Exception):
            if not isinstance(chosen, ServingError | ValueError):
                _log.error("the next token of %s cannot be drawn", request.ask.request_id, exc_info=chosen)
            if not isinstance(chosen, ServingError):
                chosen = ServingError(f"the next token cannot be drawn: {chosen}")
            self._end(request, "failed", chosen)
            return
        token_id, score = chosen
        if request.first_token_at is None:
            request.first_token_at = now
            self.metrics.ttft.observe(now - request.arrived_at)
        request.token_ids.append(token_id)
        self.metrics.new_tokens.inc()
        is_end = request.ends_with(token_id, self._stop_ids)
        has_ended = is_end
        if not is_end:
            self._put(request, request.writer.add(token_id, score))
            is_over = request.grammar is not None and request.grammar.is_over
            has_ended = is_over or request.writer.has_stopped
        if has_ended or len(request.token_ids) >= request.max_new_tokens:
            self._put(request, request.writer.finish())
            if is_end and request.scores_prompt and score is not None:
                self._put(request, Piece("", (score,)))  # clients that sum up scores expect one for every token
            reason: Finish = "stop" if has_ended or request.writer.has_stopped else "length"
            if reason == "stop" and request.writer.has_tool_call:
                reason = "tool_calls"
            self._end(request, reason, request.done(reason))

    def _fail_step(self, requests: list[Request], error: Exception) -> None:
        """End the requests of a step that failed. Others continue if the engine still works."""
        for request in requests:
            self._remove(request)
        self.health.probe_after(error, requests[0], self.clock(), self._free_request_slots[0])
        self._refuse_if_broken()  # before readers get the error: one that retries at once must be refused
        refusal = _refusal(error)
        for request in requests:
            self._close(request, "failed", refusal)

    def _put(self, request: Request, event: Event | ServingError | None) -> None:
        if event is not None:
            request.outlet.put(request.with_usage(event) if isinstance(event, Piece) else event)
            if request.outlet.is_full and request.paused_at is None:
                request.paused_at = self.clock()
            self._touched[request.outlet] = None

    def _end(self, request: Request, outcome: str, last: Done | ServingError | None) -> None:
        """Remove the request from the queue or the engine, and send its reader the last event."""
        self._remove(request)
        self._close(request, outcome, last)

    def _remove(self, request: Request) -> None:
        request.is_over, request.grammar = True, None
        if request.request_slot is None:
            self._queue.remove(request)
        else:
            del self._running[request.request_slot]
            self._free_request_slots.append(request.request_slot)
            self.health.close_request(request.request_slot, self.clock())

    def _close(self, request: Request, outcome: str, last: Done | ServingError | None) -> None:
        now = self.clock()
        self._put(request, last)
        self.flow.release(was_answered=isinstance(last, Done))
        self.metrics.requests.labels(outcome).inc()
        if request.first_token_at is not None and len(request.token_ids) > 1:
            self.metrics.tpot.observe((now - request.first_token_at) / (len(request.token_ids) - 1))

    def _wake_readers(self) -> None:
        """Wake the readers of this turn's events."""
        self.metrics.running.set(len(self._running))
        self.metrics.queue_length.set(self.flow.num_in_flight - len(self._running))
        touched, self._touched = self._touched, {}
        Outlet.wake(touched)

    def _idle_s(self) -> float | None:
        running = self._running.values()
        if self.health.fault is not None:
            return 0.0 if self._queue or running else max(0.0, self.health.next_probe_at - self.clock())
        can_admit = self._queue and len(running) < self.max_running
        if can_admit or any(not request.outlet.is_full for request in running):
            return 0.0
        ends = [request.deadline for request in [*self._queue, *running]]
        ends += [STALL_S + request.paused_at for request in running if request.paused_at is not None]
        return max(0.0, min(ends) - self.clock()) if ends else None


def _run(call: Call) -> None:
    work, future = call
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)


def _refusal(error: Exception) -> ServingError:
    """Convert an engine's error to the ServingError that its requests get."""
    if isinstance(error, ServingError):
        return error
    if isinstance(error, ConfigError):
        return BadRequestError(str(error))
    # a CsattnError that is not about memory or a disk: a process that takes part in decoding is lost
    if isinstance(error, CsattnError) and not isinstance(error, OffloadError):
        return WorkerLostError(f"{error}; send the request again")
    message = f"{type(error).__name__}: {error}"[:_MAX_MESSAGE_CHARS]
    return ServingError(f"the engine failed at this request ({message}); send it again")


def in_shares(rows: Sequence[_T], num_drawn: int, num_threads: int) -> list[Sequence[_T]]:
    """Divide the rows: a share for this thread, and one each for at most num_threads others.

    num_drawn: how many of the rows are sampled from logits, which takes time.
    """
    num_shares = max(1, min(num_threads + 1, num_drawn // _ROWS_A_THREAD))
    return [rows[at::num_shares] for at in range(num_shares)]
