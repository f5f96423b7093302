"""Token ids as bytes: the same on every machine."""

from __future__ import annotations

import sys

import pytest

from tandem.core import token_ids


def test_the_lowest_byte_comes_first() -> None:
    assert token_ids.pack([1, 0x01020304]) == bytes([1, 0, 0, 0, 4, 3, 2, 1])
    assert list(token_ids.unpack(bytes([1, 0, 0, 0, 4, 3, 2, 1]))) == [1, 0x01020304]


def test_a_machine_that_keeps_the_highest_byte_first_turns_them(monkeypatch: pytest.MonkeyPatch) -> None:
    native = sys.byteorder
    here = token_ids.pack([7, 70_000])
    monkeypatch.setattr(sys, "byteorder", "big" if native == "little" else "little")
    assert token_ids.pack([7, 70_000]) == b"".join(here[i : i + 4][::-1] for i in (0, 4))
    assert list(token_ids.unpack(token_ids.pack([7, 70_000]))) == [7, 70_000]


@pytest.mark.parametrize("wrong", [[-1], [1 << 32]])
def test_what_is_no_id_is_refused(wrong: list[int]) -> None:
    with pytest.raises(OverflowError):
        token_ids.pack(wrong)


def test_half_an_id_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple"):
        token_ids.unpack(b"\0\0\0\0\0\0")
