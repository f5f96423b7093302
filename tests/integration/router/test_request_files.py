"""Counts the modules of the router that one chat request runs through: as docs/architecture.md states, 30 at most."""

import re
import sys
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

from tests.integration.router.house import RouterHarness

ROOT = Path(__file__).parents[3]
ROUTER = str(ROOT / "router" / "tandem" / "router")
FIRST, LAST = "ShutdownMiddleware.__call__", "Submitter.send"
MOST = 30
_IS_OF_THE_REQUEST: ContextVar[bool] = ContextVar("is_of_the_request", default=False)


class Walk:
    """Collects the modules whose functions run in the context of one request, from the HTTP endpoint's layers until its
    plan was dispatched."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.is_over = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if self.is_over or not code.co_filename.startswith(ROUTER):
            return
        if event == "call" and code.co_qualname == FIRST:
            _IS_OF_THE_REQUEST.set(True)
        if not _IS_OF_THE_REQUEST.get():
            return
        if event == "call":
            self.modules.add(code.co_filename.removeprefix(ROUTER + "/"))
        elif event == "return" and code.co_qualname == LAST:
            self.is_over = True


async def profile(walk: Walk | None) -> None:
    sys.setprofile(walk)


def test_a_request_passes_as_many_modules_as_the_page_states(shared: RouterHarness) -> None:
    walk = Walk()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "stream": True}
    shared.call(profile(walk))
    try:
        assert httpx.post(f"{shared.url}/v1/chat/completions", json=body).status_code == 200
    finally:
        shared.call(profile(None))
    assert walk.is_over
    page = (ROOT / "docs" / "architecture.md").read_text()
    (stated,) = re.findall(r"a chat request runs through (\d+) modules of the router", page)
    assert len(walk.modules) == int(stated) <= MOST, "\n".join(sorted(walk.modules))
