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
    """Kinds of lease holders."""

    WORKER = "worker"
    ROUTER = "router"


@dataclass(frozen=True, slots=True)
class Keys:
    """Key names of one cluster. Raises ConfigError for a name that could not stand in a key."""

    cluster: str

    def __post_init__(self) -> None:
        _check("cluster name", self.cluster)

    def members(self, kind: Member) -> str:
        """Set of the ids of every member that registered and was not forgotten since."""
        return f"tandem:{self.cluster}:{kind}s"

    def registry_channel(self, kind: Member) -> str:
        """Channel of wake-ups: a member of this kind registered or left."""
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
    def sent_channel(self) -> str:
        """Channel on which routers publish the prompts that they sent where."""
        return f"tandem:{self.cluster}:sent"

    @property
    def link_speeds(self) -> str:
        """Hash of measured links by route."""
        return f"tandem:{self.cluster}:links"

    @property
    def link_speeds_channel(self) -> str:
        """Channel of wake-ups: a link was measured."""
        return f"tandem:{self.cluster}:wake:links"

    def response(self, response: str) -> str:
        """Hash of one stored response; it expires."""
        return f"tandem:{self.cluster}:response:{_check('id', response)}"

    def tenant_responses(self, tenant: str) -> str:
        """Sorted set of one tenant's stored responses, id and bytes, by the ms in which they expire."""
        return f"tandem:{self.cluster}:responses:{_check('tenant', tenant)}"

    def tenant_response_bytes(self, tenant: str) -> str:
        """Their sum."""
        return f"tandem:{self.cluster}:response-bytes:{_check('tenant', tenant)}"

    @property
    def batches(self) -> str:
        """Hash of batches by id: version and JSON."""
        return f"tandem:{self.cluster}:{{batches}}:batches"

    @property
    def open_batches(self) -> str:
        """Sorted set of the batches that are not over, oldest first."""
        return f"tandem:{self.cluster}:{{batches}}:open"

    def tenant_batches(self, tenant: str) -> str:
        """Sorted set of one tenant's batches, oldest first."""
        return f"tandem:{self.cluster}:{{batches}}:batches:{_check('tenant', tenant)}"

    def tenant_open_batches(self, tenant: str) -> str:
        """Sorted set of one tenant's batches that are not over."""
        return f"tandem:{self.cluster}:{{batches}}:open:{_check('tenant', tenant)}"

    @property
    def charges(self) -> str:
        """Hash of charged bytes of files and open batches, by id: bytes and tenant."""
        return f"tandem:{self.cluster}:{{batches}}:charges"

    @property
    def charged(self) -> str:
        """Hash of the sums of charges by tenant."""
        return f"tandem:{self.cluster}:{{batches}}:charged"

    @property
    def files(self) -> str:
        """Hash of files by id: JSON."""
        return f"tandem:{self.cluster}:{{batches}}:files"

    def tenant_files(self, tenant: str) -> str:
        """Sorted set of one tenant's files, oldest first."""
        return f"tandem:{self.cluster}:{{batches}}:files:{_check('tenant', tenant)}"

    @property
    def files_due(self) -> str:
        """Sorted set of files by the second in which they expire."""
        return f"tandem:{self.cluster}:{{batches}}:files-due"

    @property
    def batches_due(self) -> str:
        """Sorted set of batches that are over by the second in which they are forgotten."""
        return f"tandem:{self.cluster}:{{batches}}:batches-due"

    @property
    def batch_owner(self) -> str:
        """Incarnation of the router that runs batches; it expires by itself when it is not renewed."""
        return f"tandem:{self.cluster}:{{batches}}:owner"

    @property
    def files_dir(self) -> str:
        """Id of the directory that the files lie in."""
        return f"tandem:{self.cluster}:{{batches}}:directory"

    @property
    def batches_channel(self) -> str:
        """Channel of wake-ups: a batch was created, or is to be cancelled."""
        return f"tandem:{self.cluster}:wake:batches"

    @property
    def api_keys(self) -> str:
        """Hash of API keys by id."""
        return f"tandem:{self.cluster}:apikeys"

    @property
    def revoked_api_keys(self) -> str:
        """Sorted set of the ids of keys that were revoked, the oldest first."""
        return f"tandem:{self.cluster}:apikeys-revoked"

    @property
    def api_keys_channel(self) -> str:
        """Channel of wake-ups: an API key was added or revoked."""
        return f"tandem:{self.cluster}:wake:apikeys"

    def budget(self, tenant: str) -> str:
        """Hash of the rest of a tenant's budgets."""
        return f"tandem:{self.cluster}:budget:{{{_check('tenant', tenant)}}}"

    @property
    def cluster_events(self) -> str:
        """Stream of the cluster's actions and their reasons, oldest first; it is kept short."""
        return f"tandem:{self.cluster}:event-stream"

    @property
    def demand(self) -> str:
        """Hash of routers' demand in the last minutes, by router, for the planner."""
        return f"tandem:{self.cluster}:demand"

    @property
    def planner(self) -> str:
        """JSON of the planner's last decision; it expires."""
        return f"tandem:{self.cluster}:planner"

    @property
    def desired(self) -> str:
        """Hash with version and JSON of the desired state."""
        return f"tandem:{self.cluster}:desired"

    @property
    def desired_channel(self) -> str:
        """Channel of wake-ups: the desired state changed."""
        return f"tandem:{self.cluster}:wake:desired"


def is_name(name: str) -> bool:
    """True if `name` can stand in a key."""
    return _NAME.fullmatch(name) is not None


def _check(what: str, name: str) -> str:
    if not is_name(name):
        raise ConfigError(f"{what} {name!r} cannot be used", todo="use 1 to 128 letters, digits, dots, dashes or _")
    return name
