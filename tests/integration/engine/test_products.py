"""On a CPU without instructions for bfloat16 no product of it is asked of torch: its code there has no vectors."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tandem.core.cpu_level import hold_libraries
from tests.integration.engine import products_program


@pytest.mark.drawn(3)
@pytest.mark.parametrize("native", ["1", "0"])
@pytest.mark.parametrize("options", [{}, {"kv_dtype": "float32"}, {"quantize": "int8"}, {"is_deterministic": True}])
def test_no_product_of_bfloat16_is_torchs_own(tmp_path: Path, options: dict[str, Any], native: str) -> None:
    variables = {**os.environ, "TANDEM_CPU_LEVEL": "avx2", "TANDEM_NATIVE": native, "OMP_NUM_THREADS": "1"}
    hold_libraries(variables)
    program = [sys.executable, "-m", products_program.__name__, str(tmp_path), json.dumps(options)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=250, check=False, env=variables)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 2 * len(products_program.families(options))
    assert not any(found.values()), found
