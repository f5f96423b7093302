"""Answers on disk: nothing torn or written twice reaches the output, and everything that was acknowledged does."""

import asyncio
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tandem.core.ids import Incarnation
from tandem.router.storage.batches.journal import Journal, JournalEntry, decode, encode


def entry(number: int, text: str = "x", *, is_ok: bool = True) -> JournalEntry:
    result = f'{{"n":{number},"by":"{text}"}}'.encode()
    return JournalEntry(number=number, is_ok=is_ok, result=result, input_tokens=3, cached_tokens=1, output_tokens=2)


def result_at(journal: Journal, number: int) -> bytes:
    place = journal.places[number]
    with place.segment.open("rb") as file:
        file.seek(place.offset)
        return file.read(place.size)


def segments(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def opened(folder: Path, incarnation: int) -> Journal:
    journal = Journal(folder, Incarnation(incarnation))
    await journal.open()
    return journal


@given(st.integers(0, 2**31), st.booleans(), st.binary().filter(lambda data: b"\n" not in data))
def test_a_line_says_what_was_kept_and_notices_damage(number: int, is_ok: bool, result: bytes) -> None:
    kept = JournalEntry(number=number, is_ok=is_ok, result=result, input_tokens=number, output_tokens=7)
    line = encode(kept)
    assert line.endswith(b"\n")
    found = decode(line[:-1])
    assert found is not None
    assert found[0] == kept
    assert line[found[1] : -1] == result
    for end in range(len(line) - 1):
        torn = decode(line[:end])
        assert torn is None or torn[0] != kept


async def test_a_successor_reads_everything_and_the_first_answer_stands(tmp_path: Path) -> None:
    first = await opened(tmp_path, 11)
    await asyncio.gather(*(first.append(entry(n, "first")) for n in range(5)))
    second = await opened(tmp_path, 5)
    assert sorted(second.places) == [0, 1, 2, 3, 4]
    await first.append(entry(5, "zombie"))  # it does not know that it lost its lease
    await second.append(entry(5, "second"))
    await second.append(entry(6, "second", is_ok=False))
    await first.close()
    await second.close()
    third = await opened(tmp_path, 1)
    assert sorted(third.places) == list(range(7))
    assert (third.tally.completed, third.tally.failed) == (6, 1)
    assert (third.tally.input_tokens, third.tally.cached_tokens, third.tally.output_tokens) == (21, 7, 14)
    assert result_at(third, 5) == entry(5, "zombie").result  # of the earlier owner's segment
    assert result_at(third, 6) == entry(6, "second").result
    await third.close()


@pytest.mark.parametrize("cut", [1, 5, 20])
async def test_a_torn_end_is_no_answer(tmp_path: Path, cut: int) -> None:
    first = await opened(tmp_path, 1)
    await first.append(entry(0))
    await first.append(entry(1))
    await first.close()
    (path,) = segments(tmp_path)
    os.truncate(path, path.stat().st_size - cut)
    second = await opened(tmp_path, 2)
    assert sorted(second.places) == [0]
    await second.append(entry(1, "again"))
    assert result_at(second, 1) == entry(1, "again").result
    await second.close()


async def test_damage_in_the_middle_costs_one_answer(tmp_path: Path) -> None:
    first = await opened(tmp_path, 1)
    for number in range(3):
        await first.append(entry(number))
    await first.close()
    (path,) = segments(tmp_path)
    data = bytearray(path.read_bytes())
    data[data.index(b'"n":1') + 4] ^= 1
    path.write_bytes(data)
    second = await opened(tmp_path, 2)
    assert sorted(second.places) == [0, 2]
    assert result_at(second, 2) == entry(2).result
    await second.close()


async def test_a_closed_journal_takes_nothing(tmp_path: Path) -> None:
    journal = await opened(tmp_path, 1)
    await journal.close()
    await journal.close()
    with pytest.raises(OSError, match="closed"):
        await journal.append(entry(0))
    assert not journal.places


async def test_a_full_disk_ends_the_segment_and_the_next_begins_behind_it(tmp_path: Path) -> None:
    journal = await opened(tmp_path, 1)
    await journal.append(entry(0))
    segment = journal._segment
    assert segment is not None
    os.close(segment._fd)
    segment._fd = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(OSError, match="space"):
        await journal.append(entry(1))
    with pytest.raises(OSError, match="closed"):
        await journal.append(entry(1))
    await journal.close()
    again = await opened(tmp_path, 1)
    assert sorted(again.places) == [0]
    await again.append(entry(1))
    await again.close()
    assert len(segments(tmp_path)) == 2


class Owners(RuleBasedStateMachine):
    """Several owners, some of which do not know that they are none any more, die and tear what they wrote last."""

    TOTAL = 6

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self._owners: list[Journal] = []
        self._acknowledged: set[int] = set()
        self._loop = asyncio.new_event_loop()
        self._count = 0

    def teardown(self) -> None:
        for owner in self._owners:
            self._loop.run_until_complete(owner.close())
        self._loop.close()
        self._folder.cleanup()

    @initialize()
    def begin(self) -> None:
        self.take_over()

    @rule()
    def take_over(self) -> None:
        self._count += 1
        incarnation = self._count * 7 % 10007  # no two the same, in no order
        self._owners.append(self._loop.run_until_complete(opened(Path(self._folder.name), incarnation)))

    @rule(owner=st.integers(0, 20), number=st.integers(0, TOTAL - 1), is_ok=st.booleans())
    def answer(self, owner: int, number: int, is_ok: bool) -> None:
        if not self._owners:
            self.take_over()
        journal = self._owners[owner % len(self._owners)]
        if number not in journal.places:
            self._loop.run_until_complete(journal.append(entry(number, f"o{owner}", is_ok=is_ok)))
            self._acknowledged.add(number)

    @rule(owner=st.integers(0, 20), torn=st.binary(max_size=30))
    def die(self, owner: int, torn: bytes) -> None:
        """End in the middle of a write: half of it is there, without its end."""
        if not self._owners:
            return
        journal = self._owners.pop(owner % len(self._owners))
        segment = journal._segment
        assert segment is not None
        with segment.path.open("ab") as file:
            file.write(torn.replace(b"\n", b""))
        self._loop.run_until_complete(journal.close())

    @invariant()
    def whoever_comes_next_has_every_answer_once(self) -> None:
        reader = self._loop.run_until_complete(opened(Path(self._folder.name), 10**6 + self._count))
        self._count += 1
        self._loop.run_until_complete(reader.close())
        assert set(reader.places) == self._acknowledged
        assert reader.tally.completed + reader.tally.failed == len(self._acknowledged)
        for number in reader.places:
            assert result_at(reader, number).startswith(b'{"n":%d,' % number)


Owners.TestCase.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
TestOwners = Owners.TestCase
