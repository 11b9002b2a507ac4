"""Servers of this machine that stand for places outside: plain HTTP and TLS, and a place that nobody may reach."""

import asyncio
import contextlib
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from ostinato.infra.sandbox.egress.config import Address
from ostinato.infra.sandbox.egress.dialing import Streams

LARGE_BYTES = 150_000
_DRIPS = 400


@dataclass
class Outside:
    """Ports of the servers, by the names that stand for them."""

    plain_port: int = 0
    tls_port: int = 0
    asked_of_closed: int = 0
    is_dripping: threading.Event = field(default_factory=threading.Event)

    async def dial(self, address: Address) -> Streams:
        """A connection to the server that stands for a name."""
        if address.host == "closed.test":
            self.asked_of_closed += 1
        port = {"plain.test": self.plain_port, "files.test": self.tls_port}[address.host]
        return await asyncio.open_connection("127.0.0.1", port)


def _handler(outside: Outside) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._head(200, {"Content-Length": "5"})

        def do_GET(self) -> None:
            with contextlib.suppress(OSError):
                self._answer(self.path.partition("?")[0])

        def _answer(self, path: str) -> None:
            if path == "/leads-to-closed":
                self._head(302, {"Location": "http://closed.test/", "Content-Length": "0"})
            elif path == "/drips":
                self._head(200, {"Content-Length": str(_DRIPS)})
                for _ in range(_DRIPS):
                    self.wfile.write(b"x")
                    self.wfile.flush()
                    outside.is_dripping.set()
                    time.sleep(0.1)
            elif path == "/silent":
                time.sleep(20)
            elif path in ("/endless", "/large"):
                whole = path == "/large"
                self._head(200, {"Content-Length": str(LARGE_BYTES)} if whole else {})
                for _ in range(LARGE_BYTES // 1000 if whole else 100_000):
                    self.wfile.write(b"x" * 1000)
            else:
                self._head(200, {"Content-Length": "5"})
                self.wfile.write(b"plain")

        def _head(self, status: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


@contextmanager
def running_outside(folder: Path) -> Iterator[Outside]:
    """The servers for the length of a block. `folder` gets a certificate."""
    outside = Outside()
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    options = f"-nodes -subj /CN=files.test -days 2 -keyout {key} -out {certificate}"
    make = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 {options}"
    subprocess.run(make.split(), check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    plain, secure = (ThreadingHTTPServer(("127.0.0.1", 0), _handler(outside)) for _ in range(2))
    secure.socket = context.wrap_socket(
        secure.socket, server_side=True, do_handshake_on_connect=False
    )
    outside.plain_port, outside.tls_port = plain.server_port, secure.server_port
    servers = (plain, secure)
    for server in servers:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield outside
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
