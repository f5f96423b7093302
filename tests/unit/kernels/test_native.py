"""Building, caching and loading of C code: once, atomically, also where home is read-only or nothing can be built."""

import ctypes
import logging
import os
import shutil
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from tandem.kernels import installing, native
from tandem.kernels.build_lock import WATCH
from tandem.kernels.kv_payload.binding import SOURCE

pytestmark = pytest.mark.slow

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A C file of its own and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "answer"
    folder.mkdir()
    path = folder / "cpu.c"
    path.write_text("int answer(void) { return 42; }\n")
    return path


def cached(source: Path) -> list[Path]:
    """Return the files in the cache, but for locks."""
    return [path for path in (source.parents[1] / "cache" / "tandem").iterdir() if path.suffix != ".lock"]


def answer(library: ctypes.CDLL | None) -> int:
    assert library is not None
    return int(library.answer())


@needs_compiler
def test_built_once_then_loaded_without_a_compiler(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answer(native.load(source)) == 42
    (built,) = cached(source)
    assert built.name.startswith("answer-")
    monkeypatch.setenv("PATH", "/nowhere")
    native._loaded.clear()
    assert answer(native.load(source)) == 42


@needs_compiler
def test_a_changed_source_is_built_anew_and_a_broken_file_replaced(source: Path) -> None:
    native.load(source)
    (built,) = cached(source)
    source.write_text("int answer(void) { return 43; }\n")
    native._loaded.clear()
    assert answer(native.load(source)) == 43
    source.write_text("int answer(void) { return 44; }\n")
    broken = built.with_name(f"answer-{native._key(source)}.so")
    broken.write_bytes(b"not a library")
    native._loaded.clear()
    assert answer(native.load(source)) == 44
    assert broken.stat().st_size > 1000


@needs_compiler
def test_a_changed_header_is_built_anew(source: Path) -> None:
    header = source.with_name("answer.h")
    header.write_text("#define ANSWER 42\n")
    source.write_text('#include "answer.h"\nint answer(void) { return ANSWER; }\n')
    assert answer(native.load(source)) == 42
    header.write_text("#define ANSWER 43\n")
    native._loaded.clear()
    assert answer(native.load(source)) == 43


@needs_compiler
@pytest.mark.parametrize("obstacle", ["a file in the way", "writable by others", "no home"])
def test_without_a_usable_cache_it_is_built_aside_and_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    cache, temporary = tmp_path / "cache", tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    if obstacle == "a file in the way":
        cache.write_text("")
    elif obstacle == "writable by others":
        (cache / "tandem").mkdir(parents=True)
        (cache / "tandem").chmod(0o777)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert answer(native.load(source)) == 42
    assert list(temporary.iterdir()) == []
    assert obstacle != "writable by others" or cached(source) == []


def test_what_cannot_be_built_is_said_once(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    source.write_text("this is no C\n")
    with caplog.at_level(logging.WARNING):
        assert native.load(source) is None
        assert native.load(source) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert cached(source) == []


def test_without_a_compiler_there_is_none(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert native.load(source) is None


def test_it_can_be_switched_off(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_is_enabled", False)
    assert native.load(source) is None
    assert not (source.parents[1] / "cache").exists()


@pytest.mark.parametrize(("value", "is_on"), [("0", False), ("1", True), (None, True)])
def test_the_environment_switches_it_off(value: str | None, is_on: bool) -> None:
    environment = {name: text for name, text in os.environ.items() if name != native.ENVIRONMENT_VARIABLE}
    if value is not None:
        environment[native.ENVIRONMENT_VARIABLE] = value
    code = "from tandem.kernels import native; print(native.is_enabled())"
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert ran.stdout.strip() == str(is_on)


@needs_compiler
def test_two_processes_may_build_at_once(source: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tandem.kernels import native; sys.stdin.readline();"
        "print(native.load(Path(sys.argv[1])).answer())"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(source)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )
        for _ in range(3)
    ]  # fmt: skip
    outputs: list[str] = []

    def finish(process: subprocess.Popen[str]) -> None:
        outputs.append(process.communicate("go\n", timeout=60)[0].strip())

    threads = [threading.Thread(target=finish, args=(process,)) for process in processes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == ["42"] * 3
    assert len(cached(source)) == 1


COUNTED_BUILDS = """
import sys
from pathlib import Path
from tandem.kernels import native

compile = native.build

def build(source, target):
    print("compiled", flush=True)
    sys.stdin.readline()
    compile(source, target)

native.build = build
print(native.load(Path(sys.argv[1])).answer(), flush=True)
"""


@needs_compiler
def test_one_process_compiles_while_others_wait_for_it(source: Path) -> None:
    with ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen(
                [sys.executable, "-c", COUNTED_BUILDS, str(source)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            ))
            for _ in range(2)
        ]  # fmt: skip
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        outputs = [process.communicate(timeout=60)[0].split() for process in processes]
    assert sorted(outputs, key=len) == [["42"], ["compiled", "42"]]


@needs_compiler
def test_what_was_installed_is_loaded_without_cache_and_compiler(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native.make(source, native.installed(source))
    monkeypatch.setenv("PATH", "/nowhere")
    assert answer(native.load(source)) == 42
    assert not (source.parents[1] / "cache").exists()
    monkeypatch.setenv(native.ENVIRONMENT_VARIABLE, "compile")
    native._loaded.clear()
    assert native.load(source) is None, "it is passed over"


@needs_compiler
def test_a_cache_that_cannot_be_written_has_another_in_its_place(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    monkeypatch.setenv(native.CACHE_VARIABLE, str(tmp_path / "state"))
    assert answer(native.load(source)) == 42
    assert len(list((tmp_path / "state").glob("*.so"))) == 1
    monkeypatch.setenv("PATH", "/nowhere")
    native._loaded.clear()
    assert answer(native.load(source)) == 42


@needs_compiler
def test_an_installation_compiles_what_is_not_there_and_removes_the_old(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installing, "FOLDER", source.parents[1])
    broken = source.parents[1] / "broken" / "cpu.c"
    broken.parent.mkdir()
    broken.write_text("this is no C\n")
    said: list[str] = []
    (library,) = installing.install(said.append)
    assert library == native.installed(source)
    assert sorted(line.split(" (")[0] for line in said) == ["answer", "broken"]
    assert any("broken" in line and "could not be compiled" in line for line in said)
    made_s = library.stat().st_mtime_ns
    assert installing.install(said.append) == [library]
    assert library.stat().st_mtime_ns == made_s, "it was there"
    source.write_text("int answer(void) { return 43; }\n")
    (newer,) = installing.install(said.append)
    assert newer != library
    assert not library.exists()


BUILD_FOR_EVER = """
import os, sys
from pathlib import Path
from tandem.kernels import native

def begin(source, target):
    target.write_text("half a library")
    print("building", flush=True)
    sys.stdin.readline()

native.build = begin
native.load(Path(sys.argv[1]))
"""


@needs_compiler
def test_drafts_of_killed_builds_are_removed_at_the_next_start_and_no_others(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = source.parents[1] / "slow" / "cpu.c"
    slow.parent.mkdir()
    slow.write_text(source.read_text())
    with subprocess.Popen(
        [sys.executable, "-c", BUILD_FOR_EVER, str(slow)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    ) as other:  # fmt: skip
        assert other.stdout is not None
        assert other.stdout.readline() == "building\n"
        (draft,) = cached(source)
        assert answer(native.load(source)) == 42
        assert draft.exists(), "somebody else builds another one"
        other.kill()
    assert draft.exists()
    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setattr(native, "_tidied", set())  # as the next process begins
    assert answer(native.load(source)) == 42
    assert [path.name.startswith("answer-") for path in cached(source)] == [True]


@needs_compiler
def test_whoever_wants_hears_when_compilers_run(source: Path, tmp_path: Path) -> None:
    heard: list[bool] = []
    with WATCH.told(heard.append):
        native.load(source)
        assert heard == [True, False]
        with WATCH.running(), WATCH.running():
            assert heard == [True, False, True], "one beside the other is not told again"
        assert heard == [True, False] * 2
        native.load(source)
        assert len(heard) == 4, "it is loaded"
        source.write_text("this is no C\n")
        with pytest.raises(subprocess.CalledProcessError):
            native.build(source, tmp_path / "x.so")
        assert heard == [True, False] * 3
    native._loaded.clear()
    native.load(source)
    assert len(heard) == 6, "nobody asks any more"


@needs_compiler
def test_the_sources_compile_without_a_warning(tmp_path: Path) -> None:
    command = ["cc", *native.FLAGS, "-Wall", "-Wextra", "-Werror", "-o", str(tmp_path / "x.so"), str(SOURCE)]
    subprocess.run(command, check=True, timeout=120)


def test_an_address_is_that_of_the_first_byte_and_pins_the_buffer() -> None:
    data = bytearray(b"abcdef")
    with native.address_of(memoryview(data)[2:], writable=True) as address:
        assert ctypes.string_at(address, 4) == b"cdef"
        with pytest.raises(BufferError):
            data.append(1)
    data.append(1)
    with pytest.raises(BufferError), native.address_of(memoryview(b"abc"), writable=True):
        pass
    with pytest.raises(BufferError), native.address_of(memoryview(data)[::2]):
        pass
