"""Reference for DeepSeek-V4's attention in decode steps: rows and queries before attention, and its output after it.

`csattn.lightning.CompressedAttention` does the same to a whole sequence, for prefill.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from csattn.artifact import Artifact
from csattn.artifact.reader import as_tensor
from csattn.lightning import CompressedState, CompressorWeights, make_keys, rope_last
from csattn.models.latent_spec import CompressedSpec
from csattn.models.query import Queries
from csattn.models.weights import CompressedStepWeights


def compressed_states(artifact: Artifact) -> list[CompressedState]:
    """Return the state that a context left in each layer; empty if its model has no compressed attention."""
    if "compressed" not in artifact.spec.model.kinds:
        return []
    is_bfloat16 = artifact.spec.kv_dtype == "bfloat16"
    return [
        CompressedState(**{name: as_tensor(x, is_bfloat16 and name != "pending") for name, x in state.items()})
        for state in artifact.states()
    ]


def empty_state(sizes: Mapping[str, tuple[int, int]], dtype: torch.dtype) -> CompressedState:
    """Return a layer's state before any token. sizes: `ModelGeometry.compressed_sizes` of no tokens; dtype: of rows."""
    return CompressedState(
        **{name: torch.zeros(size, dtype=torch.float32 if name == "pending" else dtype) for name, size in sizes.items()}
    )


def own_rows(inputs: Tensor, weights: CompressedStepWeights, positions: Tensor) -> Tensor:
    """Return tokens' rows [num_tokens, head_dim] float32.

    inputs: outputs of `weights.inputs`; positions: [num_tokens].
    """
    width = len(weights.kv_norm)
    rows = functional.rms_norm(inputs[:, :width].float(), (width,), weights.kv_norm, weights.eps)
    return rope_last(rows, positions, weights.angles, interleaved=True)


def pending_of(inputs: Tensor, spec: CompressedSpec) -> Tensor:
    """Return tokens' contributions to compressed rows and index keys, with gates: a view of inputs.

    The columns are those of `CompressedState.pending`.
    """
    return inputs[:, spec.head_dim : spec.head_dim + 2 * sum(spec.compressed_widths)]


def compressed_queries(
    projected: Tensor,  # [num_tokens, q_width + index_q_width]: outputs of `weights.queries`
    inputs: Tensor,  # outputs of `weights.inputs`
    weights: CompressedStepWeights,
    spec: CompressedSpec,
    positions: Tensor,  # [num_tokens]
) -> Queries:
    """Return queries, normed and rotated; index heads' weights include the scale of their scores."""
    num_tokens, indexer = len(projected), spec.indexer
    q = projected[:, : spec.q_width].float().view(num_tokens, spec.num_heads, -1)
    q = rope_last(functional.rms_norm(q, q.shape[-1:], eps=weights.eps), positions, weights.angles, interleaved=True)
    if indexer is None:
        return Queries(q, None, None)
    index_q = projected[:, spec.q_width :].float().view(num_tokens, indexer.num_heads, -1)
    weighed = inputs[:, -indexer.num_heads :].float() * (indexer.num_heads * indexer.head_dim) ** -0.5
    return Queries(q, rope_last(index_q, positions, weights.angles, interleaved=True), weighed)


def compressed_rows(
    pending: Tensor,  # [num_rows, span, 2 * sum(compressed_widths)] float32: `pending_of` each row's tokens, in order
    weights: CompressedStepWeights,
    spec: CompressedSpec,
    positions: Tensor,  # [num_rows]: of the first of each row's own `ratio` tokens
) -> tuple[Tensor, Tensor | None]:
    """Return compressed rows, [num_rows, head_dim], and their index keys, [num_rows, index_dim], or None; float32.

    Tokens at positions below 0 (overlap before the first row) do not count.
    """
    of_rows, of_keys = spec.compressed_widths
    parts = torch.split(pending, [of_rows, of_rows, of_keys, of_keys], -1)
    assert weights.rows is not None, "the layer has compressed rows"
    rows = _pooled(parts[0], parts[1], weights.rows, positions)
    return rows, None if weights.keys is None else _pooled(parts[2], parts[3], weights.keys, positions)


def _pooled(
    kv: Tensor,  # [num_rows, span, width]
    gate: Tensor,  # [num_rows, span, width]
    weights: CompressorWeights,
    positions: Tensor,
) -> Tensor:
    """Pool each row's tokens. With overlap, earlier tokens contribute their first channels, own tokens their last."""
    ratio, dim, bias = weights.ratio, weights.head_dim, weights.position_bias
    if weights.overlap:
        has_none = (positions == 0)[:, None, None]
        kv = torch.cat((kv[:, :ratio, :dim].masked_fill(has_none, 0.0), kv[:, ratio:, dim:]), dim=1)
        gate = torch.cat((gate[:, :ratio, :dim].masked_fill(has_none, -torch.inf), gate[:, ratio:, dim:]), dim=1)
        bias = torch.cat(torch.split(bias, dim, dim=1))
    return make_keys(kv, gate + bias, weights, positions)


def unrotated(attended: Tensor, weights: CompressedStepWeights, spec: CompressedSpec, positions: Tensor) -> Tensor:
    """Undo RoPE in attention's output, for the groups of the output projection.

    attended: [num_tokens, num_heads, head_dim] -> [num_groups, num_tokens, width] float32. Values are rotated by their
    position, so the output is rotated back by the query's.
    """
    back = rope_last(attended.float(), -positions, weights.angles, interleaved=True)
    return back.view(len(attended), spec.num_groups, -1).transpose(0, 1)
