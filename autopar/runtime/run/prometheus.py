"""The last step over HTTP, in Prometheus' text format, from one thread that no number of visitors makes more.

Anybody who reaches the port may read, so it is this machine's alone unless another address is asked for. A request has
seconds to come whole, so many may be open at once, and what comes beyond is closed.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress

from ..errors import RuntimeProgramError

LOOPBACK = "127.0.0.1"
REQUEST_S = 5.0
"""Seconds that a request has, from its first byte to the answer's last."""
MOST_OPEN = 32
"""The most connections at once."""
MOST_BYTES = 1 << 14
"""The most bytes of a request."""
_HEAD = (
    "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
    "Content-Length: {length}\r\nConnection: close\r\n\r\n"
)


class Prometheus:
    """Serves `text` at any path, until the process ends or `close`."""

    def __init__(self, host: str, port: int) -> None:
        """host: "" for every address of this machine; port: 0 for any free one. Raises RuntimeProgramError."""
        self.text = b""
        self._open = 0
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=MOST_OPEN)
        except (OSError, OverflowError) as error:
            said = getattr(error, "strerror", None) or error
            raise RuntimeProgramError(
                f"--prometheus {host or '0.0.0.0'}:{port}: {said}; give another port, or an address of this machine"
            ) from error
        self.port: int = self._socket.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="prometheus", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        serving = self._loop.create_task(self._listen())
        with suppress(asyncio.CancelledError):  # of `close`
            self._loop.run_until_complete(serving)

    async def _listen(self) -> None:
        server = await asyncio.start_server(self._answer, sock=self._socket, limit=MOST_BYTES)
        async with server:
            await server.serve_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= MOST_OPEN:
                await asyncio.wait_for(self._exchange(reader, writer), REQUEST_S)
        except (OSError, EOFError, asyncio.LimitOverrunError, TimeoutError):
            pass  # a visitor that is gone, too slow or too long is nobody's concern
        finally:
            self._open -= 1
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        status, text = ("200 OK", self.text) if request.startswith(b"GET ") else ("405 Method Not Allowed", b"")
        writer.write(_HEAD.format(status=status, length=len(text)).encode() + text)
        await writer.drain()

    def close(self) -> None:
        """Serve no more."""

        def end() -> None:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()

        self._loop.call_soon_threadsafe(end)
        self._thread.join()
        self._loop.close()
