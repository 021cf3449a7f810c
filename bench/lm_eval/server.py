"""Runs an unmodified lm-eval in an environment of its own: `python server.py ADDRESS TASK LENGTH TOKENIZER`.

lm-eval needs most of a minute to make a task's samples, so they are made once. Each connection to ADDRESS, a Unix
socket, is a run in a process of its own: it receives settings of `local-completions` and a list of samples, and sends
back a score for each. The server ends when its standard input ends.
"""

import os
import random
import signal
import sys
import traceback
from multiprocessing.connection import Listener
from threading import Thread
from typing import Any

import numpy as np

from lm_eval import simple_evaluate  # type: ignore[import-not-found]
from lm_eval.evaluator import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED  # type: ignore[import-not-found]
from lm_eval.tasks import TaskManager  # type: ignore[import-not-found]


def task_of(name: str, length: int, tokenizer: str) -> Any:
    """Load a task with the samples that lm-eval's command line would make."""
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    [task] = TaskManager(metadata={"max_seq_lengths": [length], "tokenizer": tokenizer}).load([name])["tasks"].values()
    return task


def scores_of(task: Any, length: int, settings: dict[str, Any], samples: list[int]) -> dict[str, float]:
    name = task.config.task
    done = simple_evaluate("local-completions", settings, tasks=[task], samples={name: samples}, bootstrap_iters=0)
    return {str(of["doc_id"]): float(of[str(length)]) for of in done["samples"][name]}


def end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(0)


def main() -> None:
    address, name, length, tokenizer = sys.argv[1:]
    task = task_of(name, int(length), tokenizer)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are not waited for
    Thread(target=end_with_stdin, daemon=True).start()
    with Listener(address, "AF_UNIX") as listener:
        while True:
            connection = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                try:
                    connection.send(scores_of(task, int(length), *connection.recv()))
                except Exception:
                    traceback.print_exc()
                os._exit(0)  # without closing the listener, which would remove the socket
            connection.close()


if __name__ == "__main__":
    main()
