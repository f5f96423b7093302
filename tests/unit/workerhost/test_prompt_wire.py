"""Prompts come as packed bytes, or as numbers."""

from __future__ import annotations

from array import array

import pytest

from tandem.core.errors import InvalidRequestError
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workercore.proto_convert import prompt_from_wire


def test_a_prompt_is_read_in_either_form() -> None:
    ids = (3, 0, 4095, 2**32 - 1)
    assert prompt_from_wire(w.Submit(prompt=ids)) == ids
    assert prompt_from_wire(w.Submit(prompt_ids=array("I", ids).tobytes())) == ids
    assert prompt_from_wire(w.Submit(prompt_ids=b"\x03\x00\x00\x00\x00\x01\x00\x00")) == (3, 256)
    assert prompt_from_wire(w.Submit()) == ()


def test_half_an_id_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="7 bytes"):
        prompt_from_wire(w.Submit(prompt_ids=b"1234567"))
