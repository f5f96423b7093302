"""What waits for a link hears of it when the link cannot be made, whatever the reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.core.clock import MonotonicClock
from tandem.kvtransfer.events import SendFailed
from tandem.kvtransfer.linkspeeds import LinkSpeeds
from tandem.kvtransfer.transports import dialling
from tandem.kvtransfer.transports.registry import find
from tests.integration.kvtransfer.rig import Rig


@pytest.mark.parametrize("is_measured", [False, True])
def test_a_dial_that_breaks_fails_what_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_measured: bool
) -> None:
    def dial(*_: Any) -> Any:
        raise MemoryError("no room for a ring")

    monkeypatch.setattr(dialling, "TRANSPORTS", {"shm": replace(find("shm"), dial=dial)})
    rig = Rig("shm", tmp_path)
    try:
        source, target = rig.side(seed=1), rig.side()
        receiver = rig.receiver(target)
        sender = rig.sender(source, speeds=LinkSpeeds(MonotonicClock()) if is_measured else None)
        ticket = rig.ticket(receiver.endpoints())
        receiver.expect(ticket)
        sender.open(ticket)
        failed = source.event_within(10)
        assert isinstance(failed, SendFailed)
        assert "no room for a ring" in failed.reason
    finally:
        rig.close()
