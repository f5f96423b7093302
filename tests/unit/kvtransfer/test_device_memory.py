"""Foundations of `cuda_ipc`, without a GPU: tensors over addresses, the page of words, memory by descriptor."""

import ctypes
import os

import pytest
import torch

from tandem.kvtransfer.transports.base import LinkClosedError, UnavailableTransportError
from tandem.kvtransfer.transports.cuda_driver import BorrowedTensor
from tandem.kvtransfer.transports.device_memory import HostMemory, bytes_of
from tandem.kvtransfer.transports.frame_seqlock import MAX_FRAMES, FrameSeqlock, FrameSeqlockView
from tandem.kvtransfer.transports.ipc import memory_for


def test_a_frame_that_is_over_is_no_earlier_one_again() -> None:
    """The value left in a word when frame 511 is over is not the one that frame 255 had there."""
    words = FrameSeqlock()
    view = FrameSeqlockView(words.descriptor)
    words.close_descriptor()
    for number in range(MAX_FRAMES, 3 * MAX_FRAMES):
        words.publish(number)
        words.clear(number)
        assert not any(view.is_published(earlier) for earlier in range(number % MAX_FRAMES, number + 1, MAX_FRAMES))
    words.close()


def test_a_tensor_over_an_address_shares_its_bytes() -> None:
    owner = (ctypes.c_uint8 * 100)(*range(100))
    borrowed = BorrowedTensor(ctypes.addressof(owner), 100, torch.device("cpu"))
    assert borrowed.tensor.tolist() == list(range(100))
    borrowed.tensor[7] = 200
    assert owner[7] == 200
    part = borrowed.tensor[90:].clone()
    del borrowed
    assert part.tolist() == list(range(90, 100))


def test_a_word_never_comes_back() -> None:
    words = FrameSeqlock()
    view = FrameSeqlockView(words.descriptor)
    words.close_descriptor()
    for number in range(1, 3 * MAX_FRAMES):
        assert not view.is_published(number)
        words.publish(number)
        assert view.is_published(number)
        assert not view.is_published(number + MAX_FRAMES)
        if number > MAX_FRAMES:
            words.clear(number - MAX_FRAMES)  # late: the word has another owner
            assert view.is_published(number)
        if number % 2:
            words.clear(number)
            assert not view.is_published(number)


def test_memory_by_descriptor_is_the_same_memory() -> None:
    staging = HostMemory().allocate(8192)
    mapping = HostMemory().open(staging.handle, staging.descriptors, 8192)
    staging.tensor[5] = 77
    assert mapping.tensor[5] == 77
    mapping.close()
    staging.free()
    with pytest.raises(LinkClosedError, match="given back"):
        _ = mapping.tensor


@pytest.mark.parametrize("size", [4096, 0])
def test_memory_that_is_not_what_was_announced_is_refused(size: int) -> None:
    staging = HostMemory().allocate(8192)
    unsealed = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(unsealed, 8192)
    with pytest.raises(LinkClosedError):
        HostMemory().open(b"", staging.descriptors, size)
    with pytest.raises(LinkClosedError, match="not sealed"):
        HostMemory().open(b"", (unsealed,), 8192)
    with pytest.raises(LinkClosedError):
        FrameSeqlockView(staging.descriptors[0])
    with pytest.raises(LinkClosedError):
        HostMemory().open(b"x", staging.descriptors, 8192)
    os.close(unsealed)
    staging.free()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(UnavailableTransportError, match="no CUDA device"):
        memory_for("cuda_ipc")


def test_a_tensor_s_bytes_are_its_own() -> None:
    tensor = torch.zeros(16, dtype=torch.uint8)
    bytes_of(tensor)[3:5] = b"ab"
    assert tensor[3:5].tolist() == list(b"ab")
