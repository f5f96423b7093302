"""`make proto` leaves exactly what `make check` wants to see."""

from __future__ import annotations

from pathlib import Path

from tools import genproto


def write(folder: Path, **files: str) -> None:
    (folder / "rpc").mkdir(parents=True)
    for name, text in files.items():
        (folder / "rpc" / f"{name}.py").write_text(text)


def test_stubs_follow_what_is_generated(tmp_path: Path) -> None:
    fresh, stubs = tmp_path / "fresh", tmp_path / "stubs"
    write(fresh, same_pb2="a", changed_pb2="b", new_pb2_grpc="c")
    write(stubs, same_pb2="a", changed_pb2="old", renamed_pb2="gone", by_hand="kept")
    stale, orphaned = genproto.differing(fresh, stubs)
    assert stale == ["rpc/changed_pb2.py", "rpc/new_pb2_grpc.py"]
    assert orphaned == ["rpc/renamed_pb2.py"]
    genproto.sync(fresh, stubs, stale, orphaned)
    assert genproto.differing(fresh, stubs) == ([], [])
    assert sorted(path.name for path in (stubs / "rpc").iterdir()) == [
        "by_hand.py",
        "changed_pb2.py",
        "new_pb2_grpc.py",
        "same_pb2.py",
    ]
