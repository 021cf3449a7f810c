"""A thread that stands behind others, and no other with it."""

import os
import sys
import threading

import pytest

from csattn.cpus import stand_behind


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no niceness of their own")
def test_the_calling_thread_alone_stands_behind() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before, seen = niceness(), list[int]()

    def behind() -> None:
        stand_behind(3)
        seen.append(niceness())

    thread = threading.Thread(target=behind)
    thread.start()
    thread.join()
    assert seen == [min(19, before + 3)] and niceness() == before
