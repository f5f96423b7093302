"""The two output files of a batch: answers, and errors. Every request stands in one of them, once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack

from tandem.core.batch import BatchRecord
from tandem.router.storage.batches import result_mapping, state_machine
from tandem.router.storage.batches.file_store import FilesFolder
from tandem.router.storage.batches.input_file import Input, custom_ids
from tandem.router.storage.batches.journal import ResultLocation


class Outputs:
    """Writes them for one batch that ends, in the order of its input."""

    def __init__(self, folder: FilesFolder, record: BatchRecord, places: Mapping[int, ResultLocation]) -> None:
        self._folder, self._record, self._places = folder, record, places

    def write(self, found: Input, output: str, errors: str) -> tuple[int, int]:
        """Write both under these ids; returns their sizes. Blocks; raises OSError, also when an answer is gone."""
        left_over = state_machine.left_over(self._record)
        with ExitStack() as stack:
            good = stack.enter_context(self._folder.writing(output))
            bad = stack.enter_context(self._folder.writing(errors))
            reader = _Results(stack)
            for number, custom_id in custom_ids(self._folder.input(self._record.id), found):
                place = self._places.get(number)
                if place is None:
                    bad.write(result_mapping.unanswered_line(number, self._record.id, custom_id, left_over) + b"\n")
                else:
                    (good if place.is_ok else bad).write(reader.read(place) + b"\n")
            return good.size_bytes, bad.size_bytes


class _Results:
    """Reads answers from the segments of a journal, each of which is opened once."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._segments: dict[str, int] = {}

    def read(self, place: ResultLocation) -> bytes:
        name = str(place.segment)
        if name not in self._segments:
            self._segments[name] = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
            self._stack.callback(os.close, self._segments[name])
        result = os.pread(self._segments[name], place.size, place.offset)
        if len(result) != place.size:
            raise OSError(f"an answer in {place.segment.name} is not there any more")
        return result
