"""Levels of x86 vector instructions: that of this CPU, and the highest one that this process may use.

`TANDEM_CPU_LEVEL` names the highest level. It holds the project's own C code, oneDNN, torch and MKL alike, so that a
large CPU computes as a smaller one does. Libraries read their variables when they are loaded: `hold_libraries` belongs
before the first import of torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from enum import IntEnum
from functools import cache
from pathlib import Path

from tandem.core.errors import ConfigError

ENVIRONMENT_VARIABLE = "TANDEM_CPU_LEVEL"
_LIBRARY_VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
_REPEATABLE_VARIABLE = "MKL_CBWR"


class CpuLevel(IntEnum):
    """Each level includes the levels below it. `kernels/tandem/kernels/instructions.h` has the same numbers."""

    NONE = 0
    AVX2 = 1
    AVX512 = 2
    AVX512VNNI = 3
    AVX512BF16 = 4
    AMX = 5

    @property
    def label(self) -> str:
        return self.name.lower()


_WIDENS = "bfloat16 is widened to float32"
_PRODUCTS = {
    CpuLevel.NONE: f"no AVX2, {_WIDENS}",
    CpuLevel.AVX2: f"AVX2, {_WIDENS}",
    CpuLevel.AVX512: f"AVX-512, {_WIDENS} in registers",
    CpuLevel.AVX512VNNI: f"AVX-512 with VNNI, {_WIDENS} in registers",
    CpuLevel.AVX512BF16: "AVX-512 with bfloat16",
    CpuLevel.AMX: "AMX, with bfloat16",
}
_FLAGS = {
    CpuLevel.AVX2: {"avx2", "fma"},
    CpuLevel.AVX512: {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    CpuLevel.AVX512VNNI: {"avx512_vnni"},
    CpuLevel.AVX512BF16: {"avx512_bf16"},
    CpuLevel.AMX: {"amx_tile", "amx_int8", "amx_bf16"},
}
"""CPU flags that a level adds to the one below, as Linux names them."""
_HOLDING: dict[CpuLevel, tuple[str, str, str]] = {
    CpuLevel.NONE: ("default", "SSE41", "SSE4_2"),
    CpuLevel.AVX2: ("avx2", "AVX2", "AVX2"),
    CpuLevel.AVX512: ("avx512", "AVX512_CORE", "AVX512"),
    CpuLevel.AVX512VNNI: ("avx512", "AVX512_CORE_VNNI", "AVX512"),
    CpuLevel.AVX512BF16: ("avx512", "AVX512_CORE_BF16", "AVX512"),
}
"""Values of `_LIBRARY_VARIABLES`."""


def level_of(flags: set[str]) -> CpuLevel:
    """The level of a CPU with these flags of /proc/cpuinfo."""
    found = CpuLevel.NONE
    for level, needed in _FLAGS.items():
        if not needed <= flags:
            break
        found = level
    return found


@cache
def machine_level() -> CpuLevel:
    """The level of this machine's CPU; NONE where the system does not report it, as on other architectures."""
    return level_of(set(_cpu_field("flags")))


@cache
def is_intel() -> bool:
    """True if Intel made this machine's CPU: MKL takes other code there than elsewhere."""
    return _cpu_field("vendor_id") == ["GenuineIntel"]


def _cpu_field(name: str) -> list[str]:
    """The words of a field of the first CPU in /proc/cpuinfo; none where the system does not report it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return next((line.partition(":")[2].split() for line in lines if line.startswith(name)), [])


def product_words(level: CpuLevel, dtype: str = "bfloat16") -> str:
    """Instructions with which matrix products of `dtype` are computed at that level, for users; and the handling of
    bfloat16."""
    if dtype == "bfloat16":
        return _PRODUCTS[level]
    return _PRODUCTS[min(level, CpuLevel.AVX512)].partition(",")[0]


def named_level(variables: Mapping[str, str] = os.environ) -> CpuLevel | None:
    """The level that `TANDEM_CPU_LEVEL` names; None if it is not set. Raises ConfigError for an unknown name."""
    name = variables.get(ENVIRONMENT_VARIABLE, "")
    if not name:
        return None
    levels = {level.label: level for level in CpuLevel}
    if name not in levels:
        raise ConfigError(
            f"{ENVIRONMENT_VARIABLE} is {name!r}", why=f"there are {', '.join(levels)}", todo="Name one, or unset it"
        )
    return levels[name]


def cpu_level(variables: Mapping[str, str] = os.environ) -> CpuLevel:
    """The level that code of a process with these variables may use: the machine's, or the named one if that is lower.
    Raises ConfigError for an unknown name."""
    named = named_level(variables)
    return machine_level() if named is None else min(machine_level(), named)


def hold_libraries(variables: MutableMapping[str, str] = os.environ) -> None:
    """Hold torch, oneDNN and MKL to the named level; nothing without one. Variables that are set already stay.

    On an Intel CPU at AVX2, the named level or its own, MKL is held to results that do not depend on a row's place and
    the number of threads (`STRICT`), which `--deterministic` rests on; elsewhere they do not by themselves.
    Raises ConfigError for an unknown name.
    """
    named = named_level(variables)
    if named is not None and named in _HOLDING:
        for variable, value in zip(_LIBRARY_VARIABLES, _HOLDING[named], strict=True):
            variables.setdefault(variable, value)
    if cpu_level(variables) is CpuLevel.AVX2 and is_intel():
        variables.setdefault(_REPEATABLE_VARIABLE, "AVX2,STRICT")
