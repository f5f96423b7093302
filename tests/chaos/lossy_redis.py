"""A Redis that loses what workers publish: some block events are answered, and never reach the server."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Sequence

_Address = tuple[str, int]
_PUBLISHED, _CHECK = 15, 13
"""Words of the publisher's script call (command, script, number of keys, three keys, and the published fields), and the
index of the word with the resulting set."""


class LossyRedis:
    """Listens on `port` in a thread of its own and passes everything on, but for a part `rate` of all block events.

    The worker gets the reply that those were written. Set `rate` to 1.0 to lose the last one too.
    """

    def __init__(self, server_port: int, rng: random.Random) -> None:
        self.rate = 0.0
        self.lost = 0
        self.port = 0
        self._server: _Address = ("127.0.0.1", server_port)
        self._rng = rng
        self._loop = asyncio.new_event_loop()
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lossy redis", daemon=True)

    def __enter__(self) -> LossyRedis:
        self._thread.start()
        assert self._listening.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        listener = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = listener.sockets[0].getsockname()[1]
        self._listening.set()
        self._loop.run_forever()
        listener.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.05))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        back: asyncio.Task[None] | None = None
        try:
            answers, server = await asyncio.open_connection(*self._server)
            writers.append(server)
            back = asyncio.create_task(_pass_on(answers, writer))
            while True:
                raw, words = await _command(reader)
                if self._is_lost(words):
                    self.lost += 1
                    writer.write(
                        b":" + words[_CHECK].partition(b":")[0] + b"\r\n"
                    )  # the size of the set, as it would be
                    await writer.drain()
                else:
                    server.write(raw)
                    await server.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # either end is gone, and the other one notices it; or all of this ends
        finally:
            if back is not None:
                back.cancel()
            for one in writers:
                one.close()

    def _is_lost(self, words: Sequence[bytes]) -> bool:
        is_published = words[0].upper() == b"EVALSHA" and len(words) >= _PUBLISHED and words[2] == b"3"
        return is_published and words[7] in (b"append", b"reset") and self._rng.random() < self.rate


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


async def _command(reader: asyncio.StreamReader) -> tuple[bytes, list[bytes]]:
    """One command as it came, and its words."""
    head = await reader.readline()
    if not head:
        raise asyncio.IncompleteReadError(b"", None)
    raw, words = [head], []
    for _ in range(int(head[1:])):
        size = await reader.readline()
        word = await reader.readexactly(int(size[1:]) + 2)
        raw += [size, word]
        words.append(word[:-2])
    return b"".join(raw), words
