"""Layers that keep a state of fixed size instead of rows: linear attention, state spaces, short convolutions."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSpec:
    """Linear attention (Gated DeltaNet, arXiv:2412.06464): each token updates a memory of fixed size."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    conv_len: int  # kernel size in tokens of the causal convolution over each channel

    @property
    def num_channels(self) -> int:
        """Channels of queries, keys and values together."""
        return 2 * self.num_k_heads * self.k_dim + self.out_width

    @property
    def out_width(self) -> int:
        return self.num_v_heads * self.v_dim

    @property
    def in_width(self) -> int:
        """Width of the input projections: channels, gates, and two numbers a head (write strength and decay)."""
        return self.num_channels + self.out_width + 2 * self.num_v_heads

    @property
    def parts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the convolution's state (the last inputs of each channel) and of the memory."""
        return (self.num_channels, self.conv_len - 1), (self.num_v_heads, self.k_dim, self.v_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanSpec:
    """State space layer (Mamba-2, arXiv:2405.21060): each token updates a memory of fixed size."""

    num_heads: int
    num_groups: int  # of heads: those of a group write and read their memories at the same places
    head_dim: int
    state_dim: int  # of the memory, numbers for each dimension of a head
    conv_len: int  # as in `DeltaSpec`
    bias: bool = False  # of the input and output projections
    conv_bias: bool = False
    least_step: float = 0.0  # a token's step in time is at least so long (transformers ignores it in decode steps)

    @property
    def num_channels(self) -> int:
        """Channels of values, and of where each group writes and reads."""
        return self.out_width + 2 * self.num_groups * self.state_dim

    @property
    def out_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def in_width(self) -> int:
        """Width of the input projections: channels, gates, and a number for each head (its step in time)."""
        return self.num_channels + self.out_width + self.num_heads

    @property
    def parts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """As in `DeltaSpec`."""
        return (self.num_channels, self.conv_len - 1), (self.num_heads, self.state_dim, self.head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvSpec:
    """Short convolution with gates before and after it (LFM2, arXiv:2511.23404)."""

    num_channels: int
    conv_len: int  # as in `DeltaSpec`
    bias: bool = False  # of the projections and of the convolution

    @property
    def out_width(self) -> int:
        return self.num_channels

    @property
    def in_width(self) -> int:
        """Width of the input projections: channels, then for each a gate before and one after the convolution."""
        return 3 * self.num_channels

    @property
    def parts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """As in `DeltaSpec`, without a memory."""
        return (self.num_channels, self.conv_len - 1), (0, 0, 0)


RecurrentSpec = DeltaSpec | ScanSpec | ConvSpec
