"""Checks of contexts and steps that all engines make."""

from collections.abc import Collection, Mapping
from typing import TypeVar

from csattn.artifact import Artifact
from csattn.errors import ConfigError, ContextError, ModelError

Found = TypeVar("Found")


def require_new_context(context_id: int, loaded: Collection[int], artifact: Artifact, max_positions: int) -> None:
    """Raise if the number is taken, or if the model has no positions left after the context."""
    if context_id in loaded:
        raise ConfigError(f"context {context_id} is loaded already; remove it first, or use another number")
    if artifact.spec.context_len >= max_positions:
        raise ContextError(
            f"the context has {artifact.spec.context_len:,} rows and the model has {max_positions:,} positions: no "
            "question can follow it; build a shorter one"
        )


def loaded_context(context_id: int, contexts: Mapping[int, Found]) -> Found:
    """Return what is kept of a context. Raises ConfigError if it is not loaded."""
    if context_id not in contexts:
        raise ConfigError(f"there is no context {context_id}; load it first")
    return contexts[context_id]


def require_watch(watch: tuple[int, int] | None, num_rows: int, num_layers: int) -> None:
    """Raise ConfigError if they do not exist. watch: a row of the step, and a layer; None: nothing is watched."""
    if watch is not None and not (0 <= watch[0] < num_rows and 0 <= watch[1] < num_layers):
        raise ConfigError(
            f"row {watch[0]} of {num_rows} and layer {watch[1]} of {num_layers} cannot be watched; both count from 0"
        )


def require_rows_suffice(search_period: int) -> None:
    """Raise ConfigError if a request's next step needs more of the steps before it than the rows they wrote."""
    if search_period > 1:
        raise ConfigError(
            f"rows cannot be written to a request whose search_period is {search_period}: the choice that its next "
            "tokens reuse is not among them; use 1"
        )


def require_token(next_id: int) -> int:
    """Return a step's next id. Raises ModelError if it is no token: NaN or infinity was the largest logit."""
    if next_id < 0:
        raise ModelError(
            "the model's logits hold NaN or infinity; load it in bfloat16 or float32, or correct its weights"
        )
    return next_id
