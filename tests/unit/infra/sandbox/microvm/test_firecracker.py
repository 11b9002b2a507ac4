"""The requests sent to Firecracker, in their order; no Firecracker runs here."""

import asyncio
import json
from pathlib import Path

import pytest

from ostinato.infra.platform.errors import SandboxError, SandboxLost
from ostinato.infra.sandbox.microvm.firecracker import (
    FirecrackerApi,
    FirecrackerShape,
    FirecrackerState,
)

STATE = FirecrackerState(Path("/s/memory"), Path("/s/devices"))


async def serve(path: Path, seen: list, refuse: str = "") -> asyncio.AbstractServer:
    """Answers each request with 204, or one path with a fault, and notes all."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b"":
            lines = head.decode().split("\r\n")
            method, target, _ = lines[0].split()
            fields = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
            body = await reader.readexactly(int(fields.get("content-length", "0")))
            seen.append((method, target, json.loads(body)))
            fault = b'{"fault_message": "not now"}'
            writer.write(
                b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n%s" % (len(fault), fault)
                if target == refuse
                else b"HTTP/1.1 204 No Content\r\n\r\n"
            )
            await writer.drain()

    return await asyncio.start_unix_server(answer, path)


async def test_verbs_become_requests(tmp_path):
    seen: list = []
    server = await serve(tmp_path / "api", seen)
    api = FirecrackerApi(tmp_path / "api", "fc")
    await api.boot(FirecrackerShape(Path("/k"), Path("/i"), 256 << 20), Path("/v"))
    await api.set_running(False)
    await api.save(STATE, is_whole=True)
    await api.load(STATE, Path("/w"))
    await api.close()
    server.close()
    assert [(method, path) for method, path, _ in seen] == [
        ("PUT", "/machine-config"),
        ("PUT", "/boot-source"),
        ("PUT", "/vsock"),
        ("PUT", "/entropy"),
        ("PUT", "/actions"),
        ("PATCH", "/vm"),
        ("PUT", "/snapshot/create"),
        ("PUT", "/snapshot/load"),
    ]
    bodies = {path: body for _, path, body in seen}
    assert bodies["/machine-config"]["mem_size_mib"] == 256
    assert bodies["/vm"] == {"state": "Paused"}
    assert bodies["/snapshot/create"]["snapshot_type"] == "Full"
    assert bodies["/snapshot/load"]["mem_backend"] == {
        "backend_type": "File",
        "backend_path": "/s/memory",
    }
    assert bodies["/snapshot/load"]["resume_vm"] is True


async def test_refusals_and_a_dead_process_are_told_apart(tmp_path):
    server = await serve(tmp_path / "api", [], refuse="/snapshot/create")
    api = FirecrackerApi(tmp_path / "api", "fc")
    with pytest.raises(SandboxError, match=r"refused PUT snapshot/create with 400.*not now"):
        await api.save(STATE, is_whole=False)
    await api.close()
    server.close()
    gone = FirecrackerApi(tmp_path / "nowhere", "fc")
    with pytest.raises(SandboxLost, match="PATCH vm failed"):
        await gone.set_running(True)
    await gone.close()
