"""Pass queries and keys to a cache before RoPE, for caches that assign their own positions to rows."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from csattn.errors import ConfigError
from csattn.models.attending_cache import cache_in


class unrotated:
    """While open, a model that is called with a cache for which `is_ours` is true computes all tokens at position 0.

    There RoPE multiplies by 1 and adds 0, so the cache's layers get exactly what was projected, whatever the family and
    the kind of RoPE. If RoPE scales cos and sin (YaRN), these queries and keys are scaled already: rotate them by cos
    and sin without that factor. Calls with other caches are left alone.
    """

    def __init__(self, model: Any, is_ours: Callable[[Any], bool]):
        self._model = model
        self._is_ours = is_ours

    def __enter__(self) -> Self:
        self._hook = self._model.model.register_forward_pre_hook(self._before, with_kwargs=True)
        return self

    def __exit__(self, *exc: object) -> None:
        self._hook.remove()

    def _before(self, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._is_ours(cache := cache_in(kwargs)):
            return None
        if kwargs.get("use_cache") is False:  # every step would append all ids again
            raise ConfigError("a stream is a cache, and use_cache is False; leave it out, or set it to True")
        ids: Tensor = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"][..., 0]
        mask = kwargs.get("attention_mask")
        if mask is not None and not bool(mask[:, -ids.shape[1] :].all()):
            raise ConfigError("a stream is one sequence without padding; leave out the attention mask")
        if (given := kwargs.get("position_ids")) is not None:
            kv_len = cache.get_seq_length()
            following = torch.arange(kv_len, kv_len + ids.shape[-1])
            if given.shape[-1] != len(following) or bool((given.cpu() != following).any()):
                raise ConfigError(
                    f"position_ids are not those of {len(following)} tokens, one after another, that follow a stream "
                    f"of {kv_len}; leave them out"
                )
        # with None, transformers makes no mask: the cache's layers know what each token sees
        positions = torch.zeros(ids.shape, dtype=torch.long, device=ids.device)
        return args, {**kwargs, "position_ids": positions, "attention_mask": None}
