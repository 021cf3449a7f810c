"""A model's `forward` and `generate` while sessions over it are open: for requests, the session computes them."""

import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import update_wrapper
from threading import Lock
from typing import Any, Self

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from csattn.checks import require_at_least
from csattn.errors import ConfigError
from csattn.models.attending_cache import CACHE, cache_in
from workers.request_cache import RequestCache

_lock = Lock()  # for all models: sessions begin and end on any thread
_NOT_OF_REQUESTS = (
    "inputs_embeds",
    "per_layer_inputs",
    "labels",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
)
# What `generate` calls first, with its further arguments as one. It is private: a later version may lack it, and then a
# `generate` from before a session fails at the first token without room
_BEGINS = "_validate_model_kwargs"
METHODS = ("forward", "generate", _BEGINS)
_ASSISTED = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")


class Method:
    """Replaces one of the METHODS of a model, for all sessions over the model.

    Calls without a request go to the original method.
    """

    def __init__(self, model: Any, name: str) -> None:
        self._model, self.name, self._before = model, name, model.__dict__.get(name)
        self._method: Callable[..., Any] = getattr(model, name)
        self._signature = inspect.signature(self._method)
        update_wrapper(self, self._method)
        # in a compiled model, it would be compiled for each length
        self._decode = torch.compiler.disable(_decode)  # type: ignore[no-untyped-call]
        self.num_sessions = 0

    @classmethod
    def begin_session(cls, model: Any, name: str) -> Self:
        """Return the model's replacement of the method, installed if necessary, with one session more."""
        with _lock:
            method = getattr(model, name)
            if not isinstance(method, cls):
                method = cls(model, name)
                setattr(model, name, method)
            method.num_sessions += 1
        return method

    def end_session(self) -> None:
        """After the last session, restore the original method, unless something else has replaced this one since."""
        with _lock:
            self.num_sessions -= 1
            if self.num_sessions == 0 and self._model.__dict__.get(self.name) is self:
                delattr(self._model, self.name)
                if self._before is not None:
                    setattr(self._model, self.name, self._before)

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[[Any], Any], tuple[Any]]:
        """Copy and pickle as the original method: sessions belong to this model, not to its copies."""
        return _itself, (self._method,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given: dict[str, Any] = self._signature.bind(*args, **kwargs).arguments
        if self.name == _BEGINS:
            given = next(iter(given.values()))
        else:
            _require_unpacked(args)
            given = {**given.pop("kwargs", {}), **given}
            _require_one_cache(given)
        cache = cache_in(given)
        is_request = isinstance(cache, RequestCache) and cache.session.is_open
        if not (is_request and cache.session.loaded.model is self._model):
            return self._method(*args, **kwargs)
        if self.name == "forward":
            return self._decode(cache, given)
        if self.name == "generate":  # before any step: only `generate` sees all ids
            _require_generable(cache, given, self._model.generation_config)
            cache.is_generating = True
            try:
                return self._method(*args, **kwargs)
            finally:
                cache.is_generating = False
        if not cache.is_generating:
            raise ConfigError(
                "this `generate` was taken from the model before a session of it opened, and would not check that the "
                "answer has room; call the model's own, `model.generate`"
            )
        return self._method(*args, **kwargs)


def _itself(method: Any) -> Any:
    return method


def _require_unpacked(args: tuple[Any, ...]) -> None:
    """Raise ConfigError for a request without its two stars, which transformers would take for token ids."""
    if any(isinstance(one, dict) and isinstance(cache_in(one), RequestCache) for one in args):
        raise ConfigError("a request is the arguments of a call, and was given as one of them; write `**request`")


def _require_one_cache(given: dict[str, Any]) -> None:
    """Raise ConfigError if a request comes with another cache: `cache` and `past_key_values` are names of one argument,
    and transformers would silently take one of them."""
    caches = [given[name] for name in ("cache", "past_key_values") if name in given]
    if len(caches) == 2 and caches[0] is not caches[1] and any(isinstance(one, RequestCache) for one in caches):
        raise ConfigError(
            "a request of a session is the cache, and both cache and past_key_values were given, which are names of "
            "one argument; leave out the other"
        )


def _require_generable(cache: RequestCache, given: dict[str, Any], defaults: Any) -> None:
    """Raise ConfigError or ContextError for arguments of `generate` that a request does not support."""
    in_call = {**_set(given.get("generation_config")), **{k: v for k, v in given.items() if v is not None}}
    options = {**_set(defaults), **in_call}
    for name in _ASSISTED:
        if options.get(name):
            raise ConfigError(
                "a request is decoded token by token and cannot take tokens back, as assisted decoding would; "
                f"leave out {name}"
            )
    _require_cached(options)
    asked, default = in_call.get("cache_implementation"), getattr(defaults, "cache_implementation", None)
    # transformers would ignore the request, or raise an error of its own; a default of hybrid it ignores
    if asked or default not in (None, "hybrid"):
        raise ConfigError(
            "a request of a session is the cache, and cache_implementation asks for another; leave it out (of the "
            "model's generation_config, too), or the request"
        )
    if cache.decoded.token_ids:
        cache.session.require_unchanged()
    ids, mask = in_call.get("input_ids", in_call.get("inputs")), given.get("attention_mask")
    if ids is None:
        return  # `forward` will refuse it
    ids = _sequences(ids)
    if ids.shape[0] != 1:
        return  # `forward` will refuse the batch
    prompt_len = ids.shape[1]
    _require_mask_of_all(cache, mask, prompt_len)
    if mask is not None and mask.shape[1] == cache.get_seq_length() + prompt_len:
        prompt_len = mask.shape[1]  # only new ids, which transformers recognizes by their mask
    else:
        cache.new_among(ids[0].tolist())
    for name in ("max_new_tokens", "max_length"):
        require_at_least(name, options.get(name, 0), 0)
    num_new = options.get("max_new_tokens")
    if num_new is None and "max_length" in in_call:
        num_new = max(0, in_call["max_length"] - ids.shape[1])
    cache.session.require_room(prompt_len, num_new)


def _sequences(ids: Any) -> Tensor:
    """Return ids if they are token ids [batch_size, num_tokens]. Raises ConfigError otherwise."""
    if isinstance(ids, Tensor) and ids.ndim == 2 and ids.dtype in (torch.int64, torch.int32):
        return ids
    raise ConfigError(
        f"a request takes token ids, a tensor of whole numbers [1, num_tokens], got {_kind_of(ids)}; give what "
        "`session.ask` returns, or ids of that form"
    )


def _kind_of(given: Any) -> str:
    if isinstance(given, Tensor):
        return f"{given.dtype} of shape {tuple(given.shape)}"
    return f"a value of type {type(given).__name__}"


def _require_mask_of_all(cache: RequestCache, mask: Any, num_ids: int) -> None:
    """Raise ConfigError unless the mask has only ones, one per id and optionally one per token before them."""
    if mask is None:
        return
    if not (isinstance(mask, Tensor) and mask.ndim == 2 and bool(mask.all())):
        raise ConfigError(
            "a request of a session attends to all of its tokens; leave out padding and its mask, or give the "
            "attention_mask of `session.ask` (without one, `generate` leaves out tokens that are the pad token)"
        )
    kv_len = cache.get_seq_length()
    if mask.shape[0] != 1 or mask.shape[1] not in (num_ids, kv_len + num_ids):
        raise ConfigError(
            f"an attention mask of shape {tuple(mask.shape)} does not belong to {num_ids} token ids of one sequence; "
            f"leave it out, or give ones of shape (1, {num_ids}), or (1, {kv_len + num_ids}) for ids that follow the "
            f"{kv_len} that the request has"
        )


def _set(generation_config: Any) -> dict[str, Any]:
    """Return the fields of a generation config that are set."""
    return {k: v for k, v in vars(generation_config).items() if v is not None} if generation_config else {}


def _require_cached(options: dict[str, Any]) -> None:
    if options.get("use_cache") is False:
        raise ConfigError("a request of a session is a cache, and use_cache is False; leave it out, or set it to True")


def _decode(cache: RequestCache, given: dict[str, Any]) -> CausalLMOutputWithPast | tuple[Any, ...]:
    """Feed the next tokens of a request to its session's engine; return what `forward` returns."""
    for name in _NOT_OF_REQUESTS:
        if given.get(name) is not None and given[name] is not False:
            raise ConfigError(f"a request of a session takes token ids and gives logits; leave out {name}")
    _require_cached(given)
    if not cache.decoded.token_ids:
        cache.session.require_unchanged()
    ids, keep = _sequences(given.get("input_ids")), given.get("logits_to_keep", 0)
    if ids.shape[0] != 1:
        raise ConfigError(
            f"a request is one sequence, got a batch of {ids.shape[0]}; make one request per sequence, "
            "without beams and with num_return_sequences=1"
        )
    mask = given.get("attention_mask")
    _require_mask_of_all(cache, mask, ids.shape[1])
    kv_len = cache.get_seq_length()
    new = _new_ids(cache, ids[0].tolist(), mask, given.get("position_ids"))
    wanted = _wanted(keep, len(new))
    logits = cache.session.feed(cache, new, int(wanted[0]) if isinstance(keep, int) else 0, kv_len)
    if not isinstance(keep, int):
        logits = logits[wanted]
    out = CausalLMOutputWithPast(logits=logits[None].to(ids.device), **{CACHE: cache})
    in_dict = given.get("return_dict")
    if in_dict is None:
        in_dict = cache.session.loaded.model.config.return_dict
    return out if in_dict else out.to_tuple()


def _wanted(keep: Any, num_tokens: int) -> Tensor:
    """Return the indices of the tokens whose logits are wanted. keep: how many last ones, 0 for all, or indices."""
    numbers = torch.arange(num_tokens, device="cpu")
    if isinstance(keep, int) and len(last := numbers[slice(-keep, None)]):
        return last
    if isinstance(keep, Tensor) and keep.ndim == 1:
        with suppress(IndexError):  # out of range, or not whole numbers
            return numbers[keep.cpu()]
    got = keep.tolist() if isinstance(keep, Tensor) else repr(keep)
    raise ConfigError(
        f"logits_to_keep must be a whole number (of last tokens) or a tensor of numbers below {num_tokens} in one "
        f"row, got {got}; leave it out for all"
    )


def _new_ids(cache: RequestCache, ids: list[int], mask: Tensor | None, positions: Any) -> list[int]:
    """Return the ids to feed. ids: either new ones alone, or a whole sequence, the context's ids included.

    The first position shows which. Without positions, ids are whole if they begin with the context's, or if they are
    longer than the context and a mask of their length says that nothing comes before them.
    """
    kv_len, context_len = cache.get_seq_length(), cache.session.artifact.spec.context_len
    if not ids:
        raise ConfigError(f"no token ids were given to a request of {kv_len}; give those that follow")
    if positions is None:
        is_whole = (mask is not None and mask.shape[1] == len(ids) > context_len) or cache.begins(ids)
    else:
        first = _first_of(positions, len(ids))
        is_whole = first == 0
        if not is_whole and first != kv_len:
            raise ConfigError(
                f"tokens at positions from {first} on do not follow a request of {kv_len}: it has been decoded "
                "already; ask again for a new one, or continue with all the tokens that it has"
            )
    return cache.new_among(ids) if is_whole else ids


def _first_of(positions: Any, num_tokens: int) -> int:
    """Return the position of the first token. Raises ConfigError unless the others follow one by one."""
    if not isinstance(positions, Tensor) or positions.dtype not in (torch.int64, torch.int32):
        raise ConfigError(
            f"position_ids must be a tensor of whole numbers [1, {num_tokens}], got {_kind_of(positions)}; leave them "
            "out"
        )
    given = positions.flatten().tolist()
    first: int = given[0] if given else 0
    num_rows = max(1, len(given) // num_tokens)  # some models have several rows of them, all equal
    if given != [*range(first, first + num_tokens)] * num_rows:
        raise ConfigError(
            f"position_ids are not those of {num_tokens} tokens in one sequence, one after another; leave them out"
        )
    return first
