"""Threads of masks: a task that takes long holds back no other, and all threads end."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from tandem.engine.mask_threads import MAX_THREADS, Masks, MaskThreads


class Blocked:
    """A task that ends when `opened` is set."""

    def __init__(self) -> None:
        self.begun, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> Masks:
        self.begun.set()
        assert self.opened.wait(20)
        return [b"late"]


@pytest.fixture
def threads() -> Iterator[MaskThreads]:
    before = set(threading.enumerate())  # engines of other tests in this process may hold threads of these names
    made = MaskThreads()
    yield made
    made.close()
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name.startswith("masks")]


def quick(threads: MaskThreads) -> Future[Masks]:
    return threads.submit(lambda: [b"quick"], is_slow=False)


def test_tasks_behind_a_late_one_are_computed_beside_it(threads: MaskThreads) -> None:
    blocked = Blocked()
    late = threads.submit(blocked, is_slow=False)
    assert blocked.begun.wait(20)
    behind = quick(threads)
    assert not behind.done()
    threads.pass_by(late)
    assert behind.result(20) == [b"quick"]
    assert not late.done()
    blocked.opened.set()
    assert late.result(20) == [b"late"]
    assert quick(threads).result(20) == [b"quick"]


def test_slow_tasks_have_a_thread_of_their_own(threads: MaskThreads) -> None:
    blocked = Blocked()
    late = threads.submit(blocked, is_slow=True)
    assert blocked.begun.wait(20)
    assert quick(threads).result(20) == [b"quick"]
    blocked.opened.set()
    assert late.result(20) == [b"late"]


def test_threads_have_a_bound(threads: MaskThreads) -> None:
    tasks = [Blocked() for _ in range(MAX_THREADS + 1)]
    futures = [threads.submit(task, is_slow=False) for task in tasks]
    for task, future in zip(tasks[:-1], futures, strict=False):
        assert task.begun.wait(20)
        threads.pass_by(future)
    assert not tasks[-1].begun.is_set()
    for task in tasks:
        task.opened.set()
    assert [future.result(20) for future in futures] == [[b"late"]] * len(tasks)


def test_an_error_is_raised_by_the_result_alone(threads: MaskThreads) -> None:
    def fail() -> Masks:
        raise ValueError("no mask")

    failed = threads.submit(fail, is_slow=False)
    with pytest.raises(ValueError, match="no mask"):
        failed.result(20)
    assert quick(threads).result(20) == [b"quick"]
