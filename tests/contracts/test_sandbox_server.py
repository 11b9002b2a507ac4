"""`ostinato sandboxes serve`: keys, limits and ends of sandboxes, and what a box cannot do to the server or to others.

tests/contracts/test_e2b_client.py has E2B's own SDK as the client.
"""

import asyncio
import base64
import hashlib
import stat
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from ostinato.infra.platform.errors import SandboxError
from ostinato.infra.sandbox.egress.config import EgressConfig
from ostinato.infra.serving.sandboxes.guest import Refused
from ostinato.infra.serving.sandboxes.service import (
    RentedSandbox,
    SandboxService,
    SandboxServiceConfig,
)
from tests.fakes.local_index import NAME, served_index
from tests.fakes.sandbox_server import SandboxServer, headers_of, run, serving

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SandboxServer]:
    with serving(tmp_path_factory.mktemp("home"), "--warm", "1") as server:
        yield server


def wait_for(condition: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_everything_asks_for_its_key(server: SandboxServer) -> None:
    assert stat.S_IMODE((server.home / "sandbox_key").stat().st_mode) == 0o600
    assert server.address.startswith("http://127.0.0.1:")
    mine, other = server.create(), server.create()
    one = f"/sandboxes/{mine['sandboxID']}"
    for method, path in (("POST", "/v2/sandboxes"), ("GET", one), ("DELETE", one)):
        for headers in ({}, {"X-API-Key": "e2b_0"}, {"X-API-Key": mine["envdAccessToken"]}):
            answer = httpx2.request(method, server.address + path, headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (401, 401)
    wrong = headers_of(other) | {"E2b-Sandbox-Id": mine["sandboxID"]}
    for headers in (wrong, {"E2b-Sandbox-Id": mine["sandboxID"]}, {"X-API-Key": server.key}):
        for method, path in (
            ("POST", "/process.Process/List"),
            ("GET", "/files?path=a"),
            ("POST", "/files?path=a"),
        ):
            answer = httpx2.request(method, server.address + path, headers=headers)
            assert answer.status_code in (401, 502)
    assert server.ask("GET", one).json()["state"] == "running"


def test_a_signature_opens_one_path_for_one_act_and_time(server: SandboxServer) -> None:
    sandbox = server.create()
    run(server, sandbox, "printf secret > a; printf other > b")

    def signed(path: str, act: str, expires: int | None = None) -> dict[str, str]:
        parts = [path, act, "", sandbox["envdAccessToken"]]
        raw = ":".join(parts + ([] if expires is None else [str(expires)]))
        digest = base64.b64encode(hashlib.sha256(raw.encode()).digest()).decode().rstrip("=")
        more = {} if expires is None else {"signature_expiration": str(expires)}
        return {"path": path, "signature": f"v1_{digest}", **more}

    def read(query: dict[str, str]) -> httpx2.Response:
        return httpx2.get(f"{server.address}/files", params=query)

    later = int(time.time()) + 60
    assert read(signed("a", "read")).text == "secret"
    assert read(signed("a", "read", later)).text == "secret"
    for wrong in (
        signed("a", "write"),
        signed("a", "read") | {"path": "b"},
        signed("a", "read", later - 120),
        signed("a", "read", later) | {"signature_expiration": str(later + 60)},
        signed("a", "read") | {"signature": "v1_\u00e9"},
    ):
        assert read(wrong).status_code == 401


def test_what_the_server_does_not_do_is_refused_by_name(server: SandboxServer) -> None:
    for field in ("network", "mcp", "volumeMounts"):
        answer = server.ask("POST", "/v2/sandboxes", templateID="base", **{field: {}})
        assert answer.status_code == 400
        assert field in answer.json()["message"]
    sandbox = server.create()
    one = f"/sandboxes/{sandbox['sandboxID']}"
    assert server.ask("GET", f"{one}/metrics").status_code == 501
    assert "files" in server.ask("POST", f"{one}/snapshots", memory=True).json()["message"]
    assert server.ask("POST", f"{one}/timeout", timeout=1e9).status_code == 400
    call = {"path": "a", "operation": "signal", "descriptors": [0], "pid": 1}
    answer = httpx2.post(
        f"{server.address}/filesystem.Filesystem/Stat", json=call, headers=headers_of(sandbox)
    )
    assert answer.json()["code"] == "not_found"  # of the path: no other field is passed on
    answer = httpx2.post(
        f"{server.address}/filesystem.Filesystem/Move", json={}, headers=headers_of(sandbox)
    )
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_argument")


def test_a_sandbox_ends_at_its_time(server: SandboxServer) -> None:
    before = len(server.boxes())
    sandbox = server.create()
    assert run(server, sandbox, "echo $((6 * 7)); echo no >&2; exit 3") == (3, "42\n", "no\n")
    one = f"/sandboxes/{sandbox['sandboxID']}"
    assert server.ask("POST", f"{one}/timeout", timeout=1).status_code == 204
    wait_for(lambda: server.ask("GET", one).status_code == 404)
    answer = httpx2.get(f"{server.address}/files?path=a", headers=headers_of(sandbox))
    assert answer.status_code == 502
    assert "was not found" in answer.json()["message"]
    wait_for(lambda: len(server.boxes()) <= before)


def test_commands_that_are_too_long_end_with_what_they_started(server: SandboxServer) -> None:
    sandbox = server.create()
    code, _, _ = run(server, sandbox, "sleep 77 & sleep 78", timeout_seconds=1)
    assert code == 137
    assert run(server, sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")[1].count("sleep") == 0


def test_a_box_that_ends_its_own_server_ends_no_other(server: SandboxServer) -> None:
    hostile, other = server.create(), server.create()
    with pytest.raises((AssertionError, httpx2.HTTPError)):
        run(server, hostile, "kill -9 -1; sleep 5")
    one = f"/sandboxes/{hostile['sandboxID']}"
    wait_for(lambda: server.ask("GET", one).status_code == 404)
    assert run(server, other, "echo here")[1] == "here\n"


def test_output_that_nobody_reads_stops_its_command_alone(server: SandboxServer) -> None:
    sandbox = server.create()
    text = b'{"process": {"cmd": "yes"}, "stdin": false}'
    headers = headers_of(sandbox) | {"content-type": "application/connect+json"}
    with httpx2.stream(
        "POST",
        f"{server.address}/process.Process/Start",
        content=b"\0" + len(text).to_bytes(4, "big") + text,
        headers=headers,
        timeout=60,
    ) as stream:
        next(stream.iter_raw())  # and no more
        time.sleep(1)
        memory = psutil.Process(server.process.pid).memory_info().rss
        time.sleep(1)
        assert run(server, sandbox, "echo still")[1] == "still\n"
        assert psutil.Process(server.process.pid).memory_info().rss < memory + (32 << 20)


def test_a_killed_server_leaves_no_box(tmp_path: Path) -> None:
    with serving(tmp_path, "--warm", "1") as server:
        run(server, server.create(), "setsid nohup sleep 99 > /dev/null 2>&1 &")
        boxes = server.boxes()
        assert len(boxes) >= 4
        server.process.kill()
        wait_for(lambda: not any(box.is_running() for box in boxes))


@asynccontextmanager
async def open_service(**settings: Any) -> AsyncIterator[SandboxService]:
    service = SandboxService(SandboxServiceConfig(warm=0, **settings))
    try:
        yield service
    finally:
        await service.close()


async def rent(service: SandboxService, template: str = "base", **wanted: Any) -> RentedSandbox:
    return await service.create(template, 600, **({"metadata": {}, "variables": {}} | wanted))


async def shell(sandbox: RentedSandbox, script: str) -> str:
    config = {"cmd": "bash", "args": ["-c", script], "envs": {}, "cwd": "/repo"}
    command = await sandbox.guest.run(config, timeout_seconds=200)
    queue = command.subscribe()
    return b"".join([event.get("stdout", b"") async for event in command.events(queue)]).decode()


@pytest.mark.asyncio
async def test_no_more_sandboxes_exist_than_may() -> None:
    async with open_service(most=2) as service:
        first, _ = await rent(service), await rent(service)
        with pytest.raises(Refused, match="2 sandboxes exist, at most 2"):
            await rent(service)
        await service.kill(first)
        made = await asyncio.gather(*(rent(service) for _ in range(3)), return_exceptions=True)
        assert [isinstance(each, Refused) for each in made].count(True) == 2


@pytest.mark.asyncio
async def test_snapshots_of_equal_files_are_removed_one_by_one() -> None:
    async with open_service() as service:
        source = await rent(service)
        await shell(source, "echo kept > file")
        one, two = await service.save(source), await service.save(source)
        await service.forget(one)
        with pytest.raises(Refused, match="was not found"):
            await rent(service, one)
        assert await shell(await rent(service, two), "cat file") == "kept\n"


@pytest.mark.asyncio
async def test_forks_share_nothing_afterwards() -> None:
    async with open_service() as service:
        source = await rent(service, variables={"A": "1"})
        await shell(source, "echo source > file; echo other > /tmp/file")
        twins = await service.fork(source, 2, 600)
        assert not any(isinstance(each, SandboxError | Refused) for each in twins)
        first, second = (each for each in twins if isinstance(each, RentedSandbox))
        assert first.variables == {"A": "1"}
        await shell(first, "echo first > file")
        seen = [await shell(each, "cat file /tmp/file") for each in (source, first, second)]
        assert seen == ["source\nother\n", "first\n", "source\n"]
        assert service.saved == {}


@pytest.mark.asyncio
async def test_a_pause_keeps_processes_and_time_does_not_pass_for_them() -> None:
    async with open_service() as service:
        sandbox = await service.create("base", 600, metadata={}, variables={}, pauses_at_end=True)
        await shell(sandbox, "(while sleep 0.05; do echo >> ticks; done) > /dev/null 2>&1 &")
        service.set_timeout(sandbox, 0.2)
        async with asyncio.timeout(60):
            while not sandbox.is_paused or sandbox.changing.locked():
                await asyncio.sleep(0.05)
        with pytest.raises(Refused, match="is already paused"):
            await service.pause(sandbox)
        with pytest.raises(Refused, match="resume it first"):
            await service.save(sandbox)
        files = sandbox.guest.sandbox.folder / "up"
        before = (files / "ticks").read_bytes()
        await asyncio.sleep(0.5)
        assert (files / "ticks").read_bytes() == before
        await service.resume(sandbox, 600)
        async with asyncio.timeout(60):
            while int(await shell(sandbox, "wc -l < ticks")) <= len(before):
                await asyncio.sleep(0.1)


@pytest.mark.asyncio
async def test_the_network_is_closed_but_for_the_allow_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = f"os.environ['PIP_INDEX_URL'] + '/{NAME}/'"
    fetch = f'python3 -c "import os, urllib.request as u; print(u.urlopen({url}).status)"'
    with served_index(monkeypatch):
        async with open_service(egress=EgressConfig(allow=("index",))) as service:
            opened, closed = await rent(service), await rent(service, has_network=False)
            assert await shell(opened, fetch) == "200\n"
            assert await shell(closed, fetch) == ""
            (twin,) = await service.fork(opened, 1, 600)
            assert isinstance(twin, RentedSandbox)
            assert await shell(twin, fetch) == "200\n"
