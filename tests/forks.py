"""Processes that are up at once: forked by a server that has imported what they need.

A process has one such server, whose imports are those that were named before it started: all tests name the same.
"""

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "workers.searchers.worker",
        "tests.workers.searchers.warm",
        "tests.index_build.test_pipeline",
        "tests.index_build.warm",
    ]
)
