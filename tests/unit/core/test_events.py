"""Events survive the way through a store."""

import pytest

from tandem.core.events import ClusterEvent, EventKind


def test_event_is_read_back_equal() -> None:
    event = ClusterEvent(time_s=1.5, kind=EventKind.RESTART_PLANNED, subject="prefill-0", reason="exit code −9")
    assert ClusterEvent.from_json(event.to_json().encode()) == event


@pytest.mark.parametrize(
    "text", ["{}", "nonsense", '{"time_s": 1, "kind": "never heard of", "subject": "", "reason": ""}']
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        ClusterEvent.from_json(text)
