"""The file that a router writes for its launcher once its sockets listen."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from tandem.core import config_loader, logs
from tandem.core.files import write_private

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """URLs of the API and the admin port, host:port of gRPC, process id. `is_open`: requests without an API key are let
    in."""

    http: str
    grpc: str
    admin: str
    pid: int
    is_open: bool


def write_ready(path: Path, ready: Ready) -> None:
    """Write it, all at once."""
    write_private(path, config_loader.dump(ready))
    logs.event(_log, "listening", **asdict(ready))
