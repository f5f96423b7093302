"""Operators' settings for all processes of a router: kept by their parent, for processes that start afterwards."""

from __future__ import annotations

import asyncio

import orjson

POLICY_PATH = "/admin/v1/route/policy"
SLO_PATH = "/admin/v1/slo"


class ReplicatedSettings:
    """The last body that was accepted for the routing policy and for each SLO class.

    Hold `lock` while passing an order on, or replaying orders to a process that starts: else a process could miss an
    order that comes between its replay and its being asked.
    """

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self._bodies: dict[tuple[str, str], bytes] = {}

    def keep(self, path: str, body: bytes) -> None:
        """A process accepted this."""
        key = path, (str(orjson.loads(body)["slo"]) if path == SLO_PATH else "")
        self._bodies[key] = body

    def every(self) -> list[tuple[str, bytes]]:
        """Paths and bodies; one for each thing that was changed."""
        return [(path, body) for (path, _), body in self._bodies.items()]
