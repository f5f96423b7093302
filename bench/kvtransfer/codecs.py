"""Wire codecs: speed beside memcpy of the same plain bytes, and bytes left on the wire."""

from __future__ import annotations

import random
import statistics
import struct
import time
from collections.abc import Callable
from functools import partial

from bench.report import Row
from tandem.kernels import kv_payload

ROW_SIZE = 16 * 64
ROWS = 512
NUMBERS = ROWS * ROW_SIZE


def run(seconds: float) -> list[Row]:
    """Encode and decode for both codecs and dtypes, and dtype conversion."""
    rows: list[Row] = []
    plain = {"float32": _numbers()}
    plain["bfloat16"] = memoryview(bytearray(2 * NUMBERS))
    kv_payload.convert(plain["float32"], "float32", plain["bfloat16"], "bfloat16")
    for dtype, source in plain.items():
        copied = memoryview(bytearray(source.nbytes))
        for codec in kv_payload.CODECS:
            wire = memoryview(bytearray(kv_payload.encoded_bytes(ROWS, ROW_SIZE)))
            ways: dict[str, Callable[[], object]] = {
                "memcpy": partial(copied.__setitem__, slice(None), source),
                "encode": partial(kv_payload.encode, codec, source, dtype, wire, row_size=ROW_SIZE),
                "decode": partial(kv_payload.decode, codec, wire, copied, dtype, row_size=ROW_SIZE),
            }
            speeds = _speeds(ways, source.nbytes, seconds)
            case = f"{codec} of {dtype}"
            rows += [Row(case, way, speeds[way], "GiB/s", speeds["memcpy"]) for way in ("encode", "decode")]
            rows.append(Row(case, "bytes on the wire", wire.nbytes / 1024, "KiB", source.nbytes / 1024))
    half, whole = plain["bfloat16"], memoryview(bytearray(4 * NUMBERS))
    target = memoryview(bytearray(2 * NUMBERS))
    speeds = _speeds(
        {
            "memcpy": lambda: whole.__setitem__(slice(None), plain["float32"]),
            "float32 to bfloat16": lambda: kv_payload.convert(plain["float32"], "float32", target, "bfloat16"),
            "bfloat16 to float32": lambda: kv_payload.convert(half, "bfloat16", whole, "float32"),
        },
        4 * NUMBERS,
        seconds,
    )
    rows += [Row("conversion", way, speed, "GiB/s", speeds["memcpy"]) for way, speed in speeds.items() if "to" in way]
    return rows


def _numbers() -> memoryview:
    dice = random.Random(5)
    part = [dice.gauss(0, 1) for _ in range(ROW_SIZE)]
    return memoryview(bytearray(struct.pack(f"<{ROW_SIZE}f", *part) * ROWS))


def _speeds(ways: dict[str, Callable[[], object]], size: int, seconds: float) -> dict[str, float]:
    """GiB/s of plain bytes, the median over calls; the ways take turns."""
    took: dict[str, list[float]] = {way: [] for way in ways}
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s or len(took["memcpy"]) < 10:
        for way, call in ways.items():
            started_s = time.perf_counter()
            call()
            took[way].append(time.perf_counter() - started_s)
    return {way: size / statistics.median(times) / (1 << 30) for way, times in took.items()}
