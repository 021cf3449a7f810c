"""How far sparse attention moves a model's predictions: teacher-forced, sparse in every layer."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.artifact import Artifact
from csattn.config import SearchConfig
from csattn.errors import ConfigError
from csattn.models import LoadedModel
from csattn.models.attending_cache import CACHE
from csattn.models.loader import require_loaded
from offload.codecs.formats import KvFormat
from workers.model.rows import ids_of, require_tokens
from workers.observe import AttentionProbe
from workers.request_cache import RequestCache
from workers.session import Session, csattn_session

# Tokens in one forward pass, and the most tokens of the text whose attention is observed.
_CHUNK_LEN = 64
_MAX_OBSERVED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Means over the evaluated tokens (and, from `recall_at_k` to `output_error`, over layers and heads)."""

    nll: float  # nats per token
    kl: float  # nats, KL(full attention || this) of the next-token distribution
    top1_agreement: float  # share of tokens whose most likely successor is full attention's
    recall_at_k: float  # share of the true Top-K rows that were selected
    attention_mass: float  # softmax weight of the rows that were read
    output_error: float  # |out - full out| / |full out| of a head
    rows_read_share: float  # rows read, as a share of all rows before the token
    moved_bytes_per_step: float  # rows fetched besides the resident ones, all layers; a row counts once per GQA group
    index_bytes_per_key: float  # per key and KV head, of what choosing and the rest use; 0 without an index
    search_bytes_per_step: float  # read by the search, all layers; keys count in the KV's width
    rest_bytes_per_step: float  # read by attention to the rest, all layers
    search_ms_per_step: float  # all layers; with lookahead, a step does not wait for all of it

    def to_json(self) -> dict[str, float]:
        return {name: round(value, 6) for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Baseline:
    """Full attention's predictions for the same tokens."""

    token_ids: NDArray[np.int32]  # [num_tokens + 1]
    log_probs: Tensor  # [num_tokens, vocab_size] float32
    nll: float
    context_hash: str  # `hash_token_ids` of the context before them


def full_attention(
    loaded: LoadedModel, artifact: Artifact | Path | str, token_ids: NDArray[np.integer[Any]] | Sequence[int]
) -> Baseline:
    """Predict the token after each of token_ids [num_tokens + 1] but the last, by full attention.

    artifact: as for `csattn_session`.
    Raises ConfigError for fewer than two ids or for values that are no token ids, and ContextError for ids outside the
    vocabulary.
    """
    ids = _with_successors(loaded, token_ids)
    with csattn_session(loaded, artifact, SearchConfig(), "full") as session:
        log_probs = _predict(session, session.request(), ids[:-1])
        context_hash = session.artifact.spec.token_ids_sha256
    return Baseline(ids, log_probs, _nll(log_probs, ids[1:]), context_hash)


def measure(
    loaded: LoadedModel,
    artifact: Artifact | Path | str,
    config: SearchConfig,
    selector: str,
    token_ids: NDArray[np.integer[Any]] | Sequence[int],  # [num_tokens + 1], as for `full_attention`
    baseline: Baseline,
    on_token: Callable[[int], None] = lambda num_tokens: None,
    kv_format: KvFormat | str | None = None,
) -> Quality:
    """Compare one selector with full attention over the same context and tokens.

    kv_format: the format of the context's rows for the selector, or its name; full attention reads them as built.
    Raises ConfigError for a baseline of other tokens, or after another context.
    """
    ids = _with_successors(loaded, token_ids)
    if not isinstance(baseline, Baseline):
        raise ConfigError(f"the baseline is what `full_attention` returned, got {baseline!r}; give that")
    if not np.array_equal(ids, baseline.token_ids):
        raise ConfigError(
            f"full attention's predictions are for {len(baseline.token_ids)} other tokens than these {len(ids)}; give "
            "the result of `full_attention` for the same tokens"
        )
    if isinstance(kv_format, str):
        kv_format = KvFormat.parse(kv_format)
    num_tokens = len(ids) - 1
    with csattn_session(loaded, artifact, config, selector, kv_format) as session:
        spec = session.artifact.spec
        if spec.token_ids_sha256 != baseline.context_hash:
            raise ConfigError(
                f"full attention's predictions follow another context than that of {spec.artifact_id}; give the result "
                "of `full_attention` for the same artifact"
            )
        probe = AttentionProbe(session.artifact, every=-(-num_tokens // _MAX_OBSERVED))
        _predict(session, session.request(), ids[:1])  # compiles kernels, which must not count as search time
        searched_s = session.engine.counts().search_s
        request = session.request(probe)
        log_probs = _predict(session, request, ids[:-1], on_token)
        count, index_bytes = request.count, request.index_bytes
        search_s = session.engine.counts().search_s - searched_s
    rows_before = sum(spec.context_len + token + 1 for token in range(num_tokens)) * len(spec.model.indexed_layers)
    num_lists = spec.model.num_kv_heads * len(spec.model.indexed_layers)
    head_dim = spec.model.head_dim
    row_bytes = 2 * head_dim * loaded.dtype.itemsize if kv_format is None else kv_format.row_bytes(head_dim)
    kl = (baseline.log_probs.exp() * (baseline.log_probs - log_probs)).sum(-1)
    same = baseline.log_probs.argmax(-1) == log_probs.argmax(-1)
    return Quality(
        nll=_nll(log_probs, ids[1:]),
        kl=float(kl.mean()),
        top1_agreement=float(same.float().mean()),
        recall_at_k=probe.mean(probe.recall),
        attention_mass=probe.mean(probe.mass),
        output_error=probe.mean(probe.error),
        rows_read_share=(count.far_rows + count.near_rows) / rows_before,
        moved_bytes_per_step=probe.mean(probe.fetched) * num_lists * row_bytes,
        index_bytes_per_key=index_bytes / (spec.context_len * num_lists),
        search_bytes_per_step=count.search_bytes / num_tokens,
        rest_bytes_per_step=count.rest_bytes / num_tokens,
        search_ms_per_step=search_s * 1e3 / num_tokens,
    )


def _with_successors(loaded: LoadedModel, token_ids: NDArray[np.integer[Any]] | Sequence[int]) -> NDArray[np.int32]:
    require_loaded(loaded)
    ids = ids_of(token_ids)
    if len(ids) < 2:
        raise ConfigError(f"each token is evaluated on the one after it, got {len(ids)}; give two or more")
    require_tokens(ids.tolist(), loaded.geometry.vocab_size)  # also the last one, which is never fed
    return ids.astype(np.int32)


@torch.inference_mode()
def _predict(
    session: Session,
    request: RequestCache,
    token_ids: NDArray[np.int32],  # [num_tokens]
    on_token: Callable[[int], None] = lambda num_tokens: None,
) -> Tensor:
    """Return the log-probabilities of the token after each of token_ids: [num_tokens, vocab_size] float32."""
    model, chunks = session.loaded.model, []
    for chunk in np.array_split(token_ids, -(-len(token_ids) // _CHUNK_LEN)):
        ids = torch.from_numpy(chunk).long()[None]
        chunks.append(model(ids, **{CACHE: request}).logits[0].float().log_softmax(-1))
        on_token(len(chunk))
    return torch.cat(chunks)


def _nll(log_probs: Tensor, targets: NDArray[np.int32]) -> float:
    return -float(log_probs.gather(1, torch.from_numpy(targets).long()[:, None]).mean())
