"""Test `make graph` and `make test-changed`."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tools.affected_tests import affected, changed_files, module_of
from tools.import_graph import LOOSE, ImportGraph, dot, mermaid, read, write
from tools.layered_picture import BOX_HEIGHT, _Layout

SMALL = ImportGraph(
    title="small",
    rows=(("top",), ("left", "right"), ("bottom",)),
    sizes={"top": 1, "left": 2, "right": 3, "bottom": 4},
    imports={
        ("top", "left"): 5,
        ("left", "bottom"): 6,
        ("top", "bottom"): 7,
        ("left", "right"): 8,
        ("right", "left"): 9,
    },
)


@pytest.mark.parametrize("name", ["", "router"])
def test_rows_are_those_of_the_contract_and_imports_go_down(name: str) -> None:
    graph = read(name)
    row_of = {box: number for number, row in enumerate(graph.rows) for box in row}
    assert set(row_of) == set(graph.sizes)
    assert len(graph.imports) > 30
    assert all(row_of[importer] < row_of[imported] for importer, imported in graph.imports)
    if not name:
        assert (graph.rows[0], graph.rows[-1]) == (("clusterctl",), ("core",))
        assert graph.imports["worker", "decode_worker"] == 1


def test_without_a_contract_rows_follow_from_the_imports() -> None:
    graph = read("clusterctl")
    row_of = {box: number for number, row in enumerate(graph.rows) for box in row}
    assert LOOSE in row_of
    assert all(row_of[importer] <= row_of[imported] for importer, imported in graph.imports)
    assert len(read("prefill_worker").sizes) == 3, "no folders: modules are the boxes"


def test_an_unknown_package_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no package 'rooter'; there are: clusterctl, controlplane, core, "):
        read("rooter")


def test_an_import_that_others_lead_to_is_pale() -> None:
    assert SMALL.implied == {("top", "bottom")}


def test_boxes_of_a_row_stand_apart_and_arrows_go_around_them() -> None:
    layout = _Layout(SMALL)
    (left, y), (right, same) = layout.spots["left"], layout.spots["right"]
    assert y == same
    assert abs(left - right) > (layout.width("left") + layout.width("right")) / 2
    (_, begins), (passing, at), (_, ends) = layout.line(("top", "bottom"))
    assert (begins, at, ends) == (-BOX_HEIGHT / 2, y, layout.spots["bottom"][1] + BOX_HEIGHT / 2)
    assert all(abs(passing - layout.spots[box][0]) > layout.width(box) / 2 for box in ("left", "right"))


def test_the_picture_is_svg_with_every_name_and_the_same_each_time(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        write(SMALL, tmp_path / name)
    texts = {text.text for text in ET.parse(tmp_path / "a.svg").iter("{http://www.w3.org/2000/svg}text")}
    assert {"top", "left", "right", "bottom", "small", "8"} <= texts
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_text_for_other_programs(tmp_path: Path) -> None:
    assert '  "top" -> "left" [label=5];' in dot(SMALL).splitlines()
    assert '  { rank=same; "left"; "right"; }' in dot(SMALL).splitlines()
    assert [line for line in mermaid(SMALL).splitlines() if "b1" in line][:2] == ['  b1["left"]', "  b0 -->|5| b1"]
    with pytest.raises(ValueError, match="ends in none of"):
        write(SMALL, tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("router/tandem/router/routing/observed_traffic.py", "tandem.router.routing.observed_traffic"),
        ("kernels/tandem/kernels/kv_payload/__init__.py", "tandem.kernels.kv_payload"),
        ("tests/unit/kernels/dense_parts.py", "tests.unit.kernels.dense_parts"),
        ("tools/waiting.py", "tools.waiting"),
    ],
)
def test_a_file_is_a_module(path: str, name: str) -> None:
    assert module_of(path) == name


def test_tests_of_importers_run_and_others_do_not() -> None:
    found = affected(["router/tandem/router/routing/observed_traffic.py"])
    assert "tests/unit/router/routing/test_worker_load.py" in found
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
