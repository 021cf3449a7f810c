"""Processes that start at once: a server that has imported what they need forks them.

A process has one such server, which imports the modules that were named before it started. So all tests use this list.
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
