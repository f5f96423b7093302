"""A thread that yields cores has a lower priority, and it alone."""

import os
import threading

from tandem.core.thread_priority import NICENESS, yield_cores


def test_a_thread_alone_yields() -> None:
    found: list[int] = []

    def work() -> None:
        yield_cores()
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [max(before, NICENESS)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
