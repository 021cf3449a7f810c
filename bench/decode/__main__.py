"""How fast a decode step runs on a GPU, over context lengths, batch sizes, placements and schedules.

    python -m bench.decode record [--recording FILE]             once, where the demo model is
    python -m bench.decode op  --out FILE [--contexts 16384,131072] [--batches 1,4] [--variants full,default] [--shared]
    python -m bench.decode e2e --out FILE [--placements device,host+2] [--contexts ...] [--batches ...] [--shared]
                               [--weights bf16,fp8,int4,mxfp4] [--schedules 'every step'] [--shape gpt-oss-20b]

`op` times one layer's attention, `e2e` the whole model (`host+2`: with two search workers). With `--shared`, all
requests of a batch continue one context. Variant `full` is torch's fastest full attention, `all` the engine's own;
`kivi-2`, `kivi-4`, `turboquant-3.5` and `q4_0` read all rows in few bits (see low_bit_rows.py); `lists+moments` and
`default+none` treat the rows that are not chosen in another way. Cases that a file already holds are not measured
again. Rows and queries are recorded from a small model (see recording.py) and adapted to the shape and length (see
widened.py).
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.decode.options import KEY, SCHEDULES, SLOTS
from bench.decode.recording import default_path, load_recording
from bench.records import Records
from bench.timing import GateError, finish, gate, numbers
from csattn.config import SearchConfig
from csattn.errors import CsattnError

CONTEXT_LENS = "8192,16384,32768,65536,131072,262144,524288,1048576"
VARIANTS = {"op": "full,default", "e2e": "full,streamed,window,default,lists"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record", help="run the demo model and save the rows that the benchmarks need")
    op = commands.add_parser("op", help="measure one layer's attention")
    e2e = commands.add_parser("e2e", help="measure whole steps")
    for command in (record, op, e2e):
        command.add_argument("--recording", type=Path, default=default_path())
    for name, command in (("op", op), ("e2e", e2e)):
        command.add_argument("--out", type=Path)
        command.add_argument("--contexts", type=numbers, default=numbers(CONTEXT_LENS))
        command.add_argument("--batches", type=numbers, default=[1, 4, 8])
        command.add_argument("--variants", type=_names, default=_names(VARIANTS[name]))
        command.add_argument("--shape", default="llama-3.1-8b", help="model shape of bench.shapes; e2e takes several")
        command.add_argument("--keep", type=float, default=SearchConfig().keep)
        command.add_argument("--seconds", type=float, default=0.3, help="time to measure each figure")
        command.add_argument("--shared", action="store_true", help="all requests of a batch continue the same context")
    e2e.add_argument("--placements", type=_names, default=_names("device,hybrid,host"))
    e2e.add_argument(
        "--weights", type=_names, default=["bf16"], help="formats of weights: bf16, fp8, int4; mxfp4 for experts only"
    )
    e2e.add_argument("--steps", type=int, default=192, help="timed steps per case")
    e2e.add_argument("--search-period", type=int, default=1, help="tokens from one search of a request to its next")
    e2e.add_argument("--kv-codec", help="format of the contexts' rows, such as q8_0, in csattn's and streamed variants")
    e2e.add_argument(
        "--slots", type=float, help=f"share of a context's rows cached on the device in hybrid and host [{SLOTS}]"
    )
    e2e.add_argument(
        "--device-gb", type=float, help="limit on all allocations on the device, as if it had no more memory"
    )
    e2e.add_argument("--as-ampere", action="store_true", help="treat the GPU as an older and smaller one")
    e2e.add_argument(
        "--schedules",
        type=_names,
        default=list(SCHEDULES),
        help="schedules of csattn's variants [default: %(default)s]",
    )
    arguments = parser.parse_args()
    if arguments.command == "record":
        from bench.decode.record import record_demo  # the other commands need no model

        record_demo(arguments.recording)
    else:
        try:
            _measure(arguments)
        except (CsattnError, GateError) as error:
            raise SystemExit(f"error: {error}") from error


def _measure(arguments: argparse.Namespace) -> None:
    import torch

    from bench.decode import end_to_end, op
    from bench.decode.gpu_timing import ceilings, device_machine
    from bench.decode.options import Options
    from bench.decode.variants import require_known
    from bench.shapes import config_named, shape_named
    from offload.codecs.formats import KvFormat

    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device, and torch finds none; `record` works without")
    if as_ampere := getattr(arguments, "as_ampere", False):
        import pytest

        from tests.ampere import take_for_ampere

        take_for_ampere(pytest.MonkeyPatch())
    search = SearchConfig(keep=arguments.keep, search_period=getattr(arguments, "search_period", 1))
    require_known(arguments.variants, op.OTHERS if arguments.command == "op" else end_to_end.OTHERS, search)
    machine = device_machine()
    earlier = json.loads(arguments.out.read_text()) if arguments.out and arguments.out.exists() else {}
    rates = earlier["ceilings"] if earlier.get("machine") == machine else ceilings()
    recording = load_recording(arguments.recording)
    header: dict[str, Any] = {"machine": machine, "ceilings": rates, "shape": arguments.shape, "keep": arguments.keep}
    header |= {"recording": recording.describe()}
    torch.cuda.empty_cache()
    if (device_gb := getattr(arguments, "device_gb", None)) is not None:
        header["device_gb"] = device_gb
        torch.cuda.set_per_process_memory_fraction(device_gb * 1e9 / machine["hbm_bytes"])
    print(json.dumps(header), flush=True)
    names, schedules = _names(arguments.shape), tuple(getattr(arguments, "schedules", ()))
    gate(set(schedules) <= set(SCHEDULES), f"schedules are {', '.join(SCHEDULES)}, not {', '.join(schedules)}")
    options = Options(
        shape=shape_named(names[0]),
        search=search,
        ceilings=header["ceilings"],
        seconds=arguments.seconds,
        num_steps=getattr(arguments, "steps", 0),
        slots=getattr(arguments, "slots", None),
        schedules=schedules,
        kv_format=KvFormat.parse(arguments.kv_codec) if getattr(arguments, "kv_codec", None) else None,
        is_shared=getattr(arguments, "shared", False),
        as_ampere=as_ampere,
    )
    fixed = ["recording", *(["shape"] if len(names) == 1 else []), *(["keep"] if arguments.command == "op" else [])]
    results = Records(arguments.out, {"bench": "decode", **header}, KEY, tuple(fixed))
    sizes = arguments.contexts, arguments.batches, arguments.variants
    if arguments.command == "op":
        op.run_op_cases(results, recording, options, *sizes)
    for name in names if arguments.command == "e2e" else ():
        if len(names) > 1:
            options = replace(options, shape=shape_named(name), shape_name=name)
        which = results, recording, config_named(name), options
        end_to_end.run_end_to_end(*which, *sizes, arguments.placements, arguments.weights)
    finish(results.content, None)  # the file already has every case, and the header of its last run


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


if __name__ == "__main__":
    main()
