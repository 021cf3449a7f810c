"""Models that choose rows by an indexer of their own, or read all: what requests and placements can set there."""

from collections import Counter

from csattn.config import SearchConfig
from csattn.cuda import HOPPERS, limits
from csattn.errors import ConfigError
from csattn.models.latent_spec import CompressedSpec, LatentSpec
from csattn.models.spec import ModelSpec

SELECTOR = "model"  # the selector that the `Reading` of a request names
ROWS_AT_ONCE = 8  # of a step over one context: there are slots at least for all that these choose
_LEAST_DIM = 16  # of a matrix product on a GPU


def latents_of(spec: ModelSpec) -> LatentSpec | None:
    """Return how the model's layers keep latents; None if they do not. All layers are alike in this."""
    return spec.layers[0].latent


def model_selects_rows(spec: ModelSpec) -> bool:
    """Whether the model itself chooses the rows that its layers attend to. All layers are alike in this."""
    return spec.layers[0].latent is not None or spec.layers[0].compressed is not None


def cached_row_kind(spec: ModelSpec) -> str:
    """Return what a model that chooses itself keeps instead of keys and values, as messages name it."""
    return "compressed rows" if latents_of(spec) is None else "latents"


def index_key_share(spec: ModelSpec) -> float:
    """Return the share of a row's bytes that are its index key; 0 without an indexer."""
    latent = latents_of(spec)
    return 0.0 if latent is None or latent.indexer is None else latent.indexer.head_dim / (2 * spec.head_dim)


def least_slots(latent: LatentSpec, context_len: int, most_rows: int = ROWS_AT_ONCE) -> int:
    """Return how many slots a context on the host needs: for all that a step's ROWS_AT_ONCE rows at most may choose."""
    return min(context_len, min(ROWS_AT_ONCE, most_rows) * (latent.top_k or 1))


def rows_read(spec: ModelSpec, context_len: int, tail_len: int) -> float:
    """Return how many rows a token reads: the mean over a request's tail_len tokens, and over layers if they differ."""
    seen = range(context_len + 1, context_len + tail_len + 1)
    if (latent := latents_of(spec)) is not None:
        read = seen if latent.top_k is None else [min(latent.top_k, num_rows) for num_rows in seen]
        return sum(read) / max(1, tail_len)
    num_read = sum(n * _rows_of(of, num_seen) for of, n in Counter(spec.compressed).items() for num_seen in seen)
    return num_read / max(1, tail_len * spec.num_layers)


def _rows_of(of: CompressedSpec, num_seen: int) -> int:
    """Return how many rows a token reads in such a layer if it sees num_seen tokens, itself included."""
    far = num_seen // of.ratio if of.ratio else 0
    return min(of.window, num_seen) + (min(of.top_k, far) if of.indexer is not None else far)


def require_model_choice(spec: ModelSpec, config: SearchConfig, selector: str) -> None:
    """Raise ConfigError for a request that sets selector or `rest` where the model chooses. `keep` is ignored there."""
    if not model_selects_rows(spec) or (selector in ("csattn", "full") and config.rest in (None, "none")):
        return
    setting = f"selector {selector!r}" if selector not in ("csattn", "full") else f"rest {config.rest}"
    raise ConfigError(f"{_chooses(spec)}, so {setting} has no effect; leave it out")


def require_plain_rows(spec: ModelSpec, what: str) -> None:
    """Raise ConfigError if the model keeps no keys and values. what: the feature that needs them."""
    if model_selects_rows(spec):
        raise ConfigError(
            f"{what} works on keys and values, and this model keeps {cached_row_kind(spec)} instead; leave it out"
        )


def require_choice_placed(spec: ModelSpec, placement: str) -> None:
    """Raise ConfigError if a model that chooses itself cannot run on this GPU, or not in that placement."""
    if not model_selects_rows(spec):
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
