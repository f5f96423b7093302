"""Alternatives of a token, packed, are what they were unpacked."""

from __future__ import annotations

import math
import sys

import pytest

from tandem.router.workers.alternatives import Alternatives

TOP = ((7, -0.5), (4_294_967_295, -1.25), (0, -math.inf))


def test_they_read_as_the_tuples_they_were_made_of() -> None:
    packed = Alternatives(TOP)
    assert tuple(packed) == TOP
    assert packed == TOP
    assert packed != TOP[:2]
    assert (len(packed), packed[1], packed[-1]) == (3, TOP[1], TOP[2])
    assert (packed[:2], packed[:None], packed[5:]) == (TOP[:2], TOP, ())
    assert hash(packed) == hash(TOP)
    assert repr(packed) == repr(TOP)
    with pytest.raises(IndexError):
        packed[3]


def test_they_take_eight_bytes_each() -> None:
    assert sys.getsizeof(Alternatives(TOP * 100)._packed) - sys.getsizeof(Alternatives(())._packed) == 300 * 8
