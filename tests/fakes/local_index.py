"""A package index on this machine with a wheel made here, and pip's settings that name it, with a password."""

import base64
import hashlib
import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

NAME = "tiny-words"
WHEEL = "tiny_words-1.0-py3-none-any.whl"
PASSWORD = "hunter2"
Answer = tuple[int, dict[str, str], bytes]  # status, headers, body
NOT_FOUND: Answer = (404, {}, b"")


def make_wheel(module: str = "tiny_words", extra_bytes: int = 0) -> bytes:
    """A wheel of one module, `tiny_words.SAID`, with a program `tiny-words`."""
    packed = io.BytesIO()
    information = "tiny_words-1.0.dist-info"
    with zipfile.ZipFile(packed, "w") as wheel:
        wheel.writestr(f"{module}.py", "SAID = 'hello'\ndef main(): print(SAID)\n")
        wheel.writestr(f"{module}_data.py", f"DATA = {'x' * extra_bytes!r}\n")
        wheel.writestr(
            f"{information}/METADATA", f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(
            f"{information}/entry_points.txt", f"[console_scripts]\ntiny-words = {module}:main\n"
        )
        wheel.writestr(f"{information}/RECORD", "")
    return packed.getvalue()


class RecordingServer:
    """A server of files that keeps the path and authorization of each request. Who starts `server` closes it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []
        files = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                files.asked.append((self.path, self.headers.get("Authorization")))
                code, headers, body = files.answer(self.path)
                self.send_response(code)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.server.server_port}"

    def answer(self, path: str) -> Answer:
        """Status, headers and body for a path."""
        raise NotImplementedError


class LocalIndex(RecordingServer):
    """What the index answers by path, and the requests that it got."""

    def __init__(self, wheel: bytes, link: str = "") -> None:
        super().__init__()
        sha256 = hashlib.sha256(wheel).hexdigest()
        page = f'<a href="{link or f"/files/{WHEEL}"}#sha256={sha256}" data-requires-python="&gt;=3">{WHEEL}</a>'
        self.answers: dict[str, Answer] = {
            f"/simple/{NAME}/": (200, {"Content-Type": "text/html"}, page.encode()),
            f"/files/{WHEEL}": (200, {"Content-Type": "application/zip"}, wheel),
        }

    def answer(self, path: str) -> Answer:
        return self.answers.get(path, NOT_FOUND)

    @property
    def paths(self) -> list[str]:
        """The paths that were asked for."""
        return [path for path, _ in self.asked]


def credentials_sent(index: LocalIndex) -> set[str]:
    """The user names and passwords that the index got."""
    sent = [value.removeprefix("Basic ") for _, value in index.asked if value is not None]
    return {base64.b64decode(value).decode() for value in sent}


@contextmanager
def served_index(
    monkeypatch: pytest.MonkeyPatch, wheel: bytes | None = None, link: str = ""
) -> Iterator[LocalIndex]:
    """A running index that this process's pip settings name."""
    index = LocalIndex(wheel or make_wheel(), link)
    for name in ("EXTRA_INDEX_URL", "FIND_LINKS", "NO_INDEX", "CERT", "PROXY"):
        monkeypatch.delenv(f"PIP_{name}", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://reader:{PASSWORD}@{index.host}/simple")
    Thread(target=index.server.serve_forever, daemon=True).start()
    try:
        yield index
    finally:
        index.server.shutdown()
        index.server.server_close()
