"""Threads that compute masks: a task that takes long holds back none of the others for long.

Tasks of matchers that were slow before have a thread of their own. Where another one is, a further thread goes on with
the tasks behind it (`pass_by`), and the one that is busy ends with its task.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue

from tandem.core.thread_priority import yield_cores

MAX_THREADS = 8
"""Of quick tasks, the busy ones among them: then tasks wait for each other."""
Masks = list[bytes]
_Task = tuple["Future[Masks]", Callable[[], Masks]]


class _Thread(threading.Thread):
    """Takes tasks of a queue, one after the other, until there is None or `is_last` is set. `task`: what it is at."""

    def __init__(self, name: str, tasks: SimpleQueue[_Task | None], *, is_slow: bool) -> None:
        super().__init__(name=name)
        self._is_slow = is_slow
        self._tasks = tasks
        self.task: Future[Masks] | None = None
        self.is_last = False

    def run(self) -> None:
        if self._is_slow:
            yield_cores()
        while not self.is_last and (taken := self._tasks.get()) is not None:
            self.task, compute = taken
            if self.task.set_running_or_notify_cancel():
                try:
                    self.task.set_result(compute())
                except BaseException as error:  # noqa: BLE001 - panics of llguidance, too; `result()` raises it
                    self.task.set_exception(error)
            self.task = None


class MaskThreads:
    """Computes masks in the background. All methods are the step loop's."""

    def __init__(self) -> None:
        self._tasks: dict[bool, SimpleQueue[_Task | None]] = {False: SimpleQueue(), True: SimpleQueue()}
        self._threads: list[_Thread] = []
        self._slow: _Thread | None = None

    def submit(self, compute: Callable[[], Masks], *, is_slow: bool) -> Future[Masks]:
        """Begin to compute masks. `is_slow`: it probably takes long."""
        future: Future[Masks] = Future()
        if is_slow and self._slow is None:
            self._slow = self._begun("masks slow", is_slow=True)
        elif not is_slow and not self._threads:
            self._threads.append(self._begun("masks", is_slow=False))
        self._tasks[is_slow].put((future, compute))
        return future

    def pass_by(self, late: Future[Masks]) -> None:
        """Let tasks behind `late`, which took long, be computed beside it."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        for thread in self._threads:
            if thread.task is late and not thread.is_last and len(self._threads) < MAX_THREADS:
                thread.is_last = True
                self._threads.append(self._begun("masks", is_slow=False))
                return

    def close(self) -> None:
        """Cancel what has not begun, and wait for the rest."""
        threads = [*self._threads, *([] if self._slow is None else [self._slow])]
        for tasks in self._tasks.values():
            while (task := _next(tasks)) is not None:
                task[0].cancel()
            for _ in threads:
                tasks.put(None)
        for thread in threads:
            thread.join()

    def _begun(self, name: str, *, is_slow: bool) -> _Thread:
        thread = _Thread(name, self._tasks[is_slow], is_slow=is_slow)
        thread.start()
        return thread


def _next(tasks: SimpleQueue[_Task | None]) -> _Task | None:
    try:
        return tasks.get_nowait()
    except Empty:
        return None
