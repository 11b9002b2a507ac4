"""Concurrent requests and replies over a box's stream, from one event loop."""

import asyncio
import socket
from typing import Any, Protocol

from ostinato.infra.platform.errors import SandboxError, SandboxLost
from ostinato.infra.sandbox.host.tools import Blobs, Reply, error_of_kind
from ostinato.infra.sandbox.inside.wire import FrameDecoder, encode_frame

_READ_BYTES = 1 << 18


class Connected(Protocol):
    """Interface of a box that a channel requires."""

    name: str
    socket: socket.socket
    information_pipe: int

    def admit(self) -> None: ...

    def explain_death(self) -> SandboxError: ...

    def kill(self) -> None: ...

    async def end(self) -> None: ...


class BoxChannel:
    """Connection to a box with any number of requests in flight. Belongs to the event loop that opened it."""

    def __init__(self, box: Connected) -> None:
        self._box = box
        self.num_requests = 0
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._lost: SandboxError | None = None
        self._writing = asyncio.Lock()
        box.socket.setblocking(False)
        loop = asyncio.get_running_loop()
        self._admitted = loop.create_future()
        loop.add_reader(box.information_pipe, self._admit)
        self._reader = loop.create_task(self._read())

    @property
    def name(self) -> str:
        """The box's name, for messages."""
        return self._box.name

    @property
    def is_lost(self) -> bool:
        """Whether the box is gone."""
        return self._lost is not None

    async def request(
        self, operation: str, answer_seconds: float, blobs: Blobs = (), **fields: Any
    ) -> Reply:
        """Sends one request and waits for its reply.

        Raises SandboxLost when the box died or did not answer in time, and plain SandboxError when the box
        refused the request or boxes cannot start on this host.
        """
        if self._lost is not None:
            raise type(self._lost)(str(self._lost))
        self.num_requests += 1
        request_id = self.num_requests
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Reply] = loop.create_future()
        self._waiting[request_id] = future
        frame = encode_frame({"id": request_id, "operation": operation, **fields}, blobs)
        try:
            async with asyncio.timeout(answer_seconds):
                await asyncio.shield(self._admitted)
                async with self._writing:
                    await self._send(frame)
                reply, reply_blobs = await future
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._fail(self._box.explain_death()) from error
        except TimeoutError as error:
            text = f"box {self._box.name} did not answer {operation} within {answer_seconds:.1f} s"
            raise self._fail(SandboxLost(text)) from error
        finally:
            self._waiting.pop(request_id, None)
        if "error" in reply:
            message = f"{operation} in box {self._box.name}: {reply['error']}"
            raise error_of_kind(reply.get("kind", "other"), message)
        return reply, reply_blobs

    def lose(self, error: SandboxError) -> None:
        """Kills the box. Waiting and later requests raise `error`, unless the box was lost before."""
        self._fail(error)
        self._box.kill()

    async def close(self) -> None:
        """Ends the box. Waiting requests raise SandboxLost."""
        if not self._admitted.done():
            asyncio.get_running_loop().remove_reader(self._box.information_pipe)
            self._admitted.set_result(None)
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._fail(SandboxLost(f"box {self._box.name} was closed"))
        await self._box.end()

    def _admit(self) -> None:
        """Sets the limits once bubblewrap has made the box or failed, and then lets requests through."""
        asyncio.get_running_loop().remove_reader(self._box.information_pipe)
        self._box.admit()
        if not self._admitted.done():
            self._admitted.set_result(None)

    async def _send(self, frame: bytes) -> None:
        try:
            await asyncio.get_running_loop().sock_sendall(self._box.socket, frame)
        except asyncio.CancelledError:
            text = f"box {self._box.name}: a request was cancelled after part of it was sent"
            self._fail(SandboxLost(text))
            raise

    async def _read(self) -> None:
        decoder = FrameDecoder()
        loop = asyncio.get_running_loop()
        while True:
            try:
                data = await loop.sock_recv(self._box.socket, _READ_BYTES)
                frames = decoder.feed(data)
                for header, blobs in frames:
                    future = self._waiting.get(header.get("id", 0))
                    if future is not None and not future.done():
                        future.set_result((header, blobs))
            except OSError:
                data = b""
            except Exception as error:  # noqa: BLE001 - whatever a box sends, no request may wait forever
                self._fail(SandboxLost(f"box {self._box.name}: {type(error).__name__}: {error}"))
                return
            if not data:
                self._fail(self._box.explain_death())
                return

    def _fail(self, error: SandboxError) -> SandboxError:
        """Records why the box is gone (the first reason stays) and fails all waiting requests."""
        self._lost = self._lost or error
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(type(self._lost)(str(self._lost)))
        return self._lost
