"""A process that a template forks is what a new interpreter would be: all that it inherits or is given is compared."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.core.parent_death_signal import tied
from tests.plugins import forked_starts
from tests.plugins.forked_starts import Template
from tools.running_cluster import is_alive
from tools.waiting import wait_for

ROOT = Path(__file__).resolve().parents[3]
PROBE = [sys.executable, "-m", "tests.integration.plugins.start_probe"]
Said = tuple[int, dict[str, Any], str]


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    """One template for these tests, independent of the run's own; the probe is found from every folder."""
    found = Template()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        yield found
    found.close()


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    current = vars(subprocess)["_fork_exec"]
    yield
    vars(subprocess)["_fork_exec"] = current


@pytest.fixture(params=["tied", "plain"])
def command(request: pytest.FixtureRequest) -> list[str]:
    return tied(PROBE) if request.param == "tied" else PROBE


def ask(command: list[str], **options: Any) -> Said:
    """Exit status, what the probe found, and what it wrote to stderr."""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    ) as process:
        out, err = process.communicate("some input", timeout=60)
    found = json.loads(out)
    assert found.pop("parent") == os.getpid()
    return process.returncode, found, err


def both(template: Template, command: list[str], **options: Any) -> tuple[Said, Said]:
    """Run the command as a new interpreter, and as a fork."""
    forked_starts.unpatch()
    started = ask(command, **options)
    before = forked_starts.reasons["by forks"]
    forked_starts.patch(template)
    forked = ask(command, **options)
    forked_starts.unpatch()
    assert forked_starts.reasons["by forks"] == before + 1, forked_starts.reasons
    return started, forked


@pytest.mark.parametrize(
    "options",
    [
        {}, {"start_new_session": True}, {"process_group": 0}, {"umask": 0o077}, {"cwd": "/"},
        {"env": {"PATH": "/bin", "HOME": "/nowhere", "odd": "ünïcode \udcff"}},
    ],
    ids=lambda options: ",".join(options) or "as it is",
)  # fmt: skip
def test_a_fork_is_as_a_new_interpreter(template: Template, command: list[str], options: dict[str, Any]) -> None:
    if "env" in options:
        options = {"env": {**options["env"], **forked_starts.fixed(dict(os.environ))}}
    started, forked = both(template, [*command, "an argument", "ünïcode", ""], **options)
    assert forked[1] == started[1]
    assert forked == started


def test_it_inherits_signals_limits_and_descriptors(template: Template, command: list[str]) -> None:
    old_limit, ours = resource.getrlimit(resource.RLIMIT_CORE), os.open(os.devnull, os.O_RDONLY)
    old_handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    old_cores = os.sched_getaffinity(0)
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, old_limit[1]))
        os.sched_setaffinity(0, {min(old_cores)})
        started, forked = both(template, command, pass_fds=[ours])
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, old_limit)
        signal.signal(signal.SIGHUP, old_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        os.sched_setaffinity(0, old_cores)
        os.close(ours)
    assert forked == started
    assert signal.SIGHUP in forked[1]["ignored"]
    assert signal.SIGUSR2 in forked[1]["blocked"]
    assert ours in forked[1]["descriptors"]
    assert forked[1]["cores"] == [min(old_cores)]


@pytest.mark.parametrize(
    ("how", "status"),
    [("--leave", 7), ("--say", 1), ("--raise", 1), ("--kill", -signal.SIGTERM), ("--interrupt", -signal.SIGINT)],
)
def test_it_ends_as_a_new_interpreter_does(template: Template, command: list[str], how: str, status: int) -> None:
    started, forked = both(template, [*command, how])
    assert (started[0], forked[0]) == (status, status)
    assert forked[1] == started[1]
    assert forked[2].splitlines()[-1:] == started[2].splitlines()[-1:]


@pytest.mark.parametrize("how", ["--leave", "--say", "--raise", "--kill", "--interrupt"])
def test_it_becomes_another_program_as_an_exec_does(template: Template, how: str) -> None:
    started, forked = both(template, [sys.executable, "-m", "tests.integration.plugins.owner_program", "--exec", how])
    assert forked[1]["environment"]["NEW"] == "variable"
    assert signal.SIGHUP in forked[1]["ignored"]
    assert forked[:2] == started[:2]
    assert forked[2].splitlines()[-1:] == started[2].splitlines()[-1:]


def test_it_dies_with_who_started_it(template: Template, tmp_path: Path) -> None:
    """Through a process that starts one and is killed: the fork is a child of that one's, not of the template's."""
    said = tmp_path / "said"
    forked_starts.patch(template)
    with subprocess.Popen(
        [sys.executable, "-m", "tests.integration.plugins.owner_program", str(said)], start_new_session=True
    ) as owner:
        wait_for(said.exists)
        pid, parent = map(int, said.read_text().split())
        assert parent == owner.pid
        assert is_alive(pid)
        owner.kill()
    wait_for(lambda: not is_alive(pid), what="it ends with its owner")


def test_a_template_that_was_killed_is_started_again(template: Template) -> None:
    forked_starts.patch(template)
    first = ask(PROBE)
    template.process.kill()
    assert ask(PROBE) == first
    assert template.process.poll() is None


def test_what_a_fork_cannot_be_is_started_as_ever(template: Template) -> None:
    forked_starts.patch(template)
    before = forked_starts.reasons.copy()
    environment = os.environ | {"TANDEM_CPU_LEVEL": "none"}
    assert ask(PROBE, env=environment)[1]["environment"] == environment
    subprocess.run(["true"], check=True)
    assert ask(PROBE, preexec_fn=lambda: os.nice(0))[0] == 0
    assert (forked_starts.reasons - before) == {
        "with another environment": 1, "of other programs": 1, "with what a fork cannot give": 1
    }  # fmt: skip
