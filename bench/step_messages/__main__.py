"""What a step message costs a tensor-parallel group: from rank 0 handing a batch over to a follower having it decoded.

Two processes and the ring between them, as in a worker; block tables go whole in every message. Median and 99th
percentile of the repetitions in ms, with a pause between them, so that the follower has to wake up each time. The empty
message beside them is what waking up costs alone.
"""

from __future__ import annotations

import functools
import multiprocessing
import select
import statistics
import struct
import sys
import time
from collections.abc import Callable

from bench.report import Row, arguments_of, publish, quantile
from tandem.engine.runner_protocol import SeqSlice, StepBatch
from tandem.worker.commands import Command, Step, Stop, decode, encode
from tandem.workercore.message_ring import RingPair, RingReader, RingWriter

_STAMP = struct.Struct("<d")
TIMEOUT_S = 10.0
AIM_MS = 0.2


def decode_batch(sequences: int, blocks: int) -> StepBatch:
    """One token of each of `sequences`, with block tables of `blocks` scattered blocks."""
    context = blocks * 16
    slices = [
        SeqSlice(1, context, ([(s * blocks + b) * 7919 % 65_521 for b in range(blocks)],)) for s in range(sequences)
    ]
    return StepBatch([5] * sequences, [context - 1] * sequences, slices, list(range(sequences)))


def prefill_batch(tokens: int) -> StepBatch:
    """The first chunk of one prompt."""
    table = [b * 7919 % 65_521 for b in range(-(-tokens // 16))]
    return StepBatch(list(range(tokens)), list(range(tokens)), [SeqSlice(tokens, tokens, (table,))], [tokens - 1])


def follow(pair: RingPair) -> None:
    """Decode what comes and answer with the time when that was done, until stopped."""
    reader, writer = RingReader(pair.commands), RingWriter(pair.reports)
    while True:
        select.select([reader.filled], [], [], TIMEOUT_S)
        for data in reader.read_all():
            _, command = decode(data)
            writer.write(_STAMP.pack(time.monotonic()), TIMEOUT_S)
            if isinstance(command, Stop):
                return


def cross(pair: RingPair, command: Command, repetitions: int, pause_s: float) -> list[float]:
    """Milliseconds from before `encode` to after `decode` in the other process."""
    writer, reader = RingWriter(pair.commands), RingReader(pair.reports)
    times = []
    for _ in range(repetitions):
        time.sleep(pause_s)
        started_s = time.monotonic()
        writer.write(encode(command), TIMEOUT_S)
        select.select([reader.filled], [], [], TIMEOUT_S)
        (stamp,) = reader.read_all()
        times.append(1e3 * (_STAMP.unpack(stamp)[0] - started_s))
    return times


def alone(call: Callable[[], object], repetitions: int) -> float:
    """Median milliseconds of a call in this process."""
    times = []
    for _ in range(repetitions):
        started_s = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - started_s))
    return statistics.median(times)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 1 if a median is above the aim."""
    parser = arguments_of("step_messages", __doc__)
    parser.add_argument("--repetitions", type=int, default=2000)
    parser.add_argument("--pause-ms", type=float, default=1.0)
    args = parser.parse_args(argv)
    cases = {
        "64 decodes, 64 blocks each": decode_batch(64, 64),
        "8 decodes, 64 blocks each": decode_batch(8, 64),
        "chunk of 512 tokens": prefill_batch(512),
    }
    pair = RingPair.create("bench-step")
    follower = multiprocessing.get_context("fork").Process(target=follow, args=(pair,))
    follower.start()
    rows: list[Row] = []
    try:
        empty = cross(pair, Step(StepBatch([], [], []), has_hook=False), args.repetitions, args.pause_ms / 1e3)
        rows.append(Row("empty message", "handed over to decoded, median", statistics.median(empty), "ms"))
        for name, batch in cases.items():
            command = Step(batch, has_hook=True)
            data = encode(command)
            times = cross(pair, command, args.repetitions, args.pause_ms / 1e3)
            rows.append(Row(name, "handed over to decoded, median", statistics.median(times), "ms"))
            rows.append(Row(name, "handed over to decoded, p99", quantile(times, 99), "ms"))
            rows.append(Row(name, "of this: encode", alone(functools.partial(encode, command), args.repetitions), "ms"))
            rows.append(Row(name, "of this: decode", alone(functools.partial(decode, data), args.repetitions), "ms"))
            rows.append(Row(name, "size", len(data) / 1024, "KiB"))
    finally:
        cross(pair, Stop(), 1, 0.0)
        follower.join(TIMEOUT_S)
        pair.close()
    publish("step_messages", rows, args.out)
    medians = [row.value for row in rows if row.metric.endswith("median")]
    return int(max(medians) > AIM_MS)


if __name__ == "__main__":
    sys.exit(main())
