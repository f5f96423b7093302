"""Leave nothing behind: processes and temporary files of a test run end with it, also when the run is killed.

Every run carries an id in its environment, which all processes inherit that it starts, and has a temporary folder of
its own. A keeper, `python -m tests.plugins.leftovers PID ID FOLDER`, waits for the end of the run's process, however
it comes. Then it ends the processes that carry the id or name the folder on their command line, and removes it.
"""

import contextlib
import os
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

VARIABLE = "TANDEM_TEST_RUN"
GRACE_S = 10.0
"""Between SIGTERM, at which a cluster stops its own processes, and SIGKILL."""


class Leftovers:
    """The plugin of the process that the tests were started in; processes of pytest-xdist belong to its run."""

    def __init__(self) -> None:
        self.run_id = secrets.token_hex(8)
        self.folder = Path(tempfile.mkdtemp(prefix="tdr-", dir="/tmp"))
        os.environ[VARIABLE], os.environ["TMPDIR"] = self.run_id, str(self.folder)
        tempfile.tempdir = None  # looked up anew
        command = [sys.executable, "-m", __name__, str(os.getpid()), self.run_id, str(self.folder)]
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
        self._keeper = subprocess.Popen(
            command, cwd=Path(__file__).parents[2], stdin=subprocess.DEVNULL, start_new_session=True, env=environment
        )

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A process that outlives the tests, and those of pytest-xdist, fails the run."""
        _, alive = psutil.wait_procs(self._outliving(), timeout=GRACE_S)
        if alive:
            print(f"\nProcesses of this run are left after {GRACE_S:g} s:")
            for process in alive:
                print(f"  {process.pid} {command_of(process)}")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _outliving(self) -> list[psutil.Process]:
        """Processes of the run, and all descendants: one in the middle of its exec has no environment yet."""
        workers = [p for p in psutil.Process().children() if "execnet" in command_of(p) or p.pid == self._keeper.pid]
        found = {*belonging(self.run_id, self.folder), *filter(is_running, psutil.Process().children(recursive=True))}
        return [process for process in found if process not in workers]


def belonging(run_id: str, folder: Path) -> list[psutil.Process]:
    """Processes that carry the id or name the folder, but this one."""
    mark, place = f"{VARIABLE}={run_id}".encode(), os.fsencode(folder)
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, psutil.Error):
            is_ours = mark in (path / "environ").read_bytes().split(b"\0") or place in (path / "cmdline").read_bytes()
            if is_ours and int(path.name) != os.getpid():
                process = psutil.Process(int(path.name))
                if is_running(process):
                    found.append(process)
    return found


def is_running(process: psutil.Process) -> bool:
    """True unless it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def command_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def end_all(run_id: str, folder: Path, grace_s: float = GRACE_S) -> None:
    """End what belongs to a run, with SIGTERM and then with SIGKILL, until nothing does."""
    left = belonging(run_id, folder)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    psutil.wait_procs(left, timeout=grace_s)
    while left := belonging(run_id, folder):
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=1.0)


def main() -> int:
    pid, run_id, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll()
    end_all(run_id, folder)
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
