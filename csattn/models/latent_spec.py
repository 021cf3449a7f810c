"""Attention to rows that are key and value of all heads: latents, and compressed rows. An indexer may choose them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSpec:
    """A learned indexer (DeepSeek-V3.2, see `csattn.lightning`). It chooses among all rows that a token may see."""

    num_heads: int
    head_dim: int
    interleaved: bool  # as in `RopeSpec`, for RoPE of its first dimensions


@dataclass(frozen=True, slots=True, kw_only=True)
class _Indexed:
    """A layer with or without an indexer. Without one, its sizes are 0."""

    indexer: IndexerSpec | None = None

    @property
    def num_index_heads(self) -> int:
        return 0 if self.indexer is None else self.indexer.num_heads

    @property
    def index_dim(self) -> int:
        """Width of an index key."""
        return 0 if self.indexer is None else self.indexer.head_dim

    @property
    def index_q_width(self) -> int:
        return self.num_index_heads * self.index_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec(_Indexed):
    """Attention in latent space (MLA, arXiv:2405.04434).

    A token's row is its latent, which is key and value of all heads, followed by the rotated (RoPE) part of the key
    and, if the layer has an indexer, by its index key. Without an indexer, but with a `top_k`, a token attends to the
    rows that an earlier layer's indexer chose last.
    """

    num_heads: int
    q_rank: int | None  # width of queries' latents; None: queries are projected directly
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    top_k: int | None = None  # rows chosen for a token; None: it attends to all

    @property
    def row_width(self) -> int:
        """Width of a row: latent, rotated part and index key."""
        return self.key_width + self.index_dim

    @property
    def key_width(self) -> int:
        return self.kv_rank + self.rope_dim

    @property
    def q_width(self) -> int:
        return self.num_heads * (self.nope_dim + self.rope_dim)

    @property
    def v_width(self) -> int:
        return self.num_heads * self.v_dim

    @property
    def in_widths(self) -> tuple[int, int, int, int]:
        """Widths of the projections of the layer's input.

        Queries (or their latents), the row's key, its index key, and a weight for each of the indexer's heads.
        """
        return self.q_rank or self.q_width, self.key_width, self.index_dim, self.num_index_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedSpec(_Indexed):
    """DeepSeek-V4's attention: see `csattn.lightning.compressed`.

    A token attends to a sliding window of rows, and to compressed rows, each of which stands for several earlier
    tokens: to all of them, or to those that an indexer chooses, whose keys are compressed in the same way. A row is key
    and value of all heads; RoPE rotates its last channels.
    """

    num_heads: int
    head_dim: int  # also the width of a row
    q_rank: int  # width of queries' latents
    rope_dim: int
    window: int  # uncompressed rows that a token sees, including its own
    num_groups: int  # of heads: the output projection first maps each group to `out_rank` numbers
    out_rank: int
    ratio: int = 0  # tokens that a compressed row stands for; 0: the layer has no compressed rows
    overlaps: bool = False  # a compressed row also includes the `ratio` tokens before its own
    top_k: int = 0  # compressed rows chosen for a token

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def series(self) -> int:
        """How many compressed rows a token contributes to: its own and, with overlap, the next one."""
        return (1 + self.overlaps) if self.ratio else 0

    @property
    def compressed_widths(self) -> tuple[int, int]:
        """Widths of a token's contributions to compressed rows and to index keys. Gate logits have the same widths."""
        return self.series * self.head_dim, self.series * self.index_dim

    @property
    def in_widths(self) -> tuple[int, ...]:
        """Widths of the projections of the layer's input, except the queries' latent: the token's row, its
        contributions to compressed rows and their gates, the same for index keys, and a weight for each index head."""
        of_rows, of_keys = self.compressed_widths
        return self.head_dim, of_rows, of_rows, of_keys, of_keys, self.num_index_heads

    @property
    def out_width(self) -> int:
        return self.num_groups * self.out_rank

    @property
    def span(self) -> int:
        """Number of tokens that a compressed row is computed from, overlap included."""
        return self.ratio * self.series

    def context_numbers(self, context_len: int) -> int:
        """How many numbers the layer keeps of a context: its last rows, compressed rows and index keys."""
        num_rows = context_len // self.ratio if self.ratio else 0
        return min(self.window - 1, context_len) * self.head_dim + num_rows * (self.head_dim + self.index_dim)

    def num_row_params(self, hidden_size: int) -> int:
        """Number of parameters of the matrices that are common to all heads: they make rows, and choose them."""
        return hidden_size * (self.q_rank + sum(self.in_widths)) + self.q_rank * self.index_q_width
