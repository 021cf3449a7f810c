"""Learned indexers (DeepSeek-V3.2, V4): score every key with a few small heads, attend to the best.

    score[t, s] = key_scale[s] * sum over heads h of weights[t, h] * relu(q[t, h] . k[s])

All of them choose in one total order: score descending, then index ascending, NaN last. A choice is int32 indices,
-1 padded. Where a GPU has Hopper's matrix units (wgmma), kernels in CUDA C take the shapes that suit them, Triton's the
others; on the CPU compiled loops do.

Operands (`operands/`)
    Operands             q [num_queries, num_heads, head_dim], k [num_keys, head_dim], weights [num_queries, num_heads],
                         key_scale [num_keys] or None
    v32_operands, v4_operands, in_fp8
                         Operands from projections: FP8 with scales, on the FP4 grid, and the latter exactly in FP8
    causal_lens          how many keys each query may see: [num_queries]; a key may stand for several tokens
    Compressor, CompressorWeights, indexer_keys
                         V4: every `ratio` tokens become one key [head_dim], token by token with the same bits
    make_keys            the same of tokens that are all there, [num_keys, head_dim]
    rope_last            rotary embedding of the last channels of [rows, ..., width], in float32
    quantise_fp8, dequantise_fp8
                         [..., width] to e4m3 (the dtype FP8) and scales [..., width // block], and back

Prefill: all queries over keys that lie side by side (`score/`, `topk/`, `prefill/`)
    choose_keys          each query's k best legal keys, best first [num_queries, k], in bounded memory
    score_all            every legal score, with the bits that `choose_keys` compares: [num_queries, num_keys]
    score_keys           the definition of scores: eager, [num_queries, num_keys]
    top_k                exact selection: of scores [rows, length] the k best of each row, by score or by position
    top_k_reference      its definition

Decoding: keys in a paged cache (`paged/`, `dsa`)
    make_key_cache, write_keys, read_keys
                         FP8 index keys in pages of PAGE_SIZE tokens: [num_pages, 64, 1, 132] uint8
    KeyPages, score_pages
                         scores of each query's own pages: [num_queries, max_pages * page_size]
    dsa_topk_indexer     DeepSeek Sparse Attention: where the best keys of each sequence lie: [batch_size, k]
    dsa_sparse_attention attention to those rows of paged latents: out [num_tokens, num_heads, 512], log-sum-exps
    DsaDecoder, DsaShape steps of both in memory that never moves: a step may be captured as a CUDA graph

Two levels (`hisa/`; arXiv:2603.28458)
    hisa_top_k           looks at the means of blocks first, then at the keys of the best blocks: [num_queries, k]
    HisaConfig           which blocks are looked into
    BlockedKeys          keys in pages, and the block keys over them; `PooledKeys` keeps these up to date while decoding

Attention to what is chosen (`mla/`)
    sparse_mla           latent rows [num_rows, latent_dim], of which each query has its own selection [num_queries, k]:
                         out [num_queries, num_heads, latent_dim], log-sum-exp [num_queries, num_heads]
    sparse_mla_reference its definition, in float64

All of it (`compressed`)
    CompressedAttention  V4's attention layer of one sequence, [num_tokens, hidden_size] in and out, in pieces of any
                         size: window, compressed rows, their indexer, sinks, grouped output
    CompressedWeights    its parameters; `of` takes them from transformers' module
    CompressedState      what its tokens have left, for those behind them

Arrays on a GPU lie on torch's current device. Arguments that do not fit raise csattn.errors.ArrayError, settings
ConfigError. In a folder, `reference.py` is the definition, `triton_kernels.py`, `hopper.py` and the `.cu` files beside
it are the kernels and what launches them.
"""

from csattn.lightning.compressed import CompressedAttention, CompressedState, CompressedWeights
from csattn.lightning.dsa import DsaDecoder, DsaShape, dsa_sparse_attention, dsa_topk_indexer
from csattn.lightning.hisa.pooling import PooledKeys
from csattn.lightning.hisa.select import BlockedKeys, HisaConfig, hisa_top_k
from csattn.lightning.mla.attend import sparse_mla
from csattn.lightning.mla.reference import sparse_mla_reference
from csattn.lightning.operands.compressor import Compressor, CompressorWeights, indexer_keys, make_keys
from csattn.lightning.operands.indexer import Operands, causal_lens, in_fp8, v4_operands, v32_operands
from csattn.lightning.operands.quantise import FP8, dequantise_fp8, quantise_fp8
from csattn.lightning.operands.rotations import rope_last
from csattn.lightning.paged.cache import PAGE_SIZE, make_key_cache, read_keys, write_keys
from csattn.lightning.paged.score import KeyPages, score_pages
from csattn.lightning.prefill.stream import choose_keys, score_all
from csattn.lightning.score.reference import score_keys
from csattn.lightning.topk.reference import top_k_reference
from csattn.lightning.topk.select import Order, top_k

__all__ = [
    "FP8",
    "PAGE_SIZE",
    "BlockedKeys",
    "CompressedAttention",
    "CompressedState",
    "CompressedWeights",
    "Compressor",
    "CompressorWeights",
    "DsaDecoder",
    "DsaShape",
    "HisaConfig",
    "KeyPages",
    "Operands",
    "Order",
    "PooledKeys",
    "causal_lens",
    "choose_keys",
    "dequantise_fp8",
    "dsa_sparse_attention",
    "dsa_topk_indexer",
    "hisa_top_k",
    "in_fp8",
    "indexer_keys",
    "make_key_cache",
    "make_keys",
    "quantise_fp8",
    "read_keys",
    "rope_last",
    "score_all",
    "score_keys",
    "score_pages",
    "sparse_mla",
    "sparse_mla_reference",
    "top_k",
    "top_k_reference",
    "v4_operands",
    "v32_operands",
    "write_keys",
]
