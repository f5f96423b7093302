"""Test block hashes, and token ids as bytes."""

import dataclasses
import hashlib
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core import token_ids
from tandem.core.block_hash import HASH_BYTES, HashRoot, chain, next_hash

ROOT = HashRoot(fingerprint="f" * 32, block_tokens=4, salt=b"tenant")
token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_the_chain_is_sha256_over_parent_and_little_endian_ids() -> None:
    root = ROOT.digest()
    data = b"".join(token.to_bytes(4, "little") for token in (1, 2, 3, 70_000))
    assert chain(root, [1, 2, 3, 70_000], 4) == [hashlib.sha256(root + data).digest()[:HASH_BYTES]]


def test_known_values_never_change() -> None:
    assert ROOT.digest().hex() == "ccc2ef3d7d97f28448253ada7416cfdf"
    assert chain(ROOT.digest(), range(8), 4)[1].hex() == "49b51bac8e1a76a4b44af4015f2e9110"


@given(token_lists, st.integers(1, 7))
def test_chain_equals_next_hash_block_by_block(tokens: list[int], size: int) -> None:
    parent, expected = ROOT.digest(), []
    for start in range(0, len(tokens) - size + 1, size):
        parent = next_hash(parent, tokens[start : start + size])
        expected.append(parent)
    assert chain(ROOT.digest(), tokens, size) == expected
    assert len(expected) == len(tokens) // size


@given(token_lists, st.integers(0, 39))
def test_a_changed_token_changes_its_block_and_all_behind_it(tokens: list[int], place: int) -> None:
    if place >= len(tokens):
        return
    changed = [*tokens]
    changed[place] ^= 1
    before, after = chain(ROOT.digest(), tokens, 4), chain(ROOT.digest(), changed, 4)
    assert [a == b for a, b in zip(before, after, strict=True)] == [i < place // 4 for i in range(len(before))]


@pytest.mark.parametrize(
    "change", [{"fingerprint": "e" * 32}, {"block_tokens": 8}, {"salt": b"other"}, {"lossy": "fp8"}], ids=str
)
def test_every_field_of_the_root_separates(change: dict[str, object]) -> None:
    assert dataclasses.replace(ROOT, **change).digest() != ROOT.digest()  # type: ignore[arg-type]


def test_fields_cannot_run_into_each_other() -> None:
    a = HashRoot(fingerprint="ab", block_tokens=4, salt=b"c")
    b = HashRoot(fingerprint="a", block_tokens=4, salt=b"bc")
    assert a.digest() != b.digest()


def test_token_ids_must_fit_32_bits() -> None:
    for bad in (-1, 2**32):
        with pytest.raises(OverflowError):
            chain(ROOT.digest(), [bad] * 4, 4)


def test_what_is_known_of_a_chain_is_not_computed_again() -> None:
    root = HashRoot(fingerprint="f", block_tokens=4).digest()
    tokens = tuple(range(19))
    whole = chain(root, tokens, 4)
    for count in range(len(whole) + 1):
        assert chain(root, tokens, 4, whole[:count]) == whole
    foreign = HashRoot(fingerprint="g", block_tokens=4).digest()
    assert chain(root, tokens, 4, [foreign])[0] == foreign


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
