"""Names of every key and channel. All begin with `tandem:<cluster>:`; nothing ever scans the keyspace.

Keys of one worker share the hash tag `{…}`, so that the scripts over them also run on a sharded Redis.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from tandem.core.errors import ConfigError
from tandem.core.ids import Incarnation, WorkerId

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Member(StrEnum):
    """Who can hold a lease."""

    WORKER = "worker"
    ROUTER = "router"


@dataclass(frozen=True, slots=True)
class Keys:
    """Key names of one cluster. Raises ConfigError for a name that could not stand in a key."""

    cluster: str

    def __post_init__(self) -> None:
        _check("cluster name", self.cluster)

    def members(self, kind: Member) -> str:
        """Set of the ids of every member that ever registered and was not forgotten since."""
        return f"tandem:{self.cluster}:{kind}s"

    def registry_channel(self, kind: Member) -> str:
        """Channel of wake-ups: somebody of this kind registered or left."""
        return f"tandem:{self.cluster}:wake:{kind}s"

    def lease(self, kind: Member, member: str) -> str:
        """Hash with incarnation, record and last beat; it expires by itself when beats stop."""
        return f"tandem:{self.cluster}:{kind}:{{{_check('id', member)}}}:lease"

    def events(self, worker: WorkerId, incarnation: Incarnation) -> str:
        """Stream of block events; an entry's id is its sequence number."""
        return f"tandem:{self.cluster}:worker:{{{_check('id', worker)}}}:{incarnation}:events"

    def blocks(self, worker: WorkerId, incarnation: Incarnation) -> str:
        """Set of the blocks that the worker holds; no key when there are none."""
        return f"tandem:{self.cluster}:worker:{{{_check('id', worker)}}}:{incarnation}:blocks"

    @property
    def link_speeds(self) -> str:
        """Hash of measured links by route."""
        return f"tandem:{self.cluster}:links"

    @property
    def link_speeds_channel(self) -> str:
        """Channel of wake-ups: a link was measured."""
        return f"tandem:{self.cluster}:wake:links"

    @property
    def desired(self) -> str:
        """Hash with version and JSON of the desired state."""
        return f"tandem:{self.cluster}:desired"

    @property
    def desired_channel(self) -> str:
        """Channel of wake-ups: the desired state changed."""
        return f"tandem:{self.cluster}:wake:desired"


def _check(what: str, name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{what} {name!r} cannot be used", todo="use 1 to 128 letters, digits, dots, dashes or _")
    return name
