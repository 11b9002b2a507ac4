"""The proxy of one attempt: it judges, forwards, limits and records each request of the attempt's box.

A connection carries one request: a path of the package mirror, an absolute http:// URL, or CONNECT. Redirects go back
to the client, which must ask again.
"""

import asyncio
import contextlib
import io
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

import h11
from packaging.utils import canonicalize_name

from ostinato.infra.platform.telemetry import fields
from ostinato.infra.sandbox.egress.config import INDEX, Address, EgressConfig, NetworkRequest
from ostinato.infra.sandbox.egress.dialing import Refusal, Streams, dial, read_server_name
from ostinato.infra.sandbox.egress.mirror import IndexMirror

logger = logging.getLogger(__name__)
Dial = Callable[[Address], Awaitable[Streams]]
_PIECE_BYTES = 1 << 16
_MAX_HELLO_BYTES = 1 << 16
_MAX_REQUESTS = 2000  # of one attempt; each is recorded, and later connections are closed
_MAX_CONNECTIONS = 32  # of one attempt at a time
_MAX_PATH_CHARACTERS = 300
_READS = (b"GET", b"HEAD")
# headers of one connection, which a proxy does not pass on
_OF_CONNECTION = frozenset(
    b"connection proxy-connection proxy-authorization proxy-authenticate keep-alive te trailer transfer-encoding "
    b"upgrade".split()
)


@dataclass(slots=True)
class _Note:
    """State of one request."""

    at: float
    method: str = ""
    host: str = ""
    path: str = ""
    sent: int = 0
    received: int = 0
    is_allowed: bool = False
    reason: str = ""
    status: int = 502  # of the answer that gives the reason


class _Peer:
    """An HTTP/1.1 connection with one side, on which no read or write may pause for long."""

    def __init__(
        self, role: type[h11.CLIENT | h11.SERVER], streams: Streams, seconds: float
    ) -> None:
        self.reader, self.writer = streams
        self.http = h11.Connection(role)
        self._seconds = seconds

    async def next_event(self) -> h11.Event:
        """The next event. h11.RemoteProtocolError for anything but HTTP, TimeoutError after a pause."""
        while (event := self.http.next_event()) is h11.NEED_DATA:
            async with asyncio.timeout(self._seconds):
                self.http.receive_data(await self.reader.read(_PIECE_BYTES))
        if not isinstance(event, h11.Event):
            raise h11.RemoteProtocolError("connection ended within a message")
        return event

    async def send(self, *events: h11.Event) -> None:
        """Sends events. TimeoutError when the other side does not read them."""
        for event in events:
            self.writer.write(self.http.send(event) or b"")
        async with asyncio.timeout(self._seconds):
            await self.writer.drain()


class AttemptProxy:
    """Serves the connections of one attempt's box."""

    def __init__(
        self,
        attempt: str,
        config: EgressConfig,
        mirror: IndexMirror | None,
        closed_packages: Collection[str],
        requests: list[NetworkRequest],
        dial: Dial = dial,
    ) -> None:
        """`closed_packages`: names that the mirror refuses. `requests` gets a record of each request when it ends.
        `dial` connects to an allowed address.
        """
        self._requests = requests
        self._attempt, self._config, self._mirror, self._dial = attempt, config, mirror, dial
        self._closed_packages = {canonicalize_name(name) for name in closed_packages}
        self._left_bytes = config.max_attempt_bytes
        self._connections: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection and closes it."""
        task = asyncio.current_task()
        is_full = len(self._connections) >= _MAX_CONNECTIONS or len(self._requests) >= _MAX_REQUESTS
        if task is None or is_full or self._is_closed:
            writer.close()
            return
        self._connections.add(task)
        note = _Note(time.time())
        peer = _Peer(h11.SERVER, (reader, writer), self._config.idle_seconds)
        try:
            with self._recorded(note):
                await self._serve(peer, note)
            if note.reason and peer.http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                text = f"refused: {note.reason}\n".encode()
                head = _answer(note.status, _described(b"text/plain", len(text)))
                parts = (head, h11.Data(data=text), h11.EndOfMessage())
                with contextlib.suppress(OSError, TimeoutError, h11.LocalProtocolError):
                    await peer.send(*parts)
        finally:
            self._connections.discard(task)
            writer.close()

    async def close(self) -> None:
        """Ends all connections, also those that are not served yet."""
        self._is_closed = True
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @contextlib.contextmanager
    def _recorded(self, note: _Note) -> Iterator[None]:
        """Records the request at the end of the block, whose failures become its reason."""
        try:
            yield
        except Refusal as error:
            note.reason, note.status = str(error), error.status
        except TimeoutError:
            note.reason = "no byte came in time, or the request took too long"
        except (OSError, h11.ProtocolError, ValueError) as error:
            note.reason = f"{type(error).__name__}: {error}"
        except asyncio.CancelledError:
            note.reason = "the attempt ended"
            raise
        finally:
            entry = NetworkRequest(
                at=note.at,
                method=note.method,
                host=note.host,
                path=note.path[:_MAX_PATH_CHARACTERS],
                sent_bytes=note.sent,
                received_bytes=note.received,
                allowed=note.is_allowed,
                reason=note.reason,
            )
            self._requests.append(entry)
            logger.info("network %s", fields(attempt=self._attempt, **entry.model_dump()))

    async def _serve(self, peer: _Peer, note: _Note) -> None:
        async with asyncio.timeout(self._config.request_seconds):
            request = await peer.next_event()
            if not isinstance(request, h11.Request):
                raise Refusal("no request")
            target = request.target.decode("ascii")
            note.method, note.host = request.method.decode("ascii"), target
            self._count(note)  # an attempt that has used its bytes asks for nothing more
            if request.method == b"CONNECT":
                await self._tunnel(peer, self._known(target, note), note)
                return
            if not target.startswith("/"):
                parts = urlsplit(target)
                note.host, note.path = parts.netloc, target.partition(parts.netloc)[2]
            if request.method not in _READS:
                raise Refusal(f"method {note.method}, wanted GET or HEAD")
            if not isinstance(await peer.next_event(), h11.EndOfMessage):
                raise Refusal("the request has a body, wanted none")
            if target.startswith("/"):
                note.host, note.path = INDEX, target
                await self._answer_from_mirror(peer, request.method, note)
            elif urlsplit(target).scheme == "http":
                await self._forward(peer, request, note)
            else:
                raise Refusal("wanted an http:// URL, or CONNECT for TLS")

    def _known(self, text: str, note: _Note) -> Address:
        """The entry of a host and port. Refusal when there is none."""
        note.host = text
        with contextlib.suppress(ValueError):
            address = Address.parse(text)
            if address in self._config.addresses:
                return address
        raise Refusal(f"{text} is not in sandbox.egress.allow")

    def _count(self, note: _Note, *, sent: int = 0, received: int = 0) -> None:
        """Counts bytes. Refusal when the answer or the attempt has more than it may."""
        note.sent += sent
        note.received += received
        self._left_bytes -= sent + received
        if self._left_bytes < 0:
            raise Refusal(f"the attempt has used its {self._config.max_attempt_bytes} bytes")
        if note.received > self._config.max_answer_bytes:
            raise Refusal(f"the answer is larger than {self._config.max_answer_bytes} bytes")

    async def _answer_from_mirror(self, peer: _Peer, method: bytes, note: _Note) -> None:
        if self._mirror is None:
            raise Refusal("index is not in sandbox.egress.allow")
        kind, *names = unquote(urlsplit(note.path).path).strip("/").split("/")
        if (kind, len(names)) not in (("simple", 1), ("files", 3)):
            raise Refusal("wanted /simple/PACKAGE/ or a link of such a page")
        package = canonicalize_name(names[0])
        if package in self._closed_packages:
            raise Refusal(f"the problem was made from package {package}")
        if kind == "simple":
            file, described = io.BytesIO(await self._mirror.page(package)), b"text/html"
        else:
            file = await self._mirror.open_file(package, *names[1:])
            described = b"application/octet-stream"
        with file:
            size = file.seek(0, io.SEEK_END)
            file.seek(0)
            self._count(note, received=size)  # it was fetched, whatever part of it the box reads
            note.is_allowed = True
            await peer.send(_answer(200, _described(described, size)))
            while method == b"GET" and (piece := file.read(_PIECE_BYTES)):
                await peer.send(h11.Data(data=piece))
            await peer.send(h11.EndOfMessage())

    async def _forward(self, peer: _Peer, request: h11.Request, note: _Note) -> None:
        """Answers a request by plain HTTP. A redirect is passed back like any other answer."""
        parts = urlsplit(request.target.decode("ascii"))
        written = parts.netloc if parts.port else f"{parts.netloc}:80"
        address = self._known(written, note)
        async with self._connected(address, note) as streams:
            far = _Peer(h11.CLIENT, streams, self._config.idle_seconds)
            path = parts._replace(scheme="", netloc="", path=parts.path or "/").geturl()
            headers = [(b"host", parts.netloc.encode()), (b"connection", b"close")]
            headers += [pair for pair in _passed_on(request) if pair[0] != b"host"]
            ask = h11.Request(method=request.method, target=path, headers=headers)
            await far.send(ask, h11.EndOfMessage())
            while True:
                event = await far.next_event()
                if isinstance(event, h11.Response):
                    await peer.send(_answer(event.status_code, _passed_on(event)))
                elif isinstance(event, h11.Data):
                    self._count(note, received=len(event.data))
                    await peer.send(h11.Data(data=event.data))
                elif isinstance(event, h11.EndOfMessage):
                    await peer.send(h11.EndOfMessage())
                    return

    @contextlib.asynccontextmanager
    async def _connected(self, address: Address, note: _Note) -> AsyncIterator[Streams]:
        async with asyncio.timeout(self._config.idle_seconds):
            streams = await self._dial(address)
        note.is_allowed = True
        try:
            yield streams
        finally:
            streams[1].close()

    async def _tunnel(self, peer: _Peer, address: Address, note: _Note) -> None:
        """Passes TLS through, if its server name is the host's."""
        await peer.next_event()  # the end of the request
        async with self._connected(address, note) as (far_reader, far_writer):
            note.is_allowed = False  # until the name is known
            await peer.send(h11.Response(status_code=200, headers=[], reason=b"Connected"))
            hello = await self._read_hello(peer, address, note)
            note.is_allowed = True
            far_writer.write(hello)
            async with asyncio.timeout(self._config.idle_seconds) as limit:

                async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                    is_sent = writer is far_writer
                    while piece := await reader.read(_PIECE_BYTES):
                        size = len(piece)
                        self._count(note, sent=size * is_sent, received=size * (not is_sent))
                        loop = asyncio.get_running_loop()
                        limit.reschedule(loop.time() + self._config.idle_seconds)
                        writer.write(piece)
                        await writer.drain()

                ways = [
                    asyncio.create_task(copy(peer.reader, far_writer)),
                    asyncio.create_task(copy(far_reader, peer.writer)),
                ]
                try:
                    ended, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)
                for way in ended:
                    way.result()

    async def _read_hello(self, peer: _Peer, address: Address, note: _Note) -> bytes:
        """The first bytes of a TLS connection. Refusal when they name another server than the address's."""
        data = peer.http.trailing_data[0]
        while not (parsed := read_server_name(data))[0]:
            async with asyncio.timeout(self._config.idle_seconds):
                piece = await peer.reader.read(_PIECE_BYTES)
            data += piece
            if not piece or len(data) > _MAX_HELLO_BYTES:
                raise Refusal("no TLS server name came")
        self._count(note, sent=len(data))
        name, wanted = parsed[1], None if address.is_literal else address.host
        if (name and name.lower()) != wanted:
            raise Refusal(f"TLS asks for {name}, wanted {wanted or 'no name'}")
        return data


def _answer(status: int, headers: list[tuple[bytes, bytes]]) -> h11.Response:
    return h11.Response(status_code=status, headers=[*headers, (b"connection", b"close")])


def _described(kind: bytes, size: int) -> list[tuple[bytes, bytes]]:
    return [(b"content-type", kind), (b"content-length", b"%d" % size)]


def _passed_on(message: h11.Request | h11.Response) -> list[tuple[bytes, bytes]]:
    """Headers that belong to the message, not to its connection."""
    named = {
        name.strip().lower()
        for key, value in message.headers
        if key == b"connection"
        for name in value.split(b",")
    }
    return [pair for pair in message.headers if pair[0] not in _OF_CONNECTION | named]
