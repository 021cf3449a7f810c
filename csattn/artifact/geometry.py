"""The sizes of a model that determine the shapes in an artifact."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self, get_args

from csattn.errors import ConfigError

# What a layer keeps of a context: K and V of each token, with an index; those of the last tokens; latents of each token
# (with the keys of the model's own indexer, so without an index); a state of fixed size (linear attention, state
# spaces, convolutions); the last tokens' rows and rows that each stand for several tokens; or nothing (an MLP alone).
Keeps = Literal["rows", "window", "latents", "state", "compressed", "nothing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGeometry:
    """What one layer keeps of a context. Sizes that its kind does not have are 0 or empty."""

    keeps: Keeps = "rows"
    window: int = 0  # window: tokens whose rows a later token may see; compressed: those it sees, including itself
    rows_of: int | None = None  # rows, window: the earlier layer whose rows it attends to; None: it has its own
    conv: tuple[int, ...] = ()  # state: shape of the convolution's last inputs
    memory: tuple[int, ...] = ()  # state: shape of the memory; zeros: the layer has none
    ratio: int = 0  # compressed: tokens that a compressed row stands for; 0: the layer has none
    span: int = 0  # compressed: tokens that a compressed row is computed from
    key_width: int = 0  # compressed: numbers of a row's index key; 0: it has none

    def __post_init__(self) -> None:
        sizes = self.window, self.ratio, self.span, self.key_width, *self.conv, *self.memory
        is_compressed = self.keeps == "compressed"
        if not (
            self.keeps in get_args(Keeps)
            and all(type(size) is int and size >= 0 for size in sizes)
            and (self.window > 0) == (is_compressed or self.keeps == "window")
            and (len(self.conv), len(self.memory)) == ((2, 3) if self.keeps == "state" else (0, 0))
            and all(self.conv)
            and (all(self.memory) or not any(self.memory))
            and (is_compressed or self.ratio == 0)
            and self.span in (self.ratio, 2 * self.ratio)
            and (self.ratio > 0 or self.key_width == 0)
            and (self.rows_of is None or (type(self.rows_of) is int and self.keeps in ("rows", "window")))
        ):
            raise ConfigError(
                f"a layer keeps rows, the last rows, latents, a state, compressed rows or nothing, got {self}"
            )

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are set."""
        plain = asdict(_PLAIN) | {"keeps": None}
        given = {name: value for name, value in asdict(self).items() if value != plain[name]}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        return cls(**values)


_PLAIN = LayerGeometry()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGeometry:
    """The sizes of a model that determine the shapes in an artifact."""

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int  # width of a token's hidden state between layers, all residual streams together
    vocab_size: int
    max_positions: int  # the longest sequence that the model's positions allow
    window_heads: tuple[int, ...] = ()  # num_kv_heads and head_dim of `window` layers; empty: as in the others
    layers: tuple[LayerGeometry, ...] = ()  # empty: all layers keep `rows` of their own

    def __post_init__(self) -> None:
        for name, value in self._sizes.items():
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} of a model must be a positive integer, got {value!r}")
        if self.layers and (len(self.layers) != self.num_layers or self.kinds <= {"window", "state", "nothing"}):
            raise ConfigError(
                f"at least one of {self.num_layers} layers must attend to the whole context, got {list(self.layers)}"
            )
        if "compressed" in self.kinds and len(self.kinds) > 1:
            raise ConfigError(f"either all layers have compressed rows or none, got {list(self.layers)}")
        if self.window_heads and (
            "window" not in self.kinds
            or len(self.window_heads) != 2
            or any(type(x) is not int or x < 1 for x in self.window_heads)
        ):
            raise ConfigError(
                "heads of layers with a window are given by their number and their width, and only where a layer has "
                f"one, got {self.window_heads}"
            )
        for i, layer in enumerate(self.layers):
            if (at := layer.rows_of) is not None and not (0 <= at < i and self._lends(at, layer)):
                raise ConfigError(
                    "layers may only share rows of earlier layers with the same attention span, got "
                    f"{[other.rows_of for other in self.layers]}"
                )
        for num_kv_heads in (self.num_kv_heads, *self.window_heads[:1]):
            if self.num_q_heads % num_kv_heads:
                raise ConfigError(
                    f"{self.num_q_heads} query heads cannot be divided into equal groups over {num_kv_heads} KV heads"
                )

    def _lends(self, layer_idx: int, to: LayerGeometry) -> bool:
        layer = self.layers[layer_idx]
        return layer.rows_of is None and (layer.keeps, layer.window) == (to.keeps, to.window)

    @property
    def kinds(self) -> set[Keeps]:
        """What the layers keep."""
        return {layer.keeps for layer in self.layers or (_PLAIN,)}

    @property
    def indexed_layers(self) -> tuple[int, ...]:
        """The layers with an index."""
        return tuple(i for i in range(self.num_layers) if self.layer(i).keeps == "rows")

    def layer(self, layer_idx: int) -> LayerGeometry:
        return self.layers[layer_idx] if self.layers else _PLAIN

    def is_predicted(self, layer_idx: int) -> bool:
        """Whether its queries are predicted from the previous layer's input: so in all indexed layers but the first."""
        return layer_idx in self.indexed_layers[1:]

    def has_state(self, layer_idx: int) -> bool:
        """Whether the layer keeps a state of the context instead of a KV row for each token."""
        return self.layer(layer_idx).keeps in ("state", "compressed")

    @property
    def local_layers(self) -> tuple[int, ...]:
        """The other layers with rows: those with a window, and those of latents."""
        return tuple(i for i in range(self.num_layers) if self.layer(i).keeps in ("window", "latents"))

    def compressed_sizes(self, layer_idx: int, context_len: int) -> dict[str, tuple[int, int]]:
        """Return the shapes of what a layer of compressed rows keeps: see `csattn.lightning.CompressedState`."""
        layer, width = self.layer(layer_idx), 2 * self.head_dim
        num_rows, num_left = divmod(context_len, layer.ratio) if layer.ratio else (0, 0)
        if layer.span > layer.ratio and num_rows:  # overlap: the last row's tokens contribute to the next one as well
            num_left += layer.ratio
        series = layer.span // layer.ratio if layer.ratio else 0
        return {
            "window": (min(layer.window - 1, context_len), width),
            "rows": (num_rows, width),
            "keys": (num_rows if layer.key_width else 0, layer.key_width),
            "pending": (num_left, 2 * series * (width + layer.key_width)),
        }

    def num_kept(self, layer_idx: int, context_len: int) -> int:
        """Return how many of a context's last rows that layer keeps; 0 if it has a state, or keeps nothing."""
        layer = self.layer(layer_idx)
        if layer.keeps == "window":
            return min(context_len, layer.window)
        return context_len if layer.keeps in ("rows", "latents") else 0

    def kv_source(self, layer_idx: int) -> int:
        """Return the layer whose rows this layer attends to."""
        rows_of = self.layer(layer_idx).rows_of
        return layer_idx if rows_of is None else rows_of

    def num_stored(self, layer_idx: int, context_len: int) -> int:
        """Return how many rows of a context are stored for that layer; 0 if it attends to another's."""
        return self.num_kept(layer_idx, context_len) if self.kv_source(layer_idx) == layer_idx else 0

    def row_sizes(self, layer_idx: int) -> tuple[int, int]:
        """Return num_kv_heads and head_dim of that layer."""
        if not self.window_heads or self.layer(layer_idx).keeps != "window":
            return self.num_kv_heads, self.head_dim
        num_kv_heads, head_dim = self.window_heads
        return num_kv_heads, head_dim

    def to_json(self) -> dict[str, Any]:
        heads = {"window_heads": list(self.window_heads)} if self.window_heads else {}
        layers = {"layers": [layer.to_json() for layer in self.layers]} if self.layers else {}
        return self._sizes | heads | layers

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        layers = tuple(map(LayerGeometry.from_json, data.get("layers", ())))
        return cls(**{**data, "window_heads": tuple(data.get("window_heads", ())), "layers": layers})

    @property
    def _sizes(self) -> dict[str, Any]:
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in ("window_heads", "layers")
        }
