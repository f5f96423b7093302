"""What a router tells its launcher once its sockets listen."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from tandem.core import logs

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """URLs of the API and the admin port, host:port of gRPC, and whether whoever has no API key is let in."""

    http: str
    grpc: str
    admin: str
    pid: int
    is_open: bool


def write_ready(path: Path, ready: Ready) -> None:
    """Write it, all at once."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(asdict(ready)) + "\n")
    temporary.replace(path)
    logs.event(_log, "listening", **asdict(ready))
