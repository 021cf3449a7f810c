"""How close a step's matrix products come to the device's memory bandwidth, with weights of 16, 8 and 4 bits.

    python -m bench.products [--shape llama-3.1-8b] [--rows 1,4,16,32] [--formats bfloat16,fp8,int4,...] [--json FILE]
    python -m bench.products --shape gpt-oss-20b,qwen3-30b-a3b --formats bfloat16,fp8,int4,mxfp4

Each product of a layer is timed alone, over more copies of its weights than fit in the L2 cache, and all four in
sequence; in a layer with experts, both products together, with randomly chosen experts. Before any timing, every
result is checked against a product with decoded weights. `share` is relative to the device's best rate of reading
memory.
"""

from collections.abc import Callable
from functools import partial
from itertools import product as each_with_each
from typing import Any, TypeVar

import torch
from torch import Tensor

from bench.decode.gpu_timing import ceilings, device_machine, num_input_sets, time_graph
from bench.random_weights import FEW, random_weights
from bench.shapes import config_named
from bench.timing import finish, options_parser
from csattn.models.description import describe
from csattn.models.quantized_weight import QuantizedWeight, WeightFormat
from csattn.models.weights import Linear
from workers.model.gpu.triton_ops import TritonOps
from workers.model.layers import expert_buffers
from workers.model.ops import ExpertBuffers, Normed, Readers, Stream, num_squares
from workers.model.torch_ops import TorchOps

DTYPE = torch.bfloat16
# name -> format, inputs per group (0: the whole row), whether it has zero points
FORMATS: dict[str, tuple[WeightFormat, int, bool] | None] = {
    "bfloat16": None,
    "fp8": ("fp8", 0, False),
    "fp8 in blocks of 128": ("fp8", 128, False),
    "int4": ("int4", 128, False),
    "int4 with zero points": ("int4", 128, True),
    "int4 in groups of 32": ("int4", 32, True),
}
MOST_SETS = 16
T = TypeVar("T")
CLOSE = 1e-2  # largest norm of the difference from the product with decoded weights, relative to the product's norm


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--rows", default="1,4,16,32")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--seconds", type=float, default=0.1, help="time to measure each figure")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device, and torch finds none")
    rate = ceilings()["read_gbps"]
    cases = []
    of = (each.split(",") for each in (arguments.shape, arguments.formats, arguments.rows))
    for shape, name, num_rows in each_with_each(*of):
        for case in measured(shape, name, int(num_rows), rate, arguments.seconds):
            cases.append(case)
            print(
                "{shape:14} {weights:24} rows {rows:2} {product:8} {us:8.2f} µs {gbps:7.0f} GB/s {share:6.1%}".format(
                    **case
                )
            )
    header = {"bench": "products", "machine": device_machine(), "read_gbps": rate}
    finish({**header, "cases": cases}, arguments.json)


def measured(shape: str, name: str, num_rows: int, read_gbps: float, seconds: float) -> list[dict[str, Any]]:
    config = config_named(shape, num_hidden_layers=1, vocab_size=8)
    times = (time_experts if describe(config).layers[0].experts else time_products)(config, name, num_rows, seconds)
    return [
        {
            "shape": shape, "weights": name, "rows": num_rows, "product": name_of, "bytes": nbytes, "us": round(us, 2),
            "gbps": round(nbytes / us / 1e3, 1), "share": round(nbytes / us / 1e3 / read_gbps, 3),
        }
        for name_of, nbytes, us in times
    ]  # fmt: skip


Time = tuple[str, int, float]  # product, bytes, microseconds


def time_experts(config: Any, name: str, num_rows: int, seconds: float) -> list[Time]:
    """Time a layer's experts, from the layer's input to their sum; the bytes are the weights of the chosen experts."""
    few, ops = next((few for few in FEW if few == name), None), TritonOps(torch.device("cuda"), 1e-5)
    if few is None and name != "bfloat16":
        raise SystemExit(f"experts' weights are bfloat16, {', '.join(FEW)}, not {name!r}")
    whole = random_weights(config, "cuda", few=few)
    spec, of, weights = whole.spec, whole.spec.layers[0].experts[0], whole.layers[0].experts[0]
    x, stream, readers = step_of(num_rows, spec.hidden_size, spec.hidden_size)
    all_buffers = []
    for _ in range(MOST_SETS):
        buffers = expert_buffers(of, spec.hidden_size, lambda *sizes, dtype=DTYPE: empty(num_rows, *sizes, dtype=dtype))
        chosen = torch.rand(num_rows, of.num_experts, device="cuda").topk(of.num_chosen).indices
        buffers.chosen.copy_(chosen)
        buffers.shares.fill_(1 / of.num_chosen)
        all_buffers.append(buffers)

    def run(ops: TritonOps | TorchOps, buffers: ExpertBuffers) -> Tensor:
        ops.experts(x, weights, of, buffers)
        ops.experts_add(weights, of, buffers, 1.0, stream, readers)
        return buffers.parts

    require_close(ops, run, all_buffers)
    each = sum(matrix.nbytes for matrix in (weights.gates, weights.ups, weights.down) if matrix is not None)
    each = (each if weights.quantized is None else weights.quantized.nbytes) // of.num_experts
    nbytes = sum(len(buffers.chosen.unique()) for buffers in all_buffers) * each // len(all_buffers)
    return [("experts", nbytes, time_graph([partial(run, ops, buffers) for buffers in all_buffers], seconds).p50_us)]


def time_products(config: Any, name: str, num_rows: int, seconds: float) -> list[Time]:
    """Time each product of a layer, and all of them in sequence."""
    spec, ops = describe(config), TritonOps(torch.device("cuda"), 1e-5)
    mlp = spec.layers[0].mlp
    assert mlp is not None
    sizes = {
        "qkv": (spec.heads.qkv_width, spec.hidden_size),
        "out": (spec.hidden_size, spec.heads.q_width),
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
    return cases


def make_linear(num_out: int, num_in: int, name: str) -> Linear:
    """Make random weights, with all codes of the format."""
    if (kind := FORMATS[name]) is None:
        return Linear(torch.randn(num_out, num_in, dtype=DTYPE, device="cuda") * num_in**-0.5)
    format, group_size, zeros = kind
    codes = torch.randint(0, 256 if format == "fp8" else 16, (num_out, num_in), dtype=torch.uint8, device="cuda")
    codes[(codes & 0x7F) == 0x7F] = 0  # NaN in fp8
    groups = num_out, num_in // (group_size or num_in)
    scales = (0.5 + torch.rand(groups, device="cuda")) * num_in**-0.5 / (100 if format == "fp8" else 4)
    zero_of = torch.randint(0, 16, groups, device="cuda") if zeros else None
    quantized = QuantizedWeight.pack(format, codes, scales, group_size, zero_of)
    return Linear(quantized.words, None, quantized)


def linear_bytes(linear: Linear) -> int:
    return linear.weight.nbytes if linear.quantized is None else linear.quantized.nbytes


def empty(*sizes: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.zeros(sizes, dtype=dtype, device="cuda")


def step_of(num_rows: int, num_in: int, num_out: int) -> tuple[Normed, Stream, Readers]:
    """Make a normed input, a residual stream, and the norm that reads it next."""
    x = torch.randn(num_rows, num_in, dtype=DTYPE, device="cuda")
    blocks = torch.nn.functional.pad(x.float().square(), (0, -num_in % 64)).view(num_rows, -1, 64)
    squares = empty(num_squares(num_out), num_rows, dtype=torch.float32)
    stream = Stream(empty(num_rows, num_out), empty(num_rows, num_out), empty(num_rows, num_out), squares)
    return (
        Normed(x, blocks.sum(-1).T.contiguous()),
        stream,
        Readers(torch.ones(num_out, device="cuda")),
    )


Run = Callable[[TritonOps | TorchOps, Linear], Tensor]


def product_of(product: str, num_rows: int, num_in: int, num_out: int) -> Run:
    """Return a product as it occurs in a step: after a norm, with an activation, or added to the residual stream."""
    normed, stream, readers = step_of(num_rows, num_in, num_out)
    out = empty(num_rows, num_out // 2 if product == "gate_up" else num_out)

    def run(ops: TritonOps | TorchOps, linear: Linear) -> Tensor:
        if product == "qkv":
            ops.linear(normed, [linear], out)
        elif product == "gate_up":
            ops.linear(normed, [linear], out, "silu", True)
        else:
            ops.linear_add(normed.x, linear, 1.0, stream, readers)
            return stream.hidden
        return out

    return run


def require_close(ops: TritonOps, run: Callable[[TritonOps | TorchOps, T], Tensor], sets: list[T]) -> None:
    """Compare products with those of decoded weights; exits if one differs."""
    for one in sets[:2]:
        results = []
        for each in (ops, TorchOps(1e-5)):
            run(each, one).zero_()
            results.append(run(each, one).float().clone())
        got, want = results
        difference = float((got - want).norm() / want.norm())
        if not difference < CLOSE:
            raise SystemExit(f"a product is {difference:.3g} from that of decoding first; nothing was timed")


if __name__ == "__main__":
    main()
