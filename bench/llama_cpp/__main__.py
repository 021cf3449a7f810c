"""Compares csattn with llama.cpp on a CPU: the time of a context's prefill, and then of each token.

    pip install llama-cpp-python     # in a venv of its own; it compiles for this CPU
    python -m bench.llama_cpp --python VENV/bin/python --model FILE.gguf [--contexts 4096,16384] [--json FILE]

Both read the same model file and the same text, Python's language reference, and then 48 more tokens, one at a time.
llama.cpp keeps the file's weight format; csattn decodes the weights and rounds them to `--weights`.
"""

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import LlamaFileType
from numpy.typing import NDArray

from bench.accuracy.texts import find_text, tokenize
from bench.records import called
from bench.timing import finish, gate, numbers, options_parser
from csattn.artifact import open_artifact
from csattn.config import SearchConfig, preset
from csattn.cpus import available_cpus
from csattn.models import load_model
from index_build.pipeline import build_artifact
from workers.engine.cpu.engine import CpuEngine
from workers.serving.step_engine import StepRow

NUM_STEPS, WARM_UP = 48, 8


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--python", required=True, help="Python of the environment that has llama-cpp-python")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--contexts", default="4096,16384", help="lengths of contexts, in tokens")
    parser.add_argument("--weights", default="fp8,int4", help="formats that csattn rounds weights to, or as-they-are")
    parser.add_argument("--threads", type=int, default=available_cpus())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cases = []
    token_ids = tokenize(find_text("manual"), load_model(options.model, dtype="bfloat16").tokenizer)
    for context_len in numbers(options.contexts):
        ids = token_ids[: context_len + NUM_STEPS]
        gate(len(ids) == context_len + NUM_STEPS, f"the text has {len(token_ids)} tokens")
        for name in ("llama.cpp", *options.weights.split(",")):
            run = _llama_cpp if name == "llama.cpp" else _csattn
            case = {"context_len": context_len, "by": name, **_measured_fields(run(name, ids, context_len, options))}
            print(case, flush=True)
            cases.append(case)
    finish(
        {"bench": "llama_cpp", "model": called(options.model), "threads": options.threads, "cases": cases}, options.json
    )


def _measured_fields(measured: dict[str, Any]) -> dict[str, Any]:
    steps_ms = measured.pop("steps_ms")[WARM_UP:]
    gate(len(steps_ms) == NUM_STEPS - WARM_UP, f"{len(steps_ms)} steps came")
    return measured | {"step_p50_ms": float(np.median(steps_ms)), "step_most_ms": max(steps_ms)}


def _llama_cpp(_name: str, ids: NDArray[np.int32], context_len: int, options: argparse.Namespace) -> dict[str, Any]:
    child = str(Path(__file__).with_name("child.py"))
    with tempfile.TemporaryDirectory() as scratch:
        (tokens := Path(scratch) / "tokens.json").write_text(json.dumps(ids.tolist()))
        command = [options.python, child, str(options.model), str(tokens), str(context_len), str(options.threads)]
        ended = subprocess.run(command, capture_output=True, text=True)
    gate(ended.returncode == 0, f"llama.cpp ended with {ended.returncode}: {ended.stderr[-1000:]}")
    result: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return {"weights": LlamaFileType(int(result.pop("file_type"))).name.removeprefix("MOSTLY_"), **result}


def _csattn(name: str, ids: NDArray[np.int32], context_len: int, options: argparse.Namespace) -> dict[str, Any]:
    loaded = load_model(options.model, dtype="bfloat16", weights=None if name == "as-they-are" else name)
    steps_ms, config = [], SearchConfig()
    with tempfile.TemporaryDirectory() as store:
        started = time.perf_counter()
        built = build_artifact(loaded, ids[:context_len], preset("default"), store)
        prefill_s, artifact = time.perf_counter() - started, open_artifact(built.path)
        with CpuEngine(
            loaded, max_rows=1, max_requests=1, tail_capacity=NUM_STEPS, num_threads=options.threads
        ) as engine:
            engine.add_context(0, artifact)
            engine.open(0, 0, config, "csattn")
            for token_id in ids[context_len:].tolist():
                started = time.perf_counter()
                result = engine.step([StepRow(0, token_id)])
                steps_ms.append((time.perf_counter() - started) * 1e3)
                gate(len(result.next_ids) == 1, "a step gave no token")
    stored = artifact.manifest.size_bytes
    return {"keep": config.keep, "prefill_s": prefill_s, "steps_ms": steps_ms, "stored_bytes": stored}


if __name__ == "__main__":
    main()
