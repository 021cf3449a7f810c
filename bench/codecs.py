"""What do coded rows cost in quality and in time? `python -m bench.codecs [--texts speech,code] [--json FILE]`.

Quality: a model predicts texts over contexts whose rows are kept in each format. KL is relative to full attention over
the rows as built. A format adds the difference between its KL and that of the same selector over the rows as built. The
key error is `offload.codecs.key_error` of the worst layer.
Speed: CPU time of encoding, gathering, and attention in place, each on one thread, over far more rows than any cache
holds. Gates: bytes and values are those of the definition; attention is bit-identical to attention to decoded rows.
"""

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.accuracy.texts import cut_text, find_text
from bench.records import Records, called
from bench.timing import finish, gate, machine, measure
from csattn.artifact import open_artifact
from csattn.attention import in_place
from csattn.attention.in_place_arguments import ARGUMENTS, MAX_PARTS
from csattn.config import SearchConfig, preset
from csattn.cpu.addresses import KindStage
from csattn.cpu.arguments import words_of
from csattn.cpu.tape import Tape
from csattn.cpu.team import Team
from csattn.models import LoadedModel, load_model
from index_build.pipeline import build_artifact
from offload.codecs import reference
from offload.codecs.codec import KvCodec
from offload.codecs.formats import KvFormat
from offload.codecs.key_error import key_error
from offload.coded_store import CodedStore
from offload.host_store import HostStore
from workers import evaluate

FORMATS = ("float16", "bfloat16", "q8_0", "q4_0", "k=q8_0,v=q4_0", "fp8")
SELECTORS = ("csattn", "full")
HEADS, GROUP_SIZE, HEAD_DIM, NUM_ROWS, KEEP = 4, 4, 128, 32768, 0.05  # of the speed measurements


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The cases in which quality is measured."""

    context_len: int
    eval_len: int
    search: SearchConfig
    formats: list[str]


def quality(loaded: LoadedModel, text: str, judged: Judged, done: Records) -> Iterator[dict[str, Any]]:
    """Yield the quality of every selector over rows as built and in each format, except cases in `done`."""
    cut = cut_text(find_text(text), loaded.tokenizer, judged.context_len, judged.eval_len)
    every = [(selector, name) for selector in SELECTORS for name in ("as built", *judged.formats)]
    of = {"model": called(loaded.name), "text": text}
    left = [(selector, name) for selector, name in every if not done.has(**of, selector=selector, format=name)]
    if not left:
        return
    with tempfile.TemporaryDirectory() as store:
        report = build_artifact(loaded, cut.context, preset("default"), Path(store))
        with open_artifact(report.path) as artifact:
            baseline = evaluate.full_attention(loaded, artifact, cut.following)
            for selector, name in left:
                form = None if name == "as built" else KvFormat.parse(name)
                compare = partial(evaluate.measure, loaded, artifact, judged.search, selector, cut.following)
                figures = compare(baseline, kv_format=form).to_json()
                kept = {key: figures[key] for key in ("kl", "nll", "top1_agreement", "output_error")}
                if form is not None:
                    kept["key_error"] = round(max(key_error(layer, form.k) for layer in artifact.indexed_kv()), 3)
                row_bytes = (
                    2 * 4 * loaded.geometry.head_dim if form is None else form.row_bytes(loaded.geometry.head_dim)
                )
                yield {**of, "selector": selector, "format": name, "row_bytes": row_bytes, **kept}


def speed(name: str) -> dict[str, Any]:
    """Time encoding, gathering a selection and attending to it, on one thread.

    name: a format, or "plain " and a dtype for rows without a codec.
    """
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(HEADS, NUM_ROWS, 2, HEAD_DIM, generator=generator)
    q = torch.randn(HEADS * GROUP_SIZE, HEAD_DIM, generator=generator)
    order = [torch.randperm(NUM_ROWS, generator=generator)[: int(KEEP * NUM_ROWS)] for _ in range(HEADS)]
    chosen = torch.stack(order).sort(dim=1).values.int()
    result: dict[str, Any] = {"speed": name}
    if name.startswith("plain"):
        rows: Tensor = kv.to(getattr(torch, name.removeprefix("plain ")))
        store: HostStore | CodedStore = HostStore([rows])
        layout = 2 * HEAD_DIM * rows.itemsize, HEAD_DIM * rows.itemsize, 0, 0
    else:
        codec = KvCodec(KvFormat.parse(name), HEAD_DIM)
        _require_definition(codec, kv[0, :512])
        values = kv[0].numpy()
        encode_ms = measure(lambda: codec.encode(values), seconds=1.0)["cpu_p50_ms"]
        result["encode_gbps"] = round(values.nbytes / encode_ms / 1e6, 2)  # of float32
        store = CodedStore([kv], codec.form)
        rows = store.layers[0]
        layout = codec.row_bytes, codec.v_offset, *codec.readers
        decoded = torch.from_numpy(codec.decode(rows.numpy()))
        plain = _attention(decoded, q, chosen, (8 * HEAD_DIM, 4 * HEAD_DIM, 0, 0))()
        gate(
            torch.equal(_attention(rows, q, chosen, layout)(), plain), f"{name}: attention is not that to decoded rows"
        )
        gate(torch.equal(store.gather(0, chosen), HostStore([decoded]).gather(0, chosen)), f"{name}: gather differs")
    result["row_bytes"] = layout[0]
    gather_ms = measure(lambda: store.gather(0, chosen), seconds=1.0)["cpu_p50_ms"]
    result["gather_ns_per_row"] = round(gather_ms * 1e6 / chosen.numel(), 1)
    attend_ms = measure(_attention(rows, q, chosen, layout), seconds=1.0)["cpu_p50_ms"]
    result["attend_us_per_row"] = round(attend_ms * 1e3 / chosen.numel(), 4)  # a KV head's row, for all its query heads
    return result


def _require_definition(codec: KvCodec, kv: Tensor) -> None:
    coded, values = codec.encode(kv.numpy()), kv.numpy()
    for i, form in enumerate((codec.form.k, codec.form.v)):
        part = coded[:, : codec.v_offset] if i == 0 else coded[:, codec.v_offset :]
        gate(bool((part == reference.encode(form, values[:, i])).all()), f"{form.name} encodes otherwise than defined")
        want = reference.decode(form, part, codec.head_dim)
        gate(bool((codec.decode(coded)[:, i] == want).all()), f"{form.name} decodes otherwise than defined")


def _attention(rows: Tensor, q: Tensor, chosen: Tensor, layout: tuple[int, int, int, int]) -> Any:
    """Return a function that attends to every head's chosen rows and a tail of one row, and returns the outputs."""
    kind = str(rows.dtype).removeprefix("torch.") if layout[2] == 0 else "float32"
    tail = torch.zeros(HEADS, 1, 2, HEAD_DIM, dtype=getattr(torch, kind))
    num_ranges = in_place.num_ranges(chosen.shape[1] + 1)
    by_row = {
        "num_rows": [1], "kv": [rows.data_ptr()], "context_lens": [NUM_ROWS], "sink_ends": [0],
        "window_starts": [NUM_ROWS, 0], "num_index_heads": [HEADS], "top_ks": [chosen.shape[1], 0],
        "kv_indices": [chosen.data_ptr(), 0], "moments": [0], "sketches": [0, 0], "rests": [0, 0], "tail_ids": [0],
        "tail_lens": [1],
        **dict(zip(("row_bytes", "v_offsets", "k_readers", "v_readers"), ([x] for x in layout), strict=True)),
    }  # fmt: skip
    arrays: dict[str, Any] = {name: np.array(values, np.int64) for name, values in by_row.items()}
    valid_len = np.full(HEADS, chosen.shape[1], np.int32)
    arrays["valid_lens"] = np.array([valid_len.ctypes.data, 0], np.int64)
    arrays["softmax_scale"] = np.array([HEAD_DIM**-0.5])
    arrays["parts"] = np.empty((HEADS * GROUP_SIZE, MAX_PARTS, HEAD_DIM + 2), np.float32)
    arrays["out"] = out = np.empty((HEADS * GROUP_SIZE, HEAD_DIM), np.float32)
    sizes = {
        "q": q.data_ptr(), "num_q_heads": HEADS * GROUP_SIZE, "num_kv_heads": HEADS, "head_dim": HEAD_DIM,
        "own_rows": 1, "tails": tail.data_ptr(), "tail_capacity": 1, "max_index_heads": HEADS, "max_ranges": num_ranges,
    }  # fmt: skip
    unused = "queries", "query_bytes", "max_rest_ranges", "logit_cap", "sinks"  # no sketch, plain logits
    values = {name: array.ctypes.data for name, array in arrays.items()} | sizes | dict.fromkeys(unused, 0)
    arguments = words_of(ARGUMENTS, values)
    tape, team = Tape(), Team(1)
    tape.add(KindStage(in_place.attend_stage, kind), arguments, HEADS * num_ranges)
    tape.add(in_place.merge_stage, arguments, HEADS * GROUP_SIZE)
    kept = rows, q, chosen, tail, valid_len, arrays  # keeps alive what the arguments point to

    def run() -> Tensor:
        assert kept
        team.run(tape)
        return torch.from_numpy(out.copy())

    return run


def table(cases: list[dict[str, Any]]) -> str:
    """Return Markdown tables: the quality for each text and selector, then speed."""
    lines = [
        "| model | text | selector | format | bytes per row | KL | added | top-1 |",
        "|---|---|---|---|---:|---:|---:|---:|",
    ]
    built = {(c["model"], c["text"], c["selector"]): c["kl"] for c in cases if c.get("format") == "as built"}
    for c in (c for c in cases if "text" in c):
        added = c["kl"] - built[c["model"], c["text"], c["selector"]]
        figures = f"{c['kl']:.5f} | {added:+.5f} | {c['top1_agreement']:.3f}"
        lines.append(f"| {c['model']} | {c['text']} | {c['selector']} | {c['format']} | {c['row_bytes']} | {figures} |")
    lines += [
        "",
        "| rows | bytes per row | encode, GB/s | gather, ns/row | attend, µs/row |",
        "|---|---:|---:|---:|---:|",
    ]
    for c in (c for c in cases if "speed" in c):
        figures = f"{c.get('encode_gbps', '')} | {c['gather_ns_per_row']} | {c['attend_us_per_row']}"
        lines.append(f"| {c['speed']} | {c['row_bytes']} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", default="speech,code", help="texts, comma-separated; may be empty")
    parser.add_argument("--model")
    parser.add_argument("--context-len", type=int, default=4096)
    parser.add_argument("--eval-len", type=int, default=256)
    parser.add_argument("--keep", type=float, default=KEEP)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--no-speed", action="store_true", help="measure quality only")
    parser.add_argument("--json", type=Path, help="file for the figures; cases already in it are not measured again")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shape = {"heads": HEADS, "group_size": GROUP_SIZE, "head_dim": HEAD_DIM, "rows": NUM_ROWS, "keep": KEEP}
    judged = Judged(
        context_len=arguments.context_len,
        eval_len=arguments.eval_len,
        search=SearchConfig(keep=arguments.keep),
        formats=arguments.formats,
    )
    settings = {name: of for name, of in asdict(judged).items() if name != "formats"} | {"timed": shape}
    header = {"bench": "codecs", **settings, "machine": machine()}
    records = Records(arguments.json, header, ("model", "text", "selector", "format", "speed"), tuple(settings))
    for name in ("plain float32", "plain bfloat16", "plain float16", *FORMATS):
        if not arguments.no_speed and not records.has(speed=name):
            records.add(speed(name))
    texts = [name for name in arguments.texts.split(",") if name]
    loaded = load_model(arguments.model, "float32") if texts else None
    for text in texts:
        assert loaded is not None
        for case in quality(loaded, text, judged, records):
            records.add(case)
            print(f"{text:8} {case['selector']:8} {case['format']:16} KL {case['kl']:.5f}", flush=True)
    print(table(records.cases))
    finish(records.content, arguments.json)


if __name__ == "__main__":
    main()
