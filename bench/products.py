"""How near a step's products come to the speed of the device's memory, with weights of 16, 8 and 4 bits.

    python -m bench.products [--shape llama-3.1-8b] [--rows 1,4,16,32] [--formats bfloat16,fp8,int4,...] [--json]

Each product of a layer by itself, over as many copies of its weights as the L2 cache cannot hold, and the four one
after the other. Every result is checked against decoding first, before anything is timed. `share` is of the rate at
which the device reads memory at best.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.decode.gpu_timing import ceilings, device_machine, num_input_sets, time_graph
from bench.shapes import shape_named
from csattn.models.quantized_weight import QuantizedWeight, WeightFormat
from csattn.models.weights import Linear
from workers.model.gpu.triton_ops import TritonOps
from workers.model.ops import Normed, Readers, Stream, num_squares
from workers.model.torch_ops import TorchOps

DTYPE = torch.bfloat16
# format, inputs of a group (0: a row), whether there are zero points
FORMATS: dict[str, tuple[WeightFormat, int, bool] | None] = {
    "bfloat16": None,
    "fp8": ("fp8", 0, False),
    "fp8 in blocks of 128": ("fp8", 128, False),
    "int4": ("int4", 128, False),
    "int4 with zero points": ("int4", 128, True),
    "int4 in groups of 32": ("int4", 32, True),
    "fp4 in groups of 32": ("fp4", 32, False),
}
MOST_SETS = 16
CLOSE = 1e-2  # of the norm of the difference from decoding first, in that of the product


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--rows", default="1,4,16,32")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--seconds", type=float, default=0.1, help="of measuring, per figure")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device, and torch finds none")
    rate = ceilings()["read_gbps"]
    cases = []
    for name in arguments.formats.split(","):
        for num_rows in map(int, arguments.rows.split(",")):
            for case in measure(arguments.shape, name, num_rows, rate, arguments.seconds):
                cases.append(case)
                print(
                    "{weights:24} rows {rows:2} {product:8} {us:8.2f} µs {gbps:7.0f} GB/s {share:6.1%}".format(**case)
                )
    if arguments.json:
        print(json.dumps({"machine": device_machine(), "read_gbps": rate, "cases": cases}))


def measure(shape: str, name: str, num_rows: int, read_gbps: float, seconds: float) -> list[dict[str, Any]]:
    """A layer's products, and all of them in turn."""
    spec, ops = shape_named(shape), TritonOps(torch.device("cuda"))
    mlp = spec.layers[0].mlp
    assert mlp is not None
    sizes = {
        "qkv": (spec.qkv_width, spec.hidden_size),
        "out": (spec.hidden_size, spec.q_width),
        "gate_up": (2 * mlp.intermediate_size, spec.hidden_size),
        "down": (spec.hidden_size, mlp.intermediate_size),
    }
    cases, turns, all_bytes = [], [], 0
    for product, (num_out, num_in) in sizes.items():
        one = make_linear(num_out, num_in, name)
        nbytes = linear_bytes(one)
        sets = [one, *(make_linear(num_out, num_in, name) for _ in range(num_input_sets(nbytes, MOST_SETS) - 1))]
        run = product_of(product, num_rows, num_in, num_out)
        require_close(ops, run, sets)
        calls = [partial(run, ops, linear) for linear in sets]
        cases.append((product, nbytes, time_graph(calls, seconds).p50_us))
        turns.append(calls)
        all_bytes += nbytes
    in_turn = [calls[number % len(calls)] for number in range(MOST_SETS) for calls in turns]
    cases.append(("layer", all_bytes, len(turns) * time_graph(in_turn, seconds).p50_us))
    return [
        {
            "weights": name, "rows": num_rows, "product": product, "bytes": nbytes, "us": round(us, 2),
            "gbps": round(nbytes / us / 1e3, 1), "share": round(nbytes / us / 1e3 / read_gbps, 3),
        }
        for product, nbytes, us in cases
    ]  # fmt: skip


def make_linear(num_out: int, num_in: int, name: str) -> Linear:
    """Random weights, every code there is."""
    if (kind := FORMATS[name]) is None:
        return Linear(torch.randn(num_out, num_in, dtype=DTYPE, device="cuda") * num_in**-0.5)
    format, group_size, zeros = kind
    codes = torch.randint(0, 256 if format == "fp8" else 16, (num_out, num_in), dtype=torch.uint8, device="cuda")
    codes[(codes & 0x7F) == 0x7F] = 0  # NaN in fp8
    groups = num_out, num_in // (group_size or num_in)
    scales = (0.5 + torch.rand(groups, device="cuda")) * num_in**-0.5 / (100 if format == "fp8" else 4)
    if format == "fp4":
        scales = torch.randint(117, 123, groups, dtype=torch.uint8, device="cuda")
    zero_of = torch.randint(0, 16, groups, device="cuda") if zeros else None
    quantized = QuantizedWeight.pack(format, codes, scales, group_size, zero_of)
    return Linear(quantized.words, None, quantized)


def linear_bytes(linear: Linear) -> int:
    return linear.weight.nbytes if linear.quantized is None else linear.quantized.nbytes


Run = Callable[[TritonOps | TorchOps, Linear], Tensor]


def product_of(product: str, num_rows: int, num_in: int, num_out: int) -> Run:
    """As a step has it: behind a norm, with an activation, or added to the stream."""

    def empty(*sizes: int, dtype: torch.dtype = DTYPE) -> Tensor:
        return torch.zeros(sizes, dtype=dtype, device="cuda")

    x = torch.randn(num_rows, num_in, dtype=DTYPE, device="cuda")
    blocks = torch.nn.functional.pad(x.float().square(), (0, -num_in % 64)).view(num_rows, -1, 64)
    normed = Normed(x, blocks.sum(-1).T.contiguous(), 1e-5)
    width = num_out // 2 if product == "gate_up" else num_out
    out = empty(num_rows, width)
    squares = empty(num_squares(num_out), num_rows, dtype=torch.float32)
    stream = Stream(empty(num_rows, num_out), empty(num_rows, num_out), empty(num_rows, num_out), squares)
    readers = Readers(torch.ones(num_out, device="cuda"), None, 1e-5)

    def run(ops: TritonOps | TorchOps, linear: Linear) -> Tensor:
        if product == "qkv":
            ops.linear(normed, [linear], out)
        elif product == "gate_up":
            ops.mlp(normed, [linear], True, "silu", out)
        else:
            ops.linear_add(x, linear, 1.0, stream, readers)
            return stream.hidden
        return out

    return run


def require_close(ops: TritonOps, run: Run, linears: list[Linear]) -> None:
    """Each product with its own weights, beside decoding them first."""
    for linear in linears[:2]:
        results = []
        for each in (ops, TorchOps()):
            run(each, linear).zero_()
            results.append(run(each, linear).float().clone())
        got, want = results
        difference = float((got - want).norm() / want.norm())
        if not difference < CLOSE:
            raise SystemExit(f"a product is {difference:.3g} from that of decoding first; nothing was timed")


if __name__ == "__main__":
    main()
