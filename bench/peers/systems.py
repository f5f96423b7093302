"""The servers that are compared, each as a context that gives its address: with two threads in all, on one model."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from bench.peers.cases import MODEL, PROMPT_TOKENS, SLOTS
from bench.report import ROOT
from tools.running_cluster import running
from tools.waiting import wait_for

TANDEM = {
    "Tandem mixed": ("--mixed", "1", "--disaggregation", "never"),
    "Tandem 1+1": ("--prefill", "1", "--decode", "1", "--disaggregation", "always"),
}
"""Flags of the layouts. Ranks share the cores, so that one worker has both and two have one each."""
LLAMA, LLAMA_BUILT = "llama.cpp", "built llama.cpp"
MISSING = "llama.cpp is left out: pip install --no-deps xllamacpp, or give the path of a --llama-server"
_KV_MEMORY = "1GiB"
_START_S, _STOP_S = 120.0, 20.0


@dataclass(frozen=True, slots=True)
class Format:
    """Bits of the weights: the type of the GGUF file that all read, and Tandem's `--quantize`."""

    gguf: str
    quantize: str


FORMATS = {
    "bf16": Format("BF16", "none"), "int8": Format("Q8_0", "int8"), "w8a8": Format("Q8_0", "w8a8"),
    "int4": Format("Q4_1", "int4"), "f16": Format("F16", "none"), "int4-q4_0": Format("Q4_0", "int4"),
}  # fmt: skip


def servers(llama_server: Path | None) -> dict[str, tuple[str, ...]]:
    """Name → flags or command of each system that is here."""
    found = dict(TANDEM)
    if find_spec("xllamacpp") is not None:
        found[LLAMA] = (sys.executable, "-m", "bench.peers.llama_server")
    if llama_server is not None:
        found[LLAMA_BUILT] = (str(llama_server),)
    return found


@contextlib.contextmanager
def served(name: str, words: Sequence[str], file: Path, weights: Format, tokens: int) -> Iterator[str]:
    """The address of a system that serves `file`, with room for the longest prompt and `tokens` in each slot."""
    if name in TANDEM:
        flags = ("--model", str(file), "--served-model-name", MODEL, "--dtype", "bfloat16")
        with running(*flags, "--quantize", weights.quantize, "--kv-memory", _KV_MEMORY, *words) as cluster:
            yield cluster.api
        return
    port, context = _free_port(), -(-(PROMPT_TOKENS + tokens) // 256) * 256
    command = [*words, "--model", str(file), "--port", str(port), "--threads", str(os.cpu_count() or 1)]
    command += ["--parallel", str(SLOTS), "--ctx-size", str(SLOTS * context)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            api = f"http://127.0.0.1:{port}"
            wait_for(lambda: _is_ready(process, api), _START_S, f"{name} is ready")
            yield api
        except AssertionError as error:
            log.seek(0)
            raise SystemExit(f"{error}\n{log.read().decode(errors='replace')[-2000:]}") from error
        finally:
            _end(process)


def _is_ready(process: subprocess.Popen[bytes], api: str) -> bool:
    if process.poll() is not None:
        raise AssertionError(f"{process.args!r} ended with {process.returncode}")
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{api}/health", timeout=1.0) as response:
        return bool(response.status == 200)
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
