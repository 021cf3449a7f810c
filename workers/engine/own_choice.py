"""Models that choose their rows themselves, by a learned indexer or all of them: what is not for a request to say."""

from collections import Counter

from csattn.config import SearchConfig
from csattn.cuda import HOPPERS, limits
from csattn.errors import ConfigError
from csattn.models.spec import CompressedSpec, LatentSpec, ModelSpec

SELECTOR = "model"  # what such a request's reading names
ROWS_AT_ONCE = 8  # of a step over one context, for which there are slots at least
_LEAST_DIM = 16  # of a matrix product on a GPU


def latents_of(spec: ModelSpec) -> LatentSpec | None:
    """How its layers keep latents; all do, or none."""
    return spec.layers[0].latent


def chooses_itself(spec: ModelSpec) -> bool:
    """Whether the model itself says what its layers attend to: all do, or none."""
    return spec.layers[0].latent is not None or spec.layers[0].compressed is not None


def kept_instead(spec: ModelSpec) -> str:
    """What the layers of a model that chooses itself keep instead of keys and values, as messages name it."""
    return "compressed rows" if latents_of(spec) is None else "latents"


def index_key_share(spec: ModelSpec) -> float:
    """Of the bytes of rows, those of the index keys that the model chooses by; 0: it has none."""
    latent = latents_of(spec)
    return 0.0 if latent is None or latent.indexer is None else latent.indexer.head_dim / (2 * spec.head_dim)


def least_slots(latent: LatentSpec, context_len: int, most_rows: int = ROWS_AT_ONCE) -> int:
    """Of a context, where its rows lie on the host: for all that some rows of a step, of so many, may choose of it."""
    return min(context_len, min(ROWS_AT_ONCE, most_rows) * (latent.top_k or 1))


def rows_read(spec: ModelSpec, context_len: int, tail_len: int) -> float:
    """Of a request with so many rows of its own: the mean over its tokens, and over layers that differ."""
    seen = range(context_len + 1, context_len + tail_len + 1)
    if (latent := latents_of(spec)) is not None:
        read = seen if latent.top_k is None else [min(latent.top_k, num_rows) for num_rows in seen]
        return sum(read) / max(1, tail_len)
    of_all = sum(n * _rows_of(of, num_seen) for of, n in Counter(spec.compressed).items() for num_seen in seen)
    return of_all / max(1, tail_len * spec.num_layers)


def _rows_of(of: CompressedSpec, num_seen: int) -> int:
    """That a token reads in such a layer, behind so many with its own."""
    far = num_seen // of.ratio if of.ratio else 0
    return min(of.window, num_seen) + (min(of.top_k, far) if of.indexer is not None else far)


def require_own_choice(spec: ModelSpec, config: SearchConfig, selector: str) -> None:
    """Raise ConfigError for a request that says who chooses where the model does. `keep` is not looked at there."""
    if not chooses_itself(spec) or (selector in ("csattn", "full") and config.rest in (None, "none")):
        return
    asked = f"selector {selector!r}" if selector not in ("csattn", "full") else f"rest {config.rest}"
    raise ConfigError(f"{_chooses(spec)}, so {asked} has no effect; leave it out")


def require_plain_rows(spec: ModelSpec, what: str) -> None:
    """Raise ConfigError for what there is of keys and values only."""
    if chooses_itself(spec):
        raise ConfigError(
            f"{what} works on keys and values, and this model keeps {kept_instead(spec)} instead; leave it out"
        )


def require_choice_placed(spec: ModelSpec, placement: str) -> None:
    """Raise ConfigError where a GPU has no layers of a model that chooses itself, or not in that placement."""
    if not chooses_itself(spec):
        return
    chooses = _chooses(spec)
    if (latent := latents_of(spec)) is None:
        if placement != "device":
            raise ConfigError(
                f"{chooses}; on a GPU all of them are on the device, because they are few: choose placement "
                "device, or cpu"
            )
        return
    if placement != "device" and latent.top_k is None:
        raise ConfigError(
            f"{chooses}; placement {placement} would bring all of them over the link for each token: choose "
            "placement device, or cpu"
        )
    if placement == "host":
        raise ConfigError(
            f"{chooses}; a GPU that attends to them also scores their index keys, and in placement host the CPU "
            "searches: choose placement hybrid, device, or cpu"
        )
    for name, dim in (("latents", latent.kv_rank), ("parts that RoPE rotates", latent.rope_dim)):
        if dim < _LEAST_DIM or dim & (dim - 1):
            raise ConfigError(
                f"this model's {name} have {dim} numbers; a GPU takes powers of two, at least {_LEAST_DIM}: choose "
                "placement cpu"
            )
    if not limits().is_hopper or limits().block_bytes < HOPPERS.block_bytes:
        raise ConfigError(f"{chooses}, on GPUs like {HOPPERS}; this GPU has {limits()}: choose placement cpu")


def _chooses(spec: ModelSpec) -> str:
    if (latent := latents_of(spec)) is None:
        return "this model keeps one row for several tokens, and its own indexer chooses among the rows"
    if latent.top_k is None:
        return "this model keeps latents, and attends to all of them"
    return f"this model keeps latents, of which its own indexer chooses {latent.top_k:,} for each token"
