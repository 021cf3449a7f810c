"""Learned indexers (DeepSeek-V3.2, V4): score every key with a few small heads, attend to the best.

    score[t, s] = key_scale[s] * sum over heads h of weights[t, h] * relu(q[t, h] . k[s])

All of them choose in one total order: score descending, then index ascending, NaN last. A choice is an array of int32
indices, padded with -1. On a GPU with Hopper's tensor cores (wgmma), CUDA C kernels score and attend for the shapes
that they support, and Triton kernels for all others; on the CPU, compiled loops (numba) score.

Operands (`operands/`)
    Operands             q [num_queries, num_heads, head_dim], k [num_keys, head_dim], weights [num_queries, num_heads],
                         key_scale [num_keys] or None
    v32_operands, v4_operands, in_fp8
                         Operands from projections: V3.2's in FP8 with scales, V4's on the FP4 grid, V4's exactly in FP8
    causal_lens          how many keys each query may see: [num_queries]; a key may stand for several tokens
    Compressor, CompressorWeights, indexer_keys
                         V4: pools every `ratio` tokens into one key [head_dim]; its bits do not depend on the pieces
                         that tokens come in
    make_keys            the same for complete blocks of tokens: [num_keys, head_dim]
    rope_last            RoPE on the last channels of [rows, ..., width], in float32
    quantise_fp8, dequantise_fp8
                         [..., width] to e4m3 (the dtype FP8) and scales [..., width // block], and back

Prefill: all queries over contiguous keys (`score/`, `topk/`, `prefill/`)
    choose_keys          each query's k best legal keys, best first [num_queries, k], in bounded memory
    score_all            every legal score, with the bits that `choose_keys` compares: [num_queries, num_keys]
    score_keys           the definition of scores: eager, [num_queries, num_keys]
    top_k                exact selection of the k best of each row of scores [rows, length], by score or by position
    top_k_reference      its definition

Decoding: keys in a paged cache (`paged/`, `dsa`)
    make_key_cache, write_keys, read_keys
                         FP8 index keys in pages of PAGE_SIZE tokens: [num_pages, 64, 1, 132] uint8
    KeyPages, score_pages
                         scores of each query's own pages: [num_queries, max_pages * page_size]
    dsa_topk_indexer     DeepSeek Sparse Attention: the cache slots of each sequence's best keys: [batch_size, k]
    dsa_sparse_attention attention to those rows of paged latents: out [num_tokens, num_heads, 512], log-sum-exps
    DsaDecoder, DsaShape decode steps of both, at fixed addresses: a step can be captured as a CUDA graph

Two levels (`hisa/`; arXiv:2603.28458)
    hisa_top_k           scores the mean keys of blocks first, then the keys of the best blocks: [num_queries, k]
    HisaConfig           the size of blocks, and which are candidates
    BlockedKeys          keys in pages, and their block keys (means); `PooledKeys` updates these while decoding

Attention to the chosen rows (`mla/`)
    sparse_mla           attention of each query to its own choice [num_queries, k] of the latent rows
                         [num_rows, latent_dim]: out [num_queries, num_heads, latent_dim], log-sum-exp
                         [num_queries, num_heads]
    sparse_mla_reference its definition, in float64

A whole layer (`compressed`)
    CompressedAttention  V4's attention layer of one sequence, [num_tokens, hidden_size] in and out, in pieces of any
                         size: window, compressed rows, their indexer, sinks, grouped output
    CompressedWeights    its weights; `of` takes them from transformers' module
    CompressedState      what the layer keeps of its tokens for later ones

Arrays on a GPU must be on torch's current device. Arrays of a wrong shape, dtype or device raise
csattn.errors.ArrayError, wrong settings ConfigError. In each folder, `reference.py` is the definition; the kernels and
their launchers are in `triton_kernels.py`, `hopper.py` and the `.cu` files.
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
