"""What an index costs to build: prefill alone, with the index, and with both written; and peak memory with its bound.

    python -m bench.build [--device cpu|cuda] [--contexts 8191] [--preset default] [--json FILE]
    python -m bench.build --device cuda --shape llama-3.1-8b --contexts 131072
    python -m bench.build --device cuda --shape llama-3.1-8b --contexts 8192 32768 131071 --prefill [--layers 3]

Gate: the finished artifact verifies. Memory bound on a CPU: model + one layer's q, k, v + one layer's index + 1 GiB.
With --shape, the parts of the index work are measured on made-up queries and keys (`build_parts.py`). With --shape and
--prefill, a whole build is measured instead, for a model of that shape with random weights and --layers layers. A
short build and one layer of each length run first, so no compilation or planning is timed. On a GPU, memory is
page-locked in the build that writes nothing. Files go to the temporary directory (TMPDIR).
"""

import resource
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench import build_parts
from bench.shapes import config_named
from bench.timing import finish, gate, options_parser
from csattn.artifact import open_artifact, verify_artifact
from csattn.config import IndexConfig
from csattn.cpus import available_cpus
from csattn.models import LoadedModel, load_model
from csattn.models.loader import wrap_model
from csattn.models.text_part import class_of
from index_build.build_layers import index_and_fit, make_fit
from index_build.capture import prefill
from index_build.inputs import make_config
from index_build.outbox import make_outbox
from index_build.pipeline import build_artifact
from tests.tiny import byte_tokenizer

TEXT = Path(__file__).parent / "texts" / "novel.txt"
GIB = 2**30


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def text_ids(loaded: LoadedModel, context_len: int) -> NDArray[np.int32]:
    return np.resize(np.asarray(loaded.tokenizer(TEXT.read_text()).input_ids, dtype=np.int32), context_len)


def byte_ids(context_len: int) -> NDArray[np.int32]:
    """Return the novel's bytes, which begin again at its end, as tokens of a `random_model`: [context_len]."""
    return np.resize(np.frombuffer(TEXT.read_bytes(), np.uint8), context_len).astype(np.int32)


def random_model(shape_name: str, num_layers: int | None, device: str) -> LoadedModel:
    """Return a model of that shape with random weights in bfloat16, and a token for each byte."""
    layers = {} if num_layers is None else {"num_hidden_layers": num_layers}
    config = config_named(shape_name, tie_word_embeddings=True, **layers)  # saves memory; nothing is generated
    with torch.device(device):
        model = class_of(config)._from_config(config, dtype=torch.bfloat16).eval()
    return wrap_model(model, byte_tokenizer(chat_template=None), f"random-{shape_name}")


def prefill_seconds(loaded: LoadedModel, ids: NDArray[np.int32], config: IndexConfig | None) -> float:
    """Time a prefill that drops its layers. With a config, they are first indexed and copied to the host."""
    started, sizes = time.perf_counter(), loaded.geometry
    layer_bytes = 2 * sizes.num_kv_heads * len(ids) * sizes.head_dim * loaded.dtype.itemsize
    with ThreadPoolExecutor(available_cpus()) as threads, make_outbox(loaded.device, layer_bytes) as outbox:
        for capture, hidden_out in prefill(loaded.model, torch.from_numpy(ids).long()):
            if config is not None:
                fit = make_fit(loaded, capture, hidden_out)
                outbox.send(capture.kv, partial(index_and_fit, fit, capture, config, threads), lambda arrays: None)
                if capture.is_single_buffered:
                    outbox.wait_until_read()
    return time.perf_counter() - started


def run(loaded: LoadedModel, ids: NDArray[np.int32], config: IndexConfig) -> dict[str, Any]:
    """Build an artifact in a scratch directory and measure time and memory. ids: [context_len]."""
    geometry, context_len, on_gpu = loaded.geometry, len(ids), loaded.device.type == "cuda"
    model_bytes = sum(p.numel() * p.element_size() for p in loaded.model.parameters())
    next(prefill(loaded.model, torch.from_numpy(ids).long()))  # warm-up: kernels are planned for each number of rows
    alone_s, indexed_s = prefill_seconds(loaded, ids, None), prefill_seconds(loaded, ids, config)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    before = peak_bytes()
    with tempfile.TemporaryDirectory() as store:
        started = time.perf_counter()
        report = build_artifact(loaded, ids, config, Path(store))
        wall_s = time.perf_counter() - started
        peak = peak_bytes()
        verify_artifact(report.path)
        gate(not report.reused, "the artifact was there already")
        with open_artifact(report.path) as artifact:
            index_bytes, size = artifact.index_bytes, artifact.size_bytes
    heads = geometry.num_q_heads + 2 * geometry.num_kv_heads
    qkv = heads * context_len * geometry.head_dim * loaded.dtype.itemsize
    kv_bytes = 2 * 2 * geometry.num_layers * geometry.num_kv_heads * context_len * geometry.head_dim
    bound = round(model_bytes + qkv + index_bytes / geometry.num_layers + GIB)
    case = {
        "context_len": context_len,
        "prefill_s": round(alone_s, 3),
        "with_index_s": round(indexed_s, 3),
        "written_s": round(wall_s, 3),
        "phases_s": {phase: round(value, 3) for phase, value in report.seconds.items()},
        "index_share": round((indexed_s - alone_s) / indexed_s, 4),
        "artifact_bytes": size,
        "index_bytes": index_bytes,
        "index_over_16_bit_kv": round(index_bytes / kv_bytes, 4),
        "peak_bytes": peak,
        "peak_before_build_bytes": before,
        "device_peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "bound_bytes": None if on_gpu else bound,
    }
    memory = f"{peak / GIB:.2f} GiB" + ("" if on_gpu else f" of {bound / GIB:.2f} GiB allowed")
    print(
        f"{context_len} tokens: prefill {alone_s:.2f} s, with the index {indexed_s:.2f} s ({case['index_share']:.1%} "
        f"of it), written {wall_s:.2f} s ({size / wall_s / 1e9:.2f} GB/s); "
        f"index {index_bytes / 2**20:.1f} MiB, {case['index_over_16_bit_kv']:.2%} of a 16-bit KV; "
        f"peak memory {memory}",
        flush=True,
    )
    return case


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--contexts", nargs="+", type=int, default=[8191], help="lengths of contexts, in tokens")
    parser.add_argument("--preset", default="default")
    parser.add_argument("--model", help="model directory, .gguf file or hub id [default: the installed SmolLM2-135M]")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--shape", help="use made-up queries and keys of this model shape; with --prefill, random weights"
    )
    parser.add_argument("--layers", type=int, help="layers of the shape to use [default: all]")
    parser.add_argument(
        "--prefill", action="store_true", help="build an artifact with a model of the shape and random weights"
    )
    given = parser.parse_args()
    if given.shape and not given.prefill:
        device = torch.device(given.device)
        finish(build_parts.run(given.shape, given.contexts, given.layers, device), given.json)
        return
    loaded = (
        random_model(given.shape, given.layers, given.device)
        if given.shape
        else load_model(given.model, "float32", device=given.device)
    )
    config = make_config(given.preset, {}, given.device)

    def ids_of(context_len: int) -> NDArray[np.int32]:
        if not given.shape:
            return text_ids(loaded, context_len)
        return np.random.default_rng(0).integers(0, loaded.geometry.vocab_size, context_len, dtype=np.int32)

    with tempfile.TemporaryDirectory() as store:
        build_artifact(loaded, ids_of(min(given.contexts) // 2), config, Path(store))
    cases = [run(loaded, ids_of(context_len), config) for context_len in given.contexts]
    result = {"bench": "build", "model": loaded.name, "num_layers": loaded.geometry.num_layers}
    result |= {"device": torch.cuda.get_device_name() if given.device == "cuda" else "cpu"}
    result |= {"dtype": str(loaded.dtype).removeprefix("torch."), "index_config": config.to_json()}
    finish(result | {"cases": cases}, given.json)


if __name__ == "__main__":
    main()
