"""One rented box from outside: its command server (infra/sandbox/inside/command_server.py) and its commands.

What the box sends is read as bounded JSON and believed for this box alone.
"""

import asyncio
import itertools
import os
import shlex
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ostinato.infra.platform.errors import SandboxError, SandboxLost
from ostinato.infra.sandbox.host.backend import NamespaceSandbox
from ostinato.infra.sandbox.host.system import LIBRARY, PYTHON
from ostinato.infra.sandbox.inside import command_server
from ostinato.infra.sandbox.inside.wire import FrameDecoder, encode_frame

SOCKET = "/commands.sock"  # in boxes
_PROGRAM = (
    f"import sys; sys.path.insert(0, '{LIBRARY}'); from {command_server.__name__} import main; "
    f"main('{SOCKET}')"
)
_COMMAND = shlex.join((f"{PYTHON}/bin/python3", "-I", "-S", "-B", "-c", _PROGRAM))
_START_SECONDS = 30.0
_ANSWER_SECONDS = 60.0
_MONTH_SECONDS = 30 * 86_400.0
_PIECE_BYTES = 1 << 15
_MAX_WAITING_EVENTS = 16  # of one reader; then the command waits when it writes
_STREAMS = ("stdin", "stdout", "stderr")
_KEEPALIVE_SECONDS = 50.0
_UNHEARD_SECONDS = 0.01  # between two pieces of output that nobody reads
Event = dict[str, Any]


class Refused(Exception):
    """A refused request, with a code of the Connect protocol."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(eq=False)
class Command:
    """A running command, with queues of its readers. A reader that stops reading stops the command, not the box."""

    config: Mapping[str, Any]
    tag: str | None
    pid: int
    ended: asyncio.Future[int]
    stdin: asyncio.StreamWriter | None = None
    readers: set[asyncio.Queue[Event]] = field(default_factory=set)

    def subscribe(self) -> asyncio.Queue[Event]:
        """A queue of its events from now on, for `events`."""
        queue: asyncio.Queue[Event] = asyncio.Queue(_MAX_WAITING_EVENTS)
        self.readers.add(queue)
        return queue

    async def events(self, queue: asyncio.Queue[Event]) -> AsyncIterator[Event]:
        """Events of a queue. The last one has the key `end` or `error`."""
        try:
            yield {"start": {"pid": self.pid}}
            while True:
                try:
                    async with asyncio.timeout(_KEEPALIVE_SECONDS):
                        event = await queue.get()
                except TimeoutError:
                    event = {"keepalive": {}}
                yield event
                if "end" in event or "error" in event:
                    return
        finally:
            self.readers.discard(queue)
            while not queue.empty():  # frees a pump that waits
                queue.get_nowait()

    async def tell(self, event: Event) -> None:
        """Gives an event to all readers."""
        for queue in tuple(self.readers):
            if queue in self.readers:
                await queue.put(event)


class Guest:
    """A box with its command server. Belongs to one event loop."""

    def __init__(
        self, sandbox: NamespaceSandbox, connection: socket.socket, resources: AsyncExitStack
    ) -> None:
        """`connection`: to the command server inside. `resources`: what is closed with the box."""
        self.sandbox = sandbox
        self.commands: dict[int, Command] = {}
        self._resources = resources
        self._waiting: dict[int, asyncio.Future[Event]] = {}
        self._ends: dict[int, asyncio.Future[int]] = {}
        self._numbers = itertools.count(1)
        self._sending = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket = connection
        self._spawn(self._read())
        self.on_end: Callable[[], Awaitable[None]] | None = None

    @classmethod
    async def start(
        cls,
        make: Callable[[], Awaitable[NamespaceSandbox]],
        path: Path,
        resources: AsyncExitStack,
    ) -> "Guest":
        """A guest that answers. `make` makes its box, in which the new socket `path` is at SOCKET. Only the first connection
        to it is accepted.
        """
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(str(path))
            listener.listen(1)
            listener.setblocking(False)
            sandbox = await make()
            serving = asyncio.create_task(_run_server(sandbox))
            resources.callback(serving.cancel)
            accepting = asyncio.ensure_future(asyncio.get_running_loop().sock_accept(listener))
            await asyncio.wait(
                (accepting, serving), timeout=_START_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            if not accepting.done():
                accepting.cancel()
                raise SandboxLost(f"box {sandbox.sandbox_id}: its command server did not connect")
            connection, _ = accepting.result()
            return cls(sandbox, connection, resources)
        except BaseException:
            await resources.aclose()
            raise
        finally:
            listener.close()
            path.unlink(missing_ok=True)

    @property
    def is_lost(self) -> bool:
        """Whether the box or its command server is gone."""
        return self.sandbox.is_lost or self._socket.fileno() < 0

    async def request(
        self, operation: str, descriptors: Sequence[int] = (), **fields: Any
    ) -> Event:
        """The answer of the command server. Raises Refused, or SandboxLost when the box is gone."""
        number, loop = next(self._numbers), asyncio.get_running_loop()
        frame = encode_frame({"id": number, "operation": operation, **fields})
        answer = self._waiting[number] = loop.create_future()
        try:
            async with asyncio.timeout(_ANSWER_SECONDS), self._sending:
                if self.is_lost:
                    raise OSError
                sent = socket.send_fds(self._socket, [frame], descriptors)
                await loop.sock_sendall(self._socket, frame[sent:])
            async with asyncio.timeout(_ANSWER_SECONDS):
                found = await answer
        except OSError as error:
            raise SandboxLost(f"box {self.sandbox.sandbox_id} does not answer") from error
        finally:
            self._waiting.pop(number, None)
        if "error" in found:
            code, message = found["error"]
            raise Refused(str(code), str(message))
        return found

    async def run(
        self,
        config: Mapping[str, Any],
        *,
        has_stdin: bool = False,
        tag: str | None = None,
        timeout_seconds: float | None = None,
    ) -> Command:
        """Starts a command, which is killed at its time limit with all that it started."""
        loop = asyncio.get_running_loop()
        streams = _STREAMS if has_stdin else _STREAMS[1:]
        pipes = {name: os.pipe() for name in streams}  # ends to read and to write
        theirs = [pipes[name][name != "stdin"] for name in streams]
        key = next(self._numbers)
        ended = self._ends[key] = loop.create_future()  # it may end before the answer is read
        try:
            answer = await self.request("start", theirs, key=key, streams=streams, **config)
        except BaseException:
            del self._ends[key]
            for name in streams:
                os.close(pipes[name][name == "stdin"])
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        command = Command(config, tag, int(answer["pid"]), ended)
        self.commands[command.pid] = command
        if has_stdin:
            end = os.fdopen(pipes["stdin"][1], "wb", 0)
            transport, protocol = await loop.connect_write_pipe(
                asyncio.streams.FlowControlMixin, end
            )
            command.stdin = asyncio.StreamWriter(transport, protocol, None, loop)
        outputs = {name: pipes[name][0] for name in _STREAMS[1:]}
        following = self._spawn(self._follow(command, outputs, timeout_seconds))
        following.add_done_callback(lambda _: self._ends.pop(key, None))
        return command

    async def kill(self, command: Command) -> None:
        """Ends a command with what it started in its process group."""
        with suppress(Refused, SandboxLost):
            await self.request("signal", pid=command.pid, number=9)

    async def end_streams(self, message: str) -> None:
        """Ends what readers of commands receive with an error, because the sandbox does not run."""
        for command in self.commands.values():
            for queue in tuple(command.readers):
                while queue.full():
                    queue.get_nowait()
                queue.put_nowait({"error": {"code": "unavailable", "message": message}})

    async def close(self) -> None:
        """Ends the box and everything in it."""
        self.on_end = None
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()
        await asyncio.gather(*self._tasks - {asyncio.current_task()}, return_exceptions=True)
        self._socket.close()
        await self._resources.aclose()

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _follow(
        self, command: Command, pipes: Mapping[str, int], timeout_seconds: float | None
    ) -> None:
        """Passes the output on until the command has ended and nobody can write any more."""
        killing = None
        if timeout_seconds is not None:
            killing = asyncio.get_running_loop().call_later(
                timeout_seconds, lambda: self._spawn(self.kill(command))
            )
        try:
            await asyncio.gather(*(self._pump(command, *item) for item in pipes.items()))
            code = await command.ended
            end: Event = {"exitCode": code if code >= 0 else 128 - code, "exited": code >= 0}
            end["status"] = f"exit status {code}" if code >= 0 else f"signal: {-code}"
            if code:
                end["error"] = end["status"]
            await command.tell({"end": end})
        finally:
            if killing is not None:
                killing.cancel()
            if command.stdin is not None:
                command.stdin.close()
            self.commands.pop(command.pid, None)

    async def _pump(self, command: Command, name: str, descriptor: int) -> None:
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=_PIECE_BYTES)
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", 0)
        )
        try:
            while piece := await reader.read(_PIECE_BYTES):
                await command.tell({name: piece})
                if not command.readers:  # nobody listens, and the server must not only read
                    await asyncio.sleep(_UNHEARD_SECONDS)
        finally:
            transport.close()

    async def _read(self) -> None:
        """Gives answers to the requests that wait, until the connection ends."""
        decoder, loop = FrameDecoder(command_server.MAX_REPLY_BYTES), asyncio.get_running_loop()
        with suppress(OSError, ValueError, KeyError, TypeError):  # whatever a box sends
            while data := await loop.sock_recv(self._socket, _PIECE_BYTES):
                for header, _ in decoder.feed(data):
                    ended = self._ends.get(header.get("ended", 0))
                    answer = self._waiting.get(header.get("id", 0))
                    if ended is not None and not ended.done():
                        ended.set_result(int(header["code"]))
                    elif answer is not None and not answer.done():
                        answer.set_result(header)
        self._socket.close()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(OSError("connection ended"))
        if self.on_end is not None:
            await self.on_end()


async def _run_server(sandbox: NamespaceSandbox) -> None:
    with suppress(SandboxError):
        await sandbox.exec(_COMMAND, _MONTH_SECONDS)
