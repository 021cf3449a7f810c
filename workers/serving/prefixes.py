"""What a request begins with: a context, found or built from a long prompt, and kept rows of its own."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from csattn.artifact import Artifact
from csattn.config import SearchConfig
from csattn.models import LoadedModel
from csattn.selector_names import SelectorName
from workers.serving.context_build import Builder
from workers.serving.contexts import Contexts
from workers.serving.drafts import Drafts, Ngrams
from workers.serving.examiner import Examiner
from workers.serving.kept_rows import KeptRows, is_keepable, open_prefix_cache, row_identity
from workers.serving.messages import Ask, ContextNotReadyError, ContextTooLongError
from workers.serving.prompt_contexts import STEP, Found, PromptContexts, num_common, prefix_len
from workers.serving.prompts import head_ids, prompt_ids, require_embedded, room_for, whole_ids
from workers.serving.residency import Residency
from workers.serving.resident import Resident
from workers.serving.step_engine import StepEngine
from workers.settings import Settings

T = TypeVar("T")
STEPS_SHARE = 4  # tokens after a context, up to this part of its own, take less time in steps than in a build of all


@dataclass(frozen=True, slots=True)
class Prefix:
    """A request's context and kept rows, which stay loaded until `leave`."""

    resident: Resident
    token_ids: list[int]  # that follow the context
    is_new: bool  # the context was built for this request
    kept: KeptRows | None  # None: rows are neither looked for nor kept
    drafts: Drafts | None  # None: the answer's tokens are not guessed
    _using: AbstractAsyncContextManager[Resident]

    @property
    def artifact(self) -> Artifact | None:
        return self.resident.artifact

    @property
    def context_len(self) -> int:
        return 0 if self.artifact is None else self.artifact.spec.context_len

    @property
    def num_cached(self) -> int:
        """Tokens of context and prompt that need not be computed for this request."""
        return (0 if self.is_new else self.context_len) + (self.kept.num_found if self.kept else 0)

    async def leave(self) -> None:
        if self.kept is not None:
            self.kept.release()
        await self._using.__aexit__(None, None, None)


class Prefixes:
    """Finds or makes what requests begin with. For one event loop."""

    def __init__(
        self,
        loaded: LoadedModel,
        settings: Settings,
        engine: StepEngine,
        contexts: Contexts,
        examiner: Examiner,
        residency: Residency,
        builder: Builder,
        threads: Executor,
    ) -> None:
        self._loaded, self._settings, self._engine, self._threads = loaded, settings, engine, threads
        self._contexts, self._residency = contexts, residency
        self.prompt_contexts = PromptContexts(loaded, settings, examiner, residency, builder)
        self.cache = open_prefix_cache(loaded, settings)

    async def find(self, ask: Ask, config: SearchConfig, selector: SelectorName) -> Prefix:
        """Return the request's beginning, with its context loaded. Raises a ServingError if that is impossible."""
        whole = None if ask.context else await self._whole_ids(ask)
        without: set[Path] = set()
        while True:
            found = await self._find(ask, config, selector, whole, without)
            using = self._residency.using(found.path, config, selector, ask.routing_key)
            try:
                resident = await using.__aenter__()
                break
            except ContextNotReadyError as error:  # damaged or removed since it was found
                if ask.context or found.path is None or found.is_new:
                    which, remedy = "context built from the prompt's beginning", ""
                    if ask.context:
                        which, remedy = f"context {ask.context!r}", f"GET /v1/contexts/{ask.context} says what to do; "
                    raise ContextNotReadyError(
                        f"the {which} cannot be used: its files are missing, damaged, or of another model; {remedy}the "
                        "service's log has the details for its operator",
                        detail=str(error),
                    ) from error
                await self.prompt_contexts.drop(found.path)
                without.add(found.path)
        try:
            if whole is None:
                ids = await self._in_thread(prompt_ids, self._loaded.tokenizer, resident.artifact, ask)
                self._require_embedded(ask, ids)
            else:
                ids = whole[found.num_tokens :]
            artifact_id = None if resident.artifact is None else resident.artifact.spec.artifact_id
            identity = self._identity(ask, config, selector, artifact_id)
            drafts = await self._drafts(ask, config, selector, resident, ids)
            kept = None if identity is None else await self._kept_rows(identity, ids)
        except BaseException:
            await using.__aexit__(None, None, None)
            raise
        return Prefix(resident, ids, found.is_new, kept, drafts, using)

    async def _find(
        self, ask: Ask, config: SearchConfig, selector: SelectorName, whole: list[int] | None, without: set[Path]
    ) -> Found:
        """Find the longest context that the prompt begins with, or build a longer one.

        A longer one is built if more tokens follow the context than should be computed step by step, or than fit.
        without: contexts that turned out to be unusable.
        """
        if whole is None:
            return Found(await self._contexts.artifact_path(ask.context))
        engine = self._engine
        if _scores_prompt(ask):  # a context's tokens have no scores
            found = Found(None)
        else:
            registered = await self._contexts.paths()
            found = await self.prompt_contexts.find(whole, ask.cache_salt, registered, without)
            following, answer = whole[found.num_tokens :], min(ask.sampling.max_new_tokens, engine.tail_capacity // 2)
            identity = self._identity(ask, config, selector, None if found.path is None else found.path.name)
            num_kept = 0 if identity is None else await self._in_thread(self.cache.num_kept, identity, following)
            room = engine.tail_capacity - answer
            is_much, fits = self._is_much(len(following) - num_kept, found.num_tokens), len(following) <= room
            if (is_much or not fits) and prefix_len(len(whole)) > found.num_tokens:
                cut = await self._in_thread(self._cut, ask, whole, found, room)
                try:
                    return await self.prompt_contexts.make(whole[:cut], ask.cache_salt)
                except (ContextNotReadyError, ContextTooLongError):  # a full disk, say, or a small budget
                    if not fits:
                        raise
        return found

    def _is_much(self, num_new: int, context_len: int) -> bool:
        """Whether so many new tokens after a context are built into a longer one, instead of computed in steps."""
        return num_new > max(self._settings.kept.context_tokens, context_len // STEPS_SHARE)

    def _cut(self, ask: Ask, whole: list[int], found: Found, room: int) -> int:
        """How many first tokens of a prompt become a context: if the others may follow it, those that other prompts
        begin with, too. These are the instructions and tools, or what an earlier prompt had in common with it."""
        ids = np.asarray(whole, np.int32)
        for shared in (num_common(head_ids(self._loaded.tokenizer, ask), ids), found.num_shared):
            cut = min(shared, len(ids) - 1) // STEP * STEP
            if cut > found.num_tokens and len(ids) - cut <= room and not self._is_much(len(ids) - cut, cut):
                return cut
        return prefix_len(len(ids))

    async def _whole_ids(self, ask: Ask) -> list[int]:
        ids = await self._in_thread(whole_ids, self._loaded.tokenizer, ask)
        self._require_embedded(ask, ids)
        max_positions = self._engine.max_positions
        room_for(ask, 0, len(ids), max_positions, max_positions)  # raises if the prompt is too long with any context
        return ids

    async def _kept_rows(self, identity: bytes, ids: list[int]) -> KeptRows:
        finding = asyncio.ensure_future(self._in_thread(self.cache.find, identity, ids))
        try:
            return await asyncio.shield(finding)
        except asyncio.CancelledError:  # nobody takes the result
            finding.add_done_callback(_release)
            raise

    async def _drafts(
        self, ask: Ask, config: SearchConfig, selector: SelectorName, resident: Resident, ids: list[int]
    ) -> Drafts | None:
        most, artifact = self._settings.engine.draft_tokens, resident.artifact
        if not most or _scores_prompt(ask) or not self._engine.takes_drafts(artifact, config, selector):
            return None
        if resident.ngrams is None and artifact is not None:
            resident.ngrams = await self._in_thread(Ngrams, artifact.token_ids)
        of_question = await self._in_thread(Ngrams, np.asarray(ids, np.int32))
        predicted = None if ask.prediction is None else await self._in_thread(self._predicted, ask.prediction)
        stop_ids = {*ask.sampling.stop_token_ids, *(() if ask.sampling.ignore_eos else self._loaded.stop_ids)}
        prompt = [of_question, *([] if resident.ngrams is None else [resident.ngrams])]
        return Drafts(prompt, most, stop_ids, predicted)

    def _predicted(self, text: str) -> Ngrams:
        ids = self._loaded.tokenizer(text, add_special_tokens=False).input_ids
        require_embedded(ids, self._loaded.geometry.vocab_size, "prediction")
        return Ngrams(np.asarray(ids, np.int32))

    def _identity(
        self, ask: Ask, config: SearchConfig, selector: SelectorName, artifact_id: str | None
    ) -> bytes | None:
        """`row_identity` of the request; None if its rows are not kept."""
        is_kept = self._settings.kept.memory_bytes and is_keepable(selector, config, self._loaded.geometry)
        if _scores_prompt(ask) or not is_kept:
            return None
        return row_identity(self._loaded, self._settings, artifact_id, ask.cache_salt, selector, config)

    def _require_embedded(self, ask: Ask, ids: list[int]) -> None:
        require_embedded(ids, self._loaded.geometry.vocab_size, ask.field)

    def _in_thread(self, work: Callable[..., T], *arguments: Any) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)


def _release(finding: "asyncio.Future[KeptRows]") -> None:
    if not finding.cancelled() and finding.exception() is None:
        finding.result().release()


def _scores_prompt(ask: Ask) -> bool:
    """Whether every token of the prompt gets a score, and so has to be fed."""
    return ask.echo and ask.sampling.top_logprobs is not None
