"""Where a session keeps its context's KV: as the artifact maps it, in fewer bytes, or on disk within a host budget."""

from csattn.artifact import Artifact
from csattn.errors import ConfigError
from csattn.models.loader import DTYPES
from csattn.selectors import ContextView
from offload.codecs.formats import KvFormat
from offload.coded_store import CodedStore
from offload.host_store import HostStore
from offload.kv_store import STREAM_ROWS, KvStore
from offload.row_files import FileSpan
from offload.tiered_store import TieredStore

_WITHOUT_ALL_KEYS = ("csattn", "full", "window")  # selectors that do not read the keys themselves

_SELECTED_STREAM_ROWS = 64  # where nothing is streamed but what stays resident: the budget is for rows


def open_store(
    artifact: Artifact,
    view: ContextView,
    selector: str,
    kv_format: KvFormat | None = None,
    host_budget_bytes: int | None = None,
) -> KvStore:
    """Close it when the session ends; the artifact stays open until then.

    Raises ConfigError for what does not go together, TierError for a budget that is too small.
    """
    layers = range(artifact.spec.model.num_layers)
    if host_budget_bytes is None:
        kv = [artifact.layer_kv(layer_idx) for layer_idx in layers]
        return HostStore(kv) if kv_format is None else CodedStore(kv, kv_format)
    if kv_format is not None:
        raise ConfigError("a host budget keeps rows as the artifact has them; leave out the format, or the budget")
    if selector not in _WITHOUT_ALL_KEYS:
        raise ConfigError(
            f"selector {selector!r} reads all keys from host memory, which a host budget is to save; choose "
            f"{', '.join(_WITHOUT_ALL_KEYS)}, or leave the budget out"
        )
    geometry, middle = artifact.spec.model, view.middle
    return TieredStore(
        [FileSpan(*artifact.layer_kv_place(layer_idx)) for layer_idx in layers],
        (geometry.num_kv_heads, view.context_len, geometry.head_dim),
        DTYPES[artifact.spec.kv_dtype],
        host_budget_bytes,
        resident=[slice(0, middle.start), slice(middle.stop, view.context_len)],
        # a stream reads all rows, and finds whole pieces again; rows that a search selects lie apart
        page_rows=STREAM_ROWS if selector == "full" else None,
        stream_rows=STREAM_ROWS if selector == "full" else _SELECTED_STREAM_ROWS,
    )
