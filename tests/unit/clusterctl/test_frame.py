"""Features of all commands: a table that loads late, help with examples, suggestions, documents, exit codes."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
import yaml

from tandem.clusterctl import commands, exit_codes, output
from tandem.clusterctl import main as program
from tandem.clusterctl.exit_codes import Exit
from tandem.core import errors
from tests.unit.clusterctl.command_tree import ALL, flags_of

ROOT = Path(__file__).resolve().parents[3]
HEAVY = (
    "torch",
    "ray",
    "redis",
    "grpc",
    "fastapi",
    "starlette",
    "uvicorn",
    "numpy",
    "matplotlib",
    "transformers",
    "tokenizers",
)


each_command = pytest.mark.parametrize("words", ALL, ids=" ".join)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = program.run(list(arguments))
    return code, *capsys.readouterr()


# ---- help ----------------------------------------------------------------------------------------------------------


@each_command
def test_every_command_has_help_with_an_example_that_is_right(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    code, out, _ = run(capsys, *words, "--help")
    assert code == 0
    lines = out.partition("Examples:")[2].strip().splitlines()
    assert lines
    for line in lines:
        called, *rest = shlex.split(line.partition(">")[0].partition("<")[0])
        assert called == "clusterctl"
        assert tuple(rest[: len(words)]) == words, line
        flags = {word for word in rest if word.startswith("-") and word != "-"}
        assert flags <= flags_of(words), line


def test_the_table_says_what_the_commands_say() -> None:
    loaded = typer.main.get_command(program.app).commands  # type: ignore[attr-defined]
    for name, listed in commands.COMMANDS.items():
        assert listed.summary.endswith(".")
        first = " ".join(loaded[name].help.split("\n\n")[0].split())
        words = set(re.findall(r"\w+", listed.summary.lower()))
        assert len(words & set(re.findall(r"\w+", first.lower()))) >= min(3, len(words)), (name, first)


HELP_OF_ALL = """
import contextlib, io, json, os, sys
from tandem.clusterctl import main

heavy, asked = json.load(sys.stdin)
for words in asked:
    if os.fork():  # each in a process that has imported what all commands share
        os.wait()
        continue
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = main.run([*words, "--help"])
    print(json.dumps([words, code, [name for name in heavy if name in sys.modules], said.getvalue()]), flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def helped() -> dict[tuple[str, ...], tuple[int, list[str], str]]:
    """Return, by command: the exit code of its help, heavy modules that were imported for it, and its output."""
    asked = json.dumps([HEAVY, [(), *[(name,) for name in commands.COMMANDS], *ALL]])
    command = [sys.executable, "-c", HELP_OF_ALL]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == ""
    lines = map(json.loads, done.stdout.splitlines())
    return {tuple(words): (code, heavy, said) for words, code, heavy, said in lines}


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), *[(name,) for name in commands.COMMANDS], *ALL], ids=" ".join)
def test_help_imports_nothing_heavy(
    helped: dict[tuple[str, ...], tuple[int, list[str], str]], words: tuple[str, ...]
) -> None:
    """That is what makes it slow; an import is what a test can hold, a time is not."""
    code, heavy, said = helped[words]
    assert (code, heavy) == (0, [])
    assert "Usage: clusterctl" in said


@pytest.mark.slow
def test_the_list_of_commands_imports_no_command() -> None:
    code = (
        "import sys; from tandem.clusterctl import main; main.run(['--help']); "
        "print(*sorted(name for name in sys.modules if name.startswith('tandem.')), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    modules = set(done.stderr.split())
    assert "tandem.clusterctl.commands" in modules
    assert not modules & {f"tandem.clusterctl.{listed.module}" for listed in commands.COMMANDS.values()}
    assert set(re.findall(r"^  (\w+)  ", done.stdout, flags=re.MULTILINE)) >= set(commands.COMMANDS)


# ---- mistakes ------------------------------------------------------------------------------------------------------


@each_command
def test_every_command_knows_the_flag_that_was_meant(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    flags = [flag for parameter in ALL[words].params for flag in parameter.opts if flag.startswith("--")]
    meant = flags[0] if flags else "--help"
    code, out, error = run(capsys, *words, f"{meant[:-2]}{meant[-1]}{meant[-2]}q")
    assert (code, out) == (Exit.USAGE, "")
    assert len(error.splitlines()) == 1
    assert "Did you mean" in error
    assert repr(meant) in error
    assert f"See `clusterctl {' '.join(words)} --help`." in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["statsu"], "no such command 'statsu'. Did you mean 'status'"),
        (["kv", "audti"], "no such command 'audti'. Did you mean 'audit'?"),
        (
            ["status", "-o", "jsn"],
            "--output is 'jsn', which is not one of 'table', 'wide', 'json', 'yaml'. Did you mean",
        ),
        (["up", "--disaggregation", "allways"], "Did you mean 'always'?"),
        (["completion", "fsh"], "Did you mean 'fish'"),
        (["up", "--prefill", "two"], "invalid value for '--prefill': "),
        (["up", "--port"], "requires an argument. See `clusterctl"),
        (["key", "revoke"], "missing argument 'KEY'. See `clusterctl key revoke --help`."),
        (["zzzz"], "no such command 'zzzz'. See `clusterctl --help`."),
    ],
)
def test_mistakes_say_what_was_meant(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    code, out, error = run(capsys, *arguments)
    assert (code, out) == (Exit.USAGE, "")
    assert message.lower() in error.lower()
    assert len(error.splitlines()) == 1


def test_no_command_at_all_is_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = run(capsys)
    assert (code, out) == (Exit.USAGE, "")
    assert error.startswith("Usage: clusterctl")


# ---- exit codes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InternalError, 1), (errors.UnavailableError, 1), (errors.CapacityError, 1), (errors.WorkerLostError, 1),
        (errors.ConfigError, 2), (errors.ModelError, 2), (errors.InvalidRequestError, 2),
        (errors.NotFoundError, 3), (errors.UnknownModelError, 3),
        (errors.AuthError, 4), (errors.PermissionDeniedError, 4),
        (errors.ConflictError, 5), (errors.DeadlineError, 6),
    ],
)  # fmt: skip
def test_which_error_ends_with_which_code(error: type[errors.TandemError], code: int) -> None:
    assert exit_codes.code_of(error("x")) == code


def test_a_conflict_crosses_the_wire() -> None:
    assert isinstance(errors.from_code("conflict", "somebody was first"), errors.ConflictError)
    assert errors.STATUS["conflict"] == (409, "ABORTED")


def test_the_codes_are_documented() -> None:
    page = (ROOT / "docs" / "clusterctl.md").read_text()
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", page, flags=re.MULTILINE)
    assert {int(number): name for number, name in rows} == {code.value: code.name for code in Exit}


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem.clusterctl.meta import version

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(version, "release", interrupted)
    assert program.run(["version", "--client"]) == Exit.INTERRUPTED


# ---- what is printed -----------------------------------------------------------------------------------------------


def test_one_document_in_two_notations(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = run(capsys, "version", "--client", "-o", "json")
    found = json.loads(text)
    assert (code, found["apiVersion"], found["kind"], found["cluster"]) == (0, "tandem/v1", "Version", None)
    assert yaml.safe_load(run(capsys, "version", "--client", "--output", "yaml")[1]) == found
    assert json.loads(run(capsys, "version", "--client", "--json")[1]) == found
    assert run(capsys, "version", "--client")[1].startswith(f"clusterctl {found['client']} (Python ")


def test_a_stream_is_a_document_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2):
        output.Output(as_json=True).stream("Line", {"n": number}, str)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"apiVersion": "tandem/v1", "kind": "Line", "n": number} for number in (1, 2)]
    output.Output(output=output.Format.YAML).stream("Line", {"n": 3}, str)
    output.Output(output=output.Format.YAML).stream("Line", {"n": 4}, str)
    assert [found["n"] for found in yaml.safe_load_all(capsys.readouterr().out)] == [3, 4]
    output.Output().stream("Line", {"n": 5}, lambda found: f"number {found['n']}")
    assert capsys.readouterr().out == "number 5\n"


@pytest.mark.slow
def test_a_reader_that_has_enough_is_no_error() -> None:
    command = f"{shlex.quote(sys.executable)} -m tandem.clusterctl completion bash | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout.strip(), done.stderr) == ("0", "")


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_of_that_shell(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    code, out, _ = run(capsys, "completion", shell)
    assert code == 0
    assert f"_CLUSTERCTL_COMPLETE=complete_{shell}" in out
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=out, text=True, check=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("clusterctl sta", {"status"}),
        ("clusterctl kv au", {"audit"}),
        ("clusterctl status --admin", {"--admin-key-file"}),
        ("clusterctl status -o j", {"json"}),
    ],
)
def test_a_shell_is_told_how_words_go_on(words: str, expected: set[str]) -> None:
    environment = {
        "_CLUSTERCTL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "tandem.clusterctl"], env=environment, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert set(done.stdout.split()) == expected, done.stderr
