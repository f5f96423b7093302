"""A controller over made-up parts."""

from contextlib import AbstractAsyncContextManager

import pytest

from tests.unit.controlplane.controller_rig import Harness, playing


@pytest.fixture
def h() -> AbstractAsyncContextManager[Harness]:
    return playing()
