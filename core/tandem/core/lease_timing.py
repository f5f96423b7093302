"""Bounds on silence after which a process counts as gone. All parties keep to the same ones: a shorter bound would give
up a live process, a longer one would write to a process that others gave up.

There are two kinds of silence. A process that sends nothing is gone; one with a blocked event loop is slow, up to a
longer bound (docs/adr/0047-liveness-off-the-event-loop.md).
"""

from __future__ import annotations

from typing import Final

from tandem.core.timeout_scale import patient

BEAT_S: Final = 0.5
"""Interval of beats of every process: to Redis, over router streams and over control channels."""
LEASE_S: Final = patient(2.5)
"""Without a message for so long, a process has lapsed. A stop must be known, and its holds released, within 3 s."""
STAND_S: Final = patient(10.0)
"""An event loop that has not turned for so long has lapsed, too, though its process lives. Several times as long as the
longest turns that were measured (3 to 4 s), and not longer than a rank waits for its host, and the index for beats."""
TOMBSTONE_S: Final = 2 * LEASE_S
"""Time for which what has ended is remembered, for late messages about it."""

_ASK_S: Final = 1.5 * BEAT_S
"""Longer than a beat: a peer that sends beats is not asked."""
_ANSWER_MS: Final = int(1000 * (LEASE_S - _ASK_S))
PROOF_OF_LIFE: Final = (
    ("grpc.keepalive_time_ms", int(1000 * _ASK_S)),
    ("grpc.keepalive_timeout_ms", _ANSWER_MS),  # also TCP's bound on unacknowledged data
    ("grpc.http2.ping_timeout_ms", _ANSWER_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_ping_strikes", 0),
)
"""Arguments of gRPC for both ends of streams between processes of the cluster: the transport of either end asks the
other's for a sign of life, and ends the connection after LEASE_S without one. Threads of gRPC ask and answer, which
need neither the event loop nor Python's lock."""
