"""Checkpoints in 8 and 4 bits, written number by number as they are published."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32
NUM_LAYERS = 2
# The tensors written in place of a matrix [num_out, num_in], and the matrix that they decode to.
Written = tuple[dict[str, Tensor], Tensor]


def pack(numbers: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Unsigned numbers [rows, n] in int32 words [rows, n * bits / 32], the lowest bits first."""
    each = 32 // bits
    order = order or tuple(range(each))
    rows, n = numbers.shape
    words = np.zeros((rows, -(-n // each)), np.uint32)
    for row in range(rows):
        for word in range(words.shape[1]):
            for place in range(each):
                i = word * each + order[place]
                if i < n:
                    words[row, word] |= np.uint32(numbers[row, i]) << np.uint32(place * bits)
    return torch.from_numpy(words.view(np.int32))


def gptq(
    shape: tuple[int, int], rng: np.random.Generator, bits: int = 4, v2: bool = False, in_order: bool = False
) -> Written:
    num_out, num_in = shape
    groups = num_in // GROUP
    # as with desc_act; matrices with the same input have the same order
    group_of = np.arange(num_in) // GROUP if in_order else np.random.default_rng(7).permutation(num_in) % groups
    q = rng.integers(0, 1 << bits, (num_in, num_out))
    zeros = rng.integers(0, 1 << bits, (groups, num_out))
    scales = torch.from_numpy(rng.uniform(0.001, 0.1, (groups, num_out))).half()
    weight, steps = np.empty(shape, np.float32), scales.float().numpy()
    for i in range(num_in):
        for o in range(num_out):
            weight[o, i] = (q[i, o] - zeros[group_of[i], o]) * float(steps[group_of[i], o])
    return {
        "qweight": pack(q.T, bits).T.contiguous(),
        "qzeros": pack((zeros - (not v2)) & ((1 << bits) - 1), bits),
        "scales": scales,
        "g_idx": torch.from_numpy(group_of.astype(np.int32)),
    }, torch.from_numpy(weight)


def awq(shape: tuple[int, int], rng: np.random.Generator) -> Written:
    num_out, num_in = shape
    q = rng.integers(0, 16, (num_in, num_out))
    zeros = rng.integers(0, 16, (num_in // GROUP, num_out))
    scales = torch.from_numpy(rng.uniform(0.001, 0.1, (num_in // GROUP, num_out))).half()
    weight, steps = np.empty(shape, np.float32), scales.float().numpy()
    for i in range(num_in):
        for o in range(num_out):
            weight[o, i] = (q[i, o] - zeros[i // GROUP, o]) * float(steps[i // GROUP, o])
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {"qweight": pack(q, 4, order), "qzeros": pack(zeros, 4, order), "scales": scales}, torch.from_numpy(weight)


def packed(shape: tuple[int, int], rng: np.random.Generator, symmetric: bool, packed_zeros: bool = True) -> Written:
    num_out, num_in = shape
    q = rng.integers(-8, 8, shape)
    zeros = np.zeros((num_out, num_in // GROUP), int) if symmetric else rng.integers(-8, 8, (num_out, num_in // GROUP))
    scales = torch.from_numpy(rng.uniform(0.001, 0.1, zeros.shape)).bfloat16()
    weight, steps = np.empty(shape, np.float32), scales.float().numpy()
    for o in range(num_out):
        for i in range(num_in):
            weight[o, i] = (q[o, i] - zeros[o, i // GROUP]) * float(steps[o, i // GROUP])
    parts = {"weight_packed": pack(q + 8, 4), "weight_scale": scales, "weight_shape": torch.tensor(shape)}
    if not symmetric:
        stored = pack((zeros + 8).T, 4).T.contiguous() if packed_zeros else torch.from_numpy(zeros.astype(np.int8))
        parts["weight_zero_point"] = stored
    return parts, torch.from_numpy(weight)


def eight_bits(shape: tuple[int, int], rng: np.random.Generator, of_scales: str) -> Written:
    num_out, num_in = shape
    block = 40, 64 if of_scales == "block" else 24  # do not divide all sizes
    size = {"output": (num_out, 1), "matrix": (1,)}.get(of_scales, (-(-num_out // 40), -(-num_in // block[1])))
    q = torch.from_numpy(rng.normal(size=shape)).to(torch.float8_e4m3fn)
    scales = torch.from_numpy(rng.uniform(0.01, 0.1, size)).float()
    steps = scales.numpy()
    if of_scales == "exponents":
        block, size = (1, GROUP), (num_out, num_in // GROUP)
        exponents = rng.integers(118, 126, size, dtype=np.uint8)
        scales, steps = torch.from_numpy(exponents), np.float32(2.0) ** (exponents.astype(np.float32) - 127)
    weight, numbers = np.empty(shape, np.float32), q.float().numpy()
    for o in range(num_out):
        for i in range(num_in):
            at = {"output": (o, 0), "matrix": (0,)}.get(of_scales, (o // block[0], i // block[1]))
            weight[o, i] = float(numbers[o, i]) * float(steps[at])
    name = "weight_scale_inv" if "block" in of_scales else "weight_scale"
    return {"weight": q, name: scales}, torch.from_numpy(weight)


def with_zeros(shape: tuple[int, int], rng: np.random.Generator, reordered: bool = False) -> Written:
    num_groups = shape[1] // GROUP if reordered else 1
    group_of = np.random.default_rng(7).permutation(shape[1]).astype(np.int32) % num_groups
    size = shape[0], num_groups
    q, zeros = rng.integers(-128, 128, shape, np.int8), rng.integers(-128, 128, size, np.int8)
    scales = rng.uniform(0.001, 0.01, size).astype(np.float32)
    weight = (q.astype(np.float32) - zeros.astype(np.float32)[:, group_of]) * scales[:, group_of]
    parts = {"weight": q, "weight_scale": scales, "weight_zero_point": zeros}
    parts |= {"weight_g_idx": group_of} if reordered else {}
    return {name: torch.from_numpy(part) for name, part in parts.items()}, torch.from_numpy(weight)


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {"weights": weights}}}


FORMATS: dict[str, tuple[Any, dict[str, Any]]] = {
    "fp8 by block": (
        lambda *of: eight_bits(*of, "block"),
        {"quant_method": "fp8", "weight_block_size": [40, 64], "activation_scheme": "dynamic"},
    ),
    "fp8 by small block": (
        lambda *of: eight_bits(*of, "small block"),
        {"quant_method": "fp8", "weight_block_size": [40, 24], "activation_scheme": "dynamic"},
    ),
    "fp8 by output": (lambda *of: eight_bits(*of, "output"), {"quant_method": "fbgemm_fp8"}),
    "fp8 by matrix": (
        lambda *of: eight_bits(*of, "matrix"),
        compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
    ),
    "fp8 by matrix, as Mistral publishes": (
        lambda *of: eight_bits(*of, "matrix"),
        {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"},
    ),
    "fp8 by block, in compressed-tensors": (
        lambda *of: eight_bits(*of, "block"),
        compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[40, 64]),
    ),
    "fp8 by block, in older compressed-tensors": (
        lambda *of: eight_bits(*of, "block"),
        compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure="40x64"),
    ),
    "int8 with zero points": (
        with_zeros,
        compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False),
    ),
    "int8 in reordered groups": (
        lambda *of: with_zeros(*of, reordered=True),
        compressed("int-quantized", num_bits=8, type="int", group_size=GROUP, symmetric=False, actorder="group"),
    ),
    "fp8 by exponents": (
        lambda *of: eight_bits(*of, "exponents"),
        compressed("mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=GROUP),
    ),
    "packed": (
        lambda *of: packed(*of, symmetric=True),
        compressed("pack-quantized", num_bits=4, group_size=GROUP, symmetric=True),
    ),
    "packed with zero points": (
        lambda *of: packed(*of, symmetric=False),
        compressed("pack-quantized", num_bits=4, group_size=GROUP, symmetric=False),
    ),
    "packed with zero points one by one": (
        lambda *of: packed(*of, symmetric=False, packed_zeros=False),
        compressed("pack-quantized", num_bits=4, group_size=GROUP, symmetric=False),
    ),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False}),
    "gptq of 8 bits": (lambda *of: gptq(*of, bits=8), {"quant_method": "gptq", "bits": 8, "group_size": GROUP}),
    "gptq v2": (
        lambda *of: gptq(*of, v2=True),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
    ),
    "gptq v2, named as a format": (
        lambda *of: gptq(*of, v2=True),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "format": "gptq_v2"},
    ),
    "gptq in order": (
        lambda *of: gptq(*of, in_order=True),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP},
    ),
    "awq, no size of groups told": (awq, {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
}


def quantize(plain: Path, to: Path, form: str, rng: np.random.Generator) -> dict[str, Tensor]:
    """Write a copy with the layers' matrices in a format. Returns what they decode to, by name."""
    write, config = FORMATS[form]
    state, meant = load_file(plain / "model.safetensors"), {}
    for name in [name for name in state if "_proj." in name or ".experts." in name]:
        parts, meant[name] = write(tuple(state.pop(name).shape), rng)
        module = name.removesuffix(".weight")
        state |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
        for part in ("input_scale", "activation_scale"):  # for activations: ignored
            state[f"{module}.{part}"] = torch.ones(1)
        for part in ("k_scale", "k_zero_point"):  # for KV: ignored
            state[f"{module.rpartition('.')[0]}.{part}"] = torch.ones(1)
    change(plain, to, state, quantization_config=config)
    return meant


def change(plain: Path, to: Path, state: dict[str, Tensor], **of_config: Any) -> None:
    to.mkdir(exist_ok=True)
    for file in plain.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    config = json.loads((plain / "config.json").read_text()) | of_config
    (to / "config.json").write_text(json.dumps(config))
    save_file(state, to / "model.safetensors", metadata={"format": "pt"})


def in_mxfp4(plain: Path, to: Path, rng: np.random.Generator) -> None:
    """Write a copy whose experts are random MXFP4 blocks."""
    state = load_file(plain / "model.safetensors")
    for name in [name for name in state if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        num, num_in, num_out = state.pop(name).shape
        size = num, num_out, num_in // 32
        state[f"{name}_blocks"] = torch.from_numpy(rng.integers(0, 256, (*size, 16), dtype=np.uint8))
        state[f"{name}_scales"] = torch.from_numpy(rng.integers(118, 126, size, dtype=np.uint8))
    change(plain, to, state, quantization_config={"quant_method": "mxfp4"})
