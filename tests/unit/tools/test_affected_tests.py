"""`make test-changed` finds the tests that a change can affect."""

from __future__ import annotations

import pytest

from tools.affected_tests import affected, changed_files, module_of


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("router/tandem/router/routing/output_lengths.py", "tandem.router.routing.output_lengths"),
        ("kernels/tandem/kernels/kv_codec/__init__.py", "tandem.kernels.kv_codec"),
        ("tests/unit/kernels/dense_parts.py", "tests.unit.kernels.dense_parts"),
        ("tools/waiting.py", "tools.waiting"),
    ],
)
def test_a_file_is_a_module(path: str, name: str) -> None:
    assert module_of(path) == name


def test_tests_of_importers_run_and_others_do_not() -> None:
    found = affected(["router/tandem/router/routing/output_lengths.py"])
    assert "tests/unit/router/routing/test_output_lengths.py" in found
    assert "tests/unit/controlplane/simulator/test_simulator.py" in found
    assert not [name for name in found if name.startswith(("tests/unit/kernels/", "tests/unit/kvtransfer/"))]


def test_a_c_source_is_its_package() -> None:
    found = affected(["kernels/tandem/kernels/paged_decode/attend.h"])
    assert "tests/unit/kernels/test_paged_decode_native.py" in found
    assert "tests/unit/core/test_ledger_states.py" not in found


def test_a_page_is_held_by_the_tests_that_name_it() -> None:
    assert "tests/unit/docs/test_transfer.py" in affected(["docs/transfer/links.md"])


def test_a_rig_and_a_conftest_are_those_who_use_them() -> None:
    assert "tests/unit/kernels/test_fused_layer.py" in affected(["tests/unit/kernels/dense_parts.py"])
    found = affected(["tests/e2e/conftest.py"])
    assert {"tests/e2e/test_serving.py", "tests/e2e/test_burst.py"} <= set(found)
    assert affected(["tests/unit/core/test_ledger_states.py"]) == ["tests/unit/core/test_ledger_states.py"]


def test_an_unknown_base_is_refused() -> None:
    with pytest.raises(ValueError, match="no-such-commit"):
        changed_files("no-such-commit")
