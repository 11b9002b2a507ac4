"""An S3 server that fails: a proxy in front of a real S3 protocol server, which answers as told by a plan.

`FaultyS3`. Each request takes the next fault from the plan (None passes it on): 500, 503, a
cut connection, half a body, a slow answer, and 500 after the server has done what it was asked.
"""

import http.client
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_HOP_HEADERS = {"connection", "transfer-encoding", "content-length", "keep-alive"}
SLOW_SECONDS = 0.2


class Fault(StrEnum):
    """What becomes of one request."""

    INTERNAL_ERROR = "500"
    SLOW_DOWN = "503"
    CUT = "cut"  # the connection ends before an answer
    HALF = "half"  # the body ends in the middle
    SLOW = "slow"
    DONE_BUT_FAILED = "done"  # the server did it and says 500


@dataclass
class FaultyS3:
    """The proxy's address and its plan of faults."""

    port: int
    plan: list[Fault | None] = field(default_factory=list)
    always: Fault | None = None
    requests: int = 0
    injected: list[Fault] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def next_fault(self) -> Fault | None:
        """The fault of this request."""
        self.requests += 1
        fault = self.always or (self.plan.pop(0) if self.plan else None)
        if fault is not None:
            self.injected.append(fault)
        return fault


def read_body(request: BaseHTTPRequestHandler) -> bytes:
    """The body of a request, in chunks or whole."""
    if "chunked" in request.headers.get("Transfer-Encoding", ""):
        body = b""
        while size := int(request.rfile.readline().split(b";")[0], 16):
            body += request.rfile.read(size)
            request.rfile.readline()
        request.rfile.readline()
        return body
    return request.rfile.read(int(request.headers.get("Content-Length") or 0))


def forward(
    request: BaseHTTPRequestHandler, host: str, port: int, body: bytes
) -> tuple[int, list[tuple[str, str]], bytes]:
    """What the server behind answers: status, headers, body."""
    connection = http.client.HTTPConnection(host, port, timeout=120)
    headers = {n: v for n, v in request.headers.items() if n.lower() not in _HOP_HEADERS}
    headers.pop("Expect", None)
    connection.request(request.command, request.path, body=body, headers=headers)
    response = connection.getresponse()
    answer = response.read()
    connection.close()
    return response.status, response.getheaders(), answer


@contextmanager
def faulty_s3(host: str, port: int) -> Iterator[FaultyS3]:
    """A running proxy to the server at host and port."""
    state = FaultyS3(port=0)
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

        def handle_any(self) -> None:
            body = read_body(self)
            with lock:
                fault = state.next_fault()
            if fault in (Fault.INTERNAL_ERROR, Fault.SLOW_DOWN):
                self._fail(500 if fault is Fault.INTERNAL_ERROR else 503)
                return
            if fault is Fault.CUT:
                self.close_connection = True
                return
            if fault is Fault.SLOW:
                time.sleep(SLOW_SECONDS)
            status, headers, answer = forward(self, host, port, body)
            if fault is Fault.DONE_BUT_FAILED:
                self._fail(500)
                return
            self.send_response(status)
            for name, value in headers:
                if name.lower() not in _HOP_HEADERS:
                    self.send_header(name, value)
            length = next((v for n, v in headers if n.lower() == "content-length"), len(answer))
            self.send_header("Content-Length", str(length))
            self.end_headers()
            if fault is Fault.HALF and len(answer) > 1:
                self.wfile.write(answer[: len(answer) // 2])
                self.close_connection = True
            else:
                self.wfile.write(answer)

        do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_any

        def _fail(self, status: int) -> None:
            code = {500: "InternalError", 503: "SlowDown"}[status]
            text = f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(text)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
