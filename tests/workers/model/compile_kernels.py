"""Compile the decode loop's kernels for an H200, of which none is needed: the interpreter takes more than the compiler.

TRITON_INTERPRET=0 python -m tests.workers.model.compile_kernels
"""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from workers.model.gpu import head_kernels, linear_kernels, token_kernels

# what arguments of these names are; all others are bfloat16 tensors
TYPES = {
    "*fp32": "squares norm norm_ahead q_norm k_norm frequencies cos sin partials weight logits best",
    "*i32": "counters context_ids tail_ids tail_lens best_ids",
    "*i64": "token_ids positions next_ids",
    "fp32": "eps multiplier rope_scale cap",
    "i32": "num_rows num_out num_k num_squares hidden_size half tail_capacity maps_stride vocab_size"
    " num_logits num_parts",
}
ROW = {"BLOCK": 1024, "SQUARES_BLOCK": 64}
TILES = {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "EVEN_K": True, "DOT_PRECISION": "tf32", "BLOCK_SQUARES": 64}
HEADS = {"NUM_Q_HEADS": 9, "NUM_KV_HEADS": 3, "HEAD_DIM": 128, "BLOCK": 64}
READERS = [{"HAS_NORM": True, "AHEAD": True}, {"HAS_NORM": False, "AHEAD": False}]
VARIANTS: list[tuple[Any, list[dict[str, Any]]]] = [
    (token_kernels.begin_kernel, [ROW | readers | {"HALF_BLOCK": 32} for readers in READERS]),
    (token_kernels.add_normed_kernel, [ROW | readers for readers in READERS]),
    (token_kernels.finish_logits_kernel, [{"HAS_CAP": cap, "BLOCK": 4096} for cap in (False, True)]),
    (token_kernels.likeliest_of_part_kernel, [{"BLOCK": 4096}]),
    (token_kernels.likeliest_kernel, [{"BLOCK": 32}]),
    (token_kernels.advance_kernel, [{"BLOCK": 16}]),
    (
        linear_kernels.linear_kernel,
        [
            TILES | {"SPLIT_K": split, "NORMED": normed, "GATED": gated, "ACTIVATION": activation, "HAS_BIAS": bias}
            for split, normed, gated, activation, bias in (
                (1, True, True, "silu", False),
                (4, True, True, "gelu_tanh", True),
                (4, False, False, "none", True),
                (1, True, False, "relu2", True),
                (1, True, False, "none", False),
            )
        ],
    ),
    (
        linear_kernels.linear_add_kernel,
        [TILES | readers | {"SPLIT_K": 4, "HAS_BIAS": not readers["HAS_NORM"]} for readers in READERS],
    ),
    *(
        (
            kernel,
            [
                HEADS | {"NORM": norm, "HALF": half, "INTERLEAVED": interleaved}
                for norm, half, interleaved in (("none", 64, False), ("head", 32, True), ("projection", 0, False))
            ],
        )
        for kernel in (head_kernels.rotate_append_kernel, head_kernels.predict_query_kernel)
    ),
]


def type_of(name: str) -> str:
    return next((kind for kind, names in TYPES.items() if name in names.split()), "*bf16")


def compile_for_h200(kernel: Any, constants: dict[str, Any]) -> None:
    names = kernel.arg_names
    chosen = {name: value for name, value in (constants | {"PDL": True}).items() if name in names}
    signature = {name: "constexpr" if name in chosen else type_of(name) for name in names}
    constexprs = {(names.index(name),): value for name, value in chosen.items()}
    compiled = triton.compile(ASTSource(kernel, signature, constexprs), target=GPUTarget("cuda", 90, 32))
    assert "ptx" in compiled.asm, f"{kernel.__name__} has become nothing"


if __name__ == "__main__":
    for kernel, variants in VARIANTS:
        for constants in variants:
            compile_for_h200(kernel, constants)
    print(sum(len(variants) for _, variants in VARIANTS), "variants compiled")
