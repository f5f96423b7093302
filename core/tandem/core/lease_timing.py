"""How long silence may last before somebody counts as gone. Every party keeps to these: one that waited for less than
the others would give up who lives, one that waited for more would write to who was given up.

There are two kinds of silence. A process that says nothing is gone; one whose event loop stands is slow, up to a longer
bound (docs/adr/0047-liveness-off-the-event-loop.md).
"""

from __future__ import annotations

from typing import Final

from tandem.core.timeout_scale import patient

BEAT_S: Final = 0.5
"""Everybody says something so often: to Redis, over router streams and over control channels."""
LEASE_S: Final = patient(2.5)
"""Nothing heard of a process for so long: lapsed. A stop is to be known, and what was held given back, within 3 s."""
STAND_S: Final = patient(10.0)
"""An event loop that has not turned for so long has lapsed, too, though its process lives. Several times as long as the
longest turns that were measured (3 to 4 s), and not longer than a rank waits for its host, and the index for beats."""
TOMBSTONE_S: Final = 2 * LEASE_S
"""What has ended is remembered for so long, for what is still on its way about it."""

_ASK_S: Final = 1.5 * BEAT_S
"""Longer than a beat: who is heard is not asked."""
_ANSWER_MS: Final = int(1000 * (LEASE_S - _ASK_S))
PROOF_OF_LIFE: Final = (
    ("grpc.keepalive_time_ms", int(1000 * _ASK_S)),
    ("grpc.keepalive_timeout_ms", _ANSWER_MS),  # which is also TCP's bound on what nobody acknowledges
    ("grpc.http2.ping_timeout_ms", _ANSWER_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_ping_strikes", 0),
)
"""Arguments of gRPC for both ends of streams between processes of the cluster: the transport of either end asks the
other's for a sign of life, and ends the connection after LEASE_S without one. Threads of gRPC ask and answer, which
need neither the event loop nor Python's lock."""
