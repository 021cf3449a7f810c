"""Compile the decode loop's Triton kernels for an H200, and those that decode quantized weights for older GPUs too.

Triton's interpreter accepts code that its compiler rejects. Compiling needs no GPU.

TRITON_INTERPRET=0 python -m tests.workers.model.compile_kernels
"""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from workers.model.gpu import (
    compressed_kernels,
    expert_kernels,
    head_kernels,
    latent_kernels,
    linear_kernels,
    recurrent_kernels,
    remix_kernels,
    token_kernels,
)

# the types of arguments by name; all others are bfloat16 tensors
TYPES = {
    "*fp32": "squares norm norm_ahead q_norm k_norm v_norm frequencies cos sin q_scale shares conv conv_state memory"
    " decay partials weight logits best scales kv_norm other_norm index_norm index_weights"
    " post comb matrix products sums biases pending position_bias conv_bias step_bias skip",
    "*i32": "by_token counts counters chosen context_ids tail_ids tail_lens tail_starts best_ids",
    "*i64": "versions token_ids positions next_ids own slots written",
    "fp32": "eps multiplier scale table_scale beta every offset cap weight_scale least least_step",
    "i32": "row_width num_rows num_out num_k num_squares hidden_size half tail_capacity maps_stride vocab_size"
    " num_logits num_parts num_experts num in_width num_channels w_len scales_len width projected_width num_in"
    " x_row x_head ups_head ups_in ups_out out_row out_head iterations num_pending kv_at nowhere group_width",
}
ROW = {"BLOCK": 1024, "SQUARES_BLOCK": 32}
TILES = {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "EVEN_K": True, "DOT_PRECISION": "tf32", "BLOCK_SQUARES": 128}
TILES |= {"FORMAT": "plain", "GROUP": 0, "ZEROS": False, "NATIVE": True}
QUANTIZED = [
    TILES | {"FORMAT": format, "GROUP": group, "ZEROS": zeros, "SPLIT_K": 4, "HAS_BIAS": False}
    for format, group, zeros in (("fp8", 0, False), ("fp8", 128, False), ("int4", 128, True))
]
HEAD_TILES = {"BLOCK_N": 64, "BLOCK_K": 64, "DOT_PRECISION": "tf32"}
HEADS = {"NUM_Q_HEADS": 9, "NUM_KV_HEADS": 3, "HEAD_DIM": 128, "BLOCK": 64}
EXPERTS = {name: size for name, size in TILES.items() if name != "EVEN_K"} | {"NUM_CHOSEN": 6, "BLOCK_PAIRS": 64}
STATE = {"VERSIONS": 1, "BLOCK_ROWS": 8}
LATENTS = [
    {"KV_RANK": 512, "HALF": 32, "BLOCK_HALF": 32, "INTERLEAVED": rank > 0, "INDEX_INTERLEAVED": False}
    | {"Q_RANK": rank, "KEY_AT": 1536, "INDEX_DIM": dim, "BLOCK_Q": 2048, "BLOCK_KV": 512, "BLOCK_INDEX": 128}
    | {"NUM_HEADS": 128, "NOPE_DIM": 128, "NUM_INDEX_HEADS": dim // 2}
    for rank, dim in ((1536, 128), (0, 0))
]
STREAMS = {"NUM": 3, "BLOCK_NUM": 4, "BLOCK_OUT": 16, "ROWS": 4}
COMPRESSED = [
    {"DIM": 512, "HALF": 32, "BLOCK_PAIRS": 256, "BLOCK": 1024, "RATIO": ratio, "SERIES": series, "TOKENS": 8}
    | {"NUM_HEADS": 64, "HEADS": 8, "NUM_INDEX_HEADS": num, "INDEX_DIM": 128, "BLOCK_INDEX": 64}
    for ratio, series, num in ((4, 2, 64), (128, 1, 0))
]
READERS = [{"HAS_NORM": True, "AHEAD": True}, {"HAS_NORM": False, "AHEAD": False}]
VARIANTS: list[tuple[Any, list[dict[str, Any]]]] = [
    (token_kernels.begin_kernel, [ROW | readers | {"CENTRED": not readers["AHEAD"]} for readers in READERS]),
    (token_kernels.compute_rotation_kernel, [{"BLOCK": 32}]),
    (
        token_kernels.add_normed_kernel,
        [
            ROW | readers | {"NUM_PARTS": parts, "IS_NORMED": parts == 1, "RANK": 0, "NUM_DEVICES": 4 - parts}
            for readers in READERS
            for parts in (1, 3)
        ],
    ),
    (token_kernels.norm_kernel, [{"BLOCK": 1024, "ADDS": adds} for adds in (True, False)]),
    (remix_kernels.add_to_streams_kernel, [STREAMS | {"BLOCK": 64, "FIRST": first} for first in (False, True)]),
    (
        remix_kernels.read_streams_kernel,
        [
            ROW | STREAMS | {"BLOCK_PARTS": 16, "JOINS": joins, "HAS_NORM": not joins, "AHEAD": False}
            for joins in (False, True)
        ],
    ),
    (expert_kernels.sum_parts_kernel, [{"NUM_PARTS": 3, "BLOCK": 1024, "ADDS": adds} for adds in (False, True)]),
    (head_kernels.copy_rows_kernel, [{"BLOCK": 512}]),
    (token_kernels.make_inputs_kernel, [{"BLOCK": 256}]),
    (head_kernels.gate_kernel, [{"BLOCK": 1024, "ACTIVATION": kind} for kind in ("sigmoid", "gelu_tanh")]),
    (
        recurrent_kernels.mix_kernel,
        [
            STATE | {"CONV_LEN": size, "BLOCK_LEN": 4, "BLOCK": 128, "GATED": gated, "HAS_BIAS": not gated}
            for size, gated in ((4, False), (3, True))
        ],
    ),
    (
        recurrent_kernels.scan_kernel,
        [
            STATE
            | {"NUM_HEADS": 128, "NUM_GROUPS": 8, "HEAD_DIM": 64, "STATE_DIM": 128, "BLOCK_DIM": 32, "BLOCK_STATE": 128}
        ],
    ),
    (recurrent_kernels.gated_norm_kernel, [{"BLOCK": 1024}]),
    (
        recurrent_kernels.delta_rule_kernel,
        [STATE | {"NUM_K_HEADS": 16, "NUM_V_HEADS": 32} | dict.fromkeys(("K_DIM", "V_DIM", "BLOCK_K", "BLOCK_V"), 128)],
    ),
    (
        expert_kernels.choose_kernel,
        [
            {"SCORES": scores, "HAS_BIAS": groups > 1, "NUM_GROUPS": groups, "NUM_KEPT": 2, "NORMED": groups > 1}
            | {"HAS_SCALES": groups == 1, "NUM_CHOSEN": 6, "BLOCK": 128, "BLOCK_CHOSEN": 8, "LEAST_SUM": 1e-20}
            | {"BY_TOKEN": by_token}
            for scores, groups, by_token in (
                ("softmax", 1, False),
                ("sigmoid", 4, False),
                ("softmax_of_chosen", 1, False),
                ("root_softplus", 1, False),
                ("root_softplus", 1, True),
            )
        ],
    ),
    (
        expert_kernels.experts_kernel,
        [
            EXPERTS
            | {"NORMED": shares == "input", "BY_PAIR": shares == "output", "SHARES": shares, "HAS_BIAS": bias}
            | {"ACTIVATION": activation, "GATED": gated}
            for shares, bias, activation, gated in (
                ("input", True, "clamped", True),
                ("none", False, "silu", True),
                ("none", False, "limited", True),
                ("none", False, "relu2", False),
                ("output", False, "none", False),
                ("output", True, "none", False),
            )
        ],
    ),
    (token_kernels.finish_logits_kernel, [{"HAS_CAP": cap, "BLOCK": 4096} for cap in (False, True)]),
    (token_kernels.argmax_of_part_kernel, [{"BLOCK": 4096}]),
    (token_kernels.argmax_kernel, [{"BLOCK": 32}]),
    (compressed_kernels.append_kernel, COMPRESSED[:1]),
    (compressed_kernels.compress_kernel, COMPRESSED),
    (compressed_kernels.make_queries_kernel, COMPRESSED),
    (compressed_kernels.unrotate_kernel, COMPRESSED[:1]),
    (latent_kernels.append_latents_kernel, LATENTS),
    (latent_kernels.make_latent_queries_kernel, LATENTS),
    (latent_kernels.heads_product_kernel, [{"BLOCK_M": rows, "SCALED": rows > 16, **HEAD_TILES} for rows in (16, 64)]),
    (
        linear_kernels.linear_kernel,
        [
            TILES | {"SPLIT_K": split, "NORMED": normed, "GATED": gated, "ACTIVATION": activation, "HAS_BIAS": bias}
            for split, normed, gated, activation, bias in (
                (1, True, True, "silu", False),
                (1, True, True, "limited", False),
                (4, True, True, "gelu_tanh", True),
                (4, False, False, "none", True),
                (1, True, False, "relu2", True),
                (1, True, False, "none", False),
            )
        ]
        + [tiles | {"NORMED": True, "GATED": True, "ACTIVATION": "silu"} for tiles in QUANTIZED[1:]],
    ),
    (
        linear_kernels.linear_add_kernel,
        [
            TILES
            | readers
            | {"SPLIT_K": 4, "HAS_BIAS": not readers["HAS_NORM"], "SQUARES_BLOCK": 32}
            | {"RANK": 0, "NUM_DEVICES": 2 if readers["HAS_NORM"] else 1}
            for readers in READERS
        ]
        + [tiles | READERS[0] | {"SQUARES_BLOCK": 32, "RANK": 0, "NUM_DEVICES": 1} for tiles in QUANTIZED[::2]],
    ),
    *(
        (
            kernel,
            [
                HEADS
                | {"NORM": norm, "HALF": half, "INTERLEAVED": interleaved, "ROTATED": norm != "projection"}
                | {"V_NORMED": norm == "head", "BLOCK_OUT": 64}
                for norm, half, interleaved in (
                    *(("none", 64, False), ("head", 32, True)),
                    *(("projection", 0, False), ("after_rope", 64, False)),
                )
            ],
        )
        for kernel in (head_kernels.rotate_append_kernel, head_kernels.predict_query_kernel)
    ),
    (
        head_kernels.rotate_append_kernel,
        [
            HEADS
            | {"NUM_KV_HEADS": 0, "NORM": "head", "V_NORMED": True, "HALF": 64, "INTERLEAVED": False, "ROTATED": True}
        ],
    ),
    (
        head_kernels.predict_query_kernel,
        [
            HEADS
            | {"HEAD_DIM": 512, "BLOCK": 256, "BLOCK_OUT": 32, "NORM": "head", "HALF": 256}
            | {"INTERLEAVED": False, "ROTATED": True}
        ],
    ),
]


def type_of(name: str, format: str) -> str:
    if format != "plain" and name == "w":
        return "*i16"
    return next((kind for kind, names in TYPES.items() if name in names.split()), "*bf16")


def compile_for(capability: int, kernel: Any, constants: dict[str, Any]) -> None:
    names = kernel.arg_names
    chosen = {name: value for name, value in (constants | {"PDL": capability >= 90}).items() if name in names}
    signature = {
        name: "constexpr" if name in chosen else type_of(name, chosen.get("FORMAT", "plain")) for name in names
    }
    if "NUM_DEVICES" in chosen:
        signature["inboxes"] = ("i64",) * chosen["NUM_DEVICES"]
    constexprs = {(names.index(name),): value for name, value in chosen.items()}
    compiled = triton.compile(ASTSource(kernel, signature, constexprs), target=GPUTarget("cuda", capability, 32))
    assert "ptx" in compiled.asm, f"{kernel.__name__} has become nothing"


if __name__ == "__main__":
    for kernel, variants in VARIANTS:
        for constants in variants:
            compile_for(90, kernel, constants)
            if constants.get("FORMAT", "plain") != "plain":
                compile_for(80, kernel, constants)
    print(sum(len(variants) for _, variants in VARIANTS), "variants compiled")
