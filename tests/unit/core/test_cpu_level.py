"""The instructions that a process may use, by one variable, for our code and the libraries that it computes with."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.core import cpu_level as module
from tandem.core.cpu_level import (
    CpuLevel,
    cpu_level,
    hold_libraries,
    is_intel,
    level_of,
    machine_level,
    named_level,
    product_words,
)
from tandem.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
AVX512 = {"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq"}
PROGRAM = """
import json
from tandem.core.cpu_level import hold_libraries
hold_libraries()
import torch
from tandem.kernels.paged_decode import LIBRARY
from tandem.kernels.quantized_linear.weight import has_onednn
has_code = LIBRARY.is_available()
print(json.dumps({
    "torch": torch.backends.cpu.get_cpu_capability(), "oneDNN bf16": torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    "code": LIBRARY.path if has_code else None, "int8": has_onednn(),
}))
"""


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        (set(), CpuLevel.NONE),
        ({"avx2"}, CpuLevel.NONE),
        ({"avx2", "fma", "avx512f"}, CpuLevel.AVX2),
        (AVX512, CpuLevel.AVX512),
        (AVX512 | {"avx512_vnni"}, CpuLevel.AVX512VNNI),
        (AVX512 | {"avx512_vnni", "avx512_bf16"}, CpuLevel.AVX512BF16),
        (AVX512 | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"}, CpuLevel.AMX),
        ({"avx512_bf16", "amx_tile"}, CpuLevel.NONE),
    ],
)
def test_a_cpu_has_a_level_with_all_levels_below_it(flags: set[str], level: CpuLevel) -> None:
    assert level_of(flags) is level


def test_a_named_level_never_raises_the_machine_s(monkeypatch: pytest.MonkeyPatch) -> None:
    for level in CpuLevel:
        monkeypatch.setenv("TANDEM_CPU_LEVEL", level.label)
        assert cpu_level() is min(level, machine_level())
    monkeypatch.delenv("TANDEM_CPU_LEVEL")
    assert named_level() is None
    assert cpu_level() is machine_level()


def test_an_unknown_level_is_refused_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CPU_LEVEL", "avx3")
    with pytest.raises(ConfigError, match=r"'avx3'.*none, avx2, avx512.*Name one"):
        cpu_level()


def test_what_the_operator_set_stays() -> None:
    variables = {"TANDEM_CPU_LEVEL": "avx2", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    hold_libraries(variables)
    assert variables["ONEDNN_MAX_CPU_ISA"] == "SSE41"
    assert variables["ATEN_CPU_CAPABILITY"] == "avx2"
    untouched: dict[str, str] = {}
    hold_libraries(untouched)
    assert untouched == ({"MKL_CBWR": "AVX2,STRICT"} if is_intel() and machine_level() is CpuLevel.AVX2 else {})


@pytest.mark.parametrize(
    ("vendor", "level", "value"),
    [("GenuineIntel", "avx2", "AVX2,STRICT"), ("GenuineIntel", "none", None), ("AuthenticAMD", "avx2", None)],
)
def test_mkl_is_held_to_repeatable_sums_where_it_needs_that(
    monkeypatch: pytest.MonkeyPatch, vendor: str, level: str, value: str | None
) -> None:
    monkeypatch.setattr(module, "is_intel", lambda: vendor == "GenuineIntel")
    monkeypatch.setattr(module, "machine_level", lambda: CpuLevel.AVX512)
    variables = {"TANDEM_CPU_LEVEL": level}
    hold_libraries(variables)
    assert variables.get("MKL_CBWR") == value


def test_c_code_has_the_same_names_and_numbers() -> None:
    header = (ROOT / "kernels/tandem/kernels/cpu_level.h").read_text()
    names = re.findall(r'"(\w+)"', header.split("names[] =")[1].split(";")[0])
    assert names == [level.label for level in sorted(CpuLevel)]
    enum = header.split("enum cpu_level {")[1].split("}")[0]
    assert [name.strip() for name in enum.split(",")] == [f"LEVEL_{level.name}" for level in sorted(CpuLevel)]


@pytest.mark.slow
@pytest.mark.skipif(machine_level() < CpuLevel.AVX2, reason="needs a CPU with AVX2")
def test_a_process_held_to_avx2_computes_as_a_cpu_with_avx2() -> None:
    held = {name: value for name, value in os.environ.items() if name not in _HELD}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False,
        env={**held, "TANDEM_CPU_LEVEL": "avx2"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) in (
        {"torch": "AVX2", "oneDNN bf16": False, "code": code, "int8": False} for code in (1, None)
    )


_HELD = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")


def test_products_are_named_by_what_multiplies_them() -> None:
    assert product_words(CpuLevel.AVX2) == "AVX2, bfloat16 is widened to float32"
    assert product_words(CpuLevel.AVX2, "float32") == "AVX2"
    assert product_words(CpuLevel.AMX) == "AMX, with bfloat16"
    assert product_words(CpuLevel.AMX, "float32") == product_words(CpuLevel.AVX512, "float32") == "AVX-512"
    assert len({product_words(level) for level in CpuLevel}) == len(CpuLevel)
