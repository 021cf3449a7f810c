"""Runs llama.cpp in an environment with `llama-cpp-python`: `python child.py MODEL TOKENS PREFILLED THREADS`.

TOKENS: a JSON file with the token ids of a context and of the text that follows. PREFILLED: the context's number of
tokens. The last line printed is JSON.
"""

import json
import sys
import time
from pathlib import Path

from llama_cpp import Llama, __version__  # type: ignore[import-not-found]


def main(model: str, tokens: str, prefilled: str, threads: str) -> None:
    ids, context_len, num_threads = json.loads(Path(tokens).read_text()), int(prefilled), int(threads)
    llama = Llama(
        model, n_ctx=len(ids) + 8, n_threads=num_threads, n_threads_batch=num_threads, flash_attn=True, verbose=False
    )
    started = time.perf_counter()
    llama.eval(ids[:context_len])
    prefill_s, steps_ms = time.perf_counter() - started, []
    for token_id in ids[context_len:]:
        started = time.perf_counter()
        llama.eval([token_id])
        steps_ms.append((time.perf_counter() - started) * 1e3)
    told = {"version": __version__, "file_type": llama.metadata["general.file_type"]}
    told |= {"prefill_s": prefill_s, "steps_ms": steps_ms, "stored_bytes": llama.save_state().llama_state_size}
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
