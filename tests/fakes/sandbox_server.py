"""`ostinato sandboxes serve` as a process of its own, and raw calls to it, without E2B's SDK."""

import base64
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil

ROOT = Path(__file__).resolve().parents[2]
_START = "from ostinato.flows.cli import main; main()"
_ENVELOPE = struct.Struct(">BI")


@dataclass(frozen=True, slots=True)
class SandboxServer:
    """A running server."""

    address: str
    key: str
    home: Path
    process: subprocess.Popen[str]

    def ask(self, method: str, path: str, **json_body: Any) -> httpx2.Response:
        headers = {"X-API-Key": self.key}
        return httpx2.request(
            method, self.address + path, headers=headers, json=json_body, timeout=60
        )

    def create(self, **wanted: Any) -> dict[str, Any]:
        answer = self.ask("POST", "/v2/sandboxes", templateID="base", **wanted)
        assert answer.status_code == 201, answer.text
        return answer.json()

    def boxes(self) -> list[psutil.Process]:
        """Processes of all boxes."""
        return psutil.Process(self.process.pid).children(recursive=True)


def headers_of(sandbox: dict[str, Any]) -> dict[str, str]:
    return {"E2b-Sandbox-Id": sandbox["sandboxID"], "X-Access-Token": sandbox["envdAccessToken"]}


def run(
    server: SandboxServer, sandbox: dict[str, Any], script: str, timeout_seconds: float = 30
) -> tuple[int, str, str]:
    """Exit code, output and errors of a script; AssertionError with the error that ended its stream."""
    call = {"process": {"cmd": "/bin/bash", "args": ["-c", script]}, "stdin": False}
    text = json.dumps(call).encode()
    headers = headers_of(sandbox) | {
        "content-type": "application/connect+json",
        "connect-timeout-ms": str(round(timeout_seconds * 1000)),
    }
    answer = httpx2.post(
        f"{server.address}/process.Process/Start",
        content=_ENVELOPE.pack(0, len(text)) + text,
        headers=headers,
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    seen, code, data = {"stdout": b"", "stderr": b""}, None, answer.content
    while data:
        mark, size = _ENVELOPE.unpack_from(data)
        message = json.loads(data[_ENVELOPE.size : _ENVELOPE.size + size])
        data = data[_ENVELOPE.size + size :]
        event = message.get("event", {})
        for name, piece in event.get("data", {}).items():
            seen[name] += base64.b64decode(piece)
        code = event.get("end", {}).get("exitCode", code)
        assert mark == 0 or message == {}, message
    assert code is not None
    return code, seen["stdout"].decode(), seen["stderr"].decode()


@contextmanager
def serving(home: Path, *options: str) -> Iterator[SandboxServer]:
    """A server on a free port."""
    environment = {**os.environ, "OSTINATO_HOME": str(home)}
    command = (sys.executable, "-P", "-c", _START, "sandboxes", "serve", "--port", "0", *options)
    with subprocess.Popen(
        command, env=environment, cwd=ROOT.parent, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            address = line.split()[1].partition("=")[2]
            yield SandboxServer(address, (home / "sandbox_key").read_text(), home, process)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(30)
