"""The checksum of device payloads: its definition, and what it promises to find."""

import random

import pytest
import torch

from tandem.kernels.payload_checksum import BASE, MODULUS, payload_checksum
from tandem.kernels.payload_checksum.reference import COLUMNS, factors, times


def summed(data: bytes | bytearray) -> int:
    return payload_checksum(torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte())


def by_definition(data: bytes) -> int:
    padded = data + bytes(len(data) % 2)
    pieces = [len(data) % 65536, len(data) // 65536]
    pieces += [int.from_bytes(padded[i : i + 2], "little") for i in range(0, len(padded), 2)]
    return sum(piece * pow(BASE, i, MODULUS) for i, piece in enumerate(pieces)) % MODULUS


@pytest.mark.parametrize("size", [0, 1, 2, 3, 255, 4096, 2 * COLUMNS - 1, 2 * COLUMNS, 2 * COLUMNS + 1, 70_000])
def test_it_is_what_its_definition_says(size: int) -> None:
    data = random.Random(size).randbytes(size)
    assert summed(data) == by_definition(data) < MODULUS
    assert summed(b"\xff" * size) == by_definition(b"\xff" * size)


def test_base_is_a_primitive_root() -> None:
    primes = (2, 5, 19, 22_605_091)
    assert primes[0] * primes[1] * primes[2] * primes[3] == MODULUS - 1
    assert all(pow(BASE, (MODULUS - 1) // prime, MODULUS) != 1 for prime in primes)


def test_every_change_of_one_byte_and_every_swap_is_found() -> None:
    order = random.Random(1)
    data = bytearray(order.randbytes(3 * COLUMNS))
    right = summed(data)
    for _ in range(300):
        place, change = order.randrange(len(data)), order.randrange(1, 256)
        data[place] ^= change
        assert summed(data) != right
        data[place] ^= change
        one, other = (2 * order.randrange(len(data) // 2) for _ in range(2))
        if data[one : one + 2] != data[other : other + 2]:
            swapped = bytearray(data)
            swapped[one : one + 2], swapped[other : other + 2] = data[other : other + 2], data[one : one + 2]
            assert summed(swapped) != right


@pytest.mark.parametrize("data", [b"", b"\0", b"\0" * 4096, b"\1" + b"\0" * 99_999])
def test_zeros_cut_off_or_added_are_found(data: bytes) -> None:
    assert len({summed(data), summed(data + b"\0"), summed(data + b"\0\0"), summed(data + bytes(65536))}) == 4


def test_no_two_flipped_bits_cancel_within_16_mib() -> None:
    """They would if a power of BASE were plus or minus a power of two: none is, for any distance of two pieces."""
    pieces = (16 << 20) // 2
    by_row, by_column = factors(pieces // COLUMNS, torch.device("cpu"))
    shifts = torch.tensor([sign * pow(2, s, MODULUS) % MODULUS for sign in (1, -1) for s in range(-15, 16)])
    first = by_row[0].item()
    undone = torch.tensor(pow(int(first), -1, MODULUS))  # the tables begin behind the two pieces of the length
    for rows in by_row.split(256):
        powers = times(times(rows, undone)[:, None].expand(-1, COLUMNS), by_column[None].expand(len(rows), -1))
        hits = torch.isin(powers, shifts).sum().item()
        assert hits == (1 if rows[0] == first else 0)  # distance 0


def test_other_tensors_are_refused() -> None:
    with pytest.raises(TypeError):
        payload_checksum(torch.zeros(4))
    with pytest.raises(ValueError, match="contiguous"):
        payload_checksum(torch.zeros(8, dtype=torch.uint8)[::2])
    with pytest.raises(ValueError):
        payload_checksum(torch.zeros(8, dtype=torch.uint8)[1:])
