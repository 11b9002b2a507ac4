"""A request is let in by its head before its body is read, and no body holds the loop for long."""

import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
import pytest
from starlette.types import Message

from ostinato.infra.serving.gateway.server import running_server
from tests.fakes.toy_gateway import Toy

MAX_HELD_SECONDS = 0.06  # one pass of regular expressions took 0.2
SIZE = (4 << 20) - 64
COSTLY = {
    "quotes": b"[" + b'"",' * (SIZE // 3) + b'""]',
    "numbers": b"[" + b"1," * (SIZE // 2) + b"1]",
    "escapes": b'"' + b"\\u0041" * (SIZE // 6) + b'"',
    "backslashes": b'"' + b"\\\\" * (SIZE // 2) + b'"',
    "pairs": b'"' + b"\\ud83d\\ude00" * (SIZE // 12) + b'"',
    "brackets": b"[" + b"[]," * (SIZE // 3) + b"[]]",
    "letters": b'"' + "é".encode() * (SIZE // 2) + b'"',
}
MESSAGE = {"role": "user", "content": "Fix first"}
CHAT = {"model": "ostinato", "messages": [MESSAGE]}
SESSION = {"repository": "toy", "message": "Fix first"}
WRONG = {  # each with thousands of faults
    "calls": (
        "/v1/chat/completions",
        CHAT | {"messages": [MESSAGE | {"tool_calls": [{}] * 15_000}]},
    ),
    "parts": ("/v1/chat/completions", CHAT | {"messages": [MESSAGE | {"content": [{}] * 15_000}]}),
    "stop": ("/v1/chat/completions", CHAT | {"stop": [1] * 19_000}),
    "tests": ("/v1/agent/sessions", SESSION | {"test_ids": [1] * 19_000}),
    "fields": ("/v1/agent/sessions", SESSION | {str(name): 1 for name in range(19_000)}),
    "files": ("/v1/agent/sessions", SESSION | {"files": {str(name): 1 for name in range(19_000)}}),
}
PATHS = ["/v1/chat/completions", "/v1/feedback", "/v1/agent/sessions", "/metrics", "/nowhere"]


@asynccontextmanager
async def longest_hold() -> AsyncIterator[list[float]]:
    """Processor time of this process between two turns of the loop, the most seen. Other programs
    of the machine do not count.
    """
    most = [0.0]

    async def beat() -> None:
        while True:
            before = time.process_time()
            await asyncio.sleep(0)
            most[0] = max(most[0], time.process_time() - before)

    beating = asyncio.create_task(beat())
    gc.collect()
    gc.disable()  # the heap of the whole test process is no part of a request
    await asyncio.sleep(0)
    try:
        yield most
        await asyncio.sleep(0)
    finally:
        gc.enable()
        beating.cancel()


async def ask(toy: Toy, path: str, key: str | None) -> tuple[list[Message], list[int]]:
    """What the application sent, and how much of it had been sent at each look at the body."""
    said: list[Message] = []
    looks: list[int] = []

    async def receive() -> Message:
        looks.append(len(said))
        return {"type": "http.request", "body": b'"",', "more_body": len(looks) < 3}

    async def send(message: Message) -> None:
        said.append(message)

    headers = [(b"content-length", b"9")]
    headers += [(b"authorization", f"Bearer {key}".encode())] if key else []
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    await toy.app({**scope, "query_string": b"", "root_path": ""}, receive, send)
    return said, looks


@pytest.mark.asyncio
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("key", [None, "wrong"])
async def test_refusal_without_a_key_comes_before_the_body(
    toy: Toy, path: str, key: str | None
) -> None:
    said, looks = await ask(toy, path, key)
    assert said[0]["status"] == 401
    assert json.loads(said[1]["body"])["error"]["code"] == "invalid_api_key"
    assert all(num_said >= 2 for num_said in looks)  # what still comes is dropped after the answer


@pytest.mark.asyncio
async def test_refusal_by_rate_comes_before_the_body(toy: Toy) -> None:
    async with toy.client("key-of-slow") as client:
        for _ in range(2):
            await client.get("/v1/models")
    said, looks = await ask(toy, "/v1/feedback", "key-of-slow")
    assert said[0]["status"] == 429
    assert b"retry-after" in dict(said[0]["headers"])
    assert all(num_said >= 2 for num_said in looks)


@pytest.mark.asyncio
@pytest.mark.parametrize("key", ["nobody", "key-of-team"])
async def test_body_of_an_open_path_is_small(toy: Toy, key: str) -> None:
    async with toy.client(key) as client:
        large = await client.post("/healthz", content=b" " * 70_000)
        small = await client.post("/healthz", content=b" " * 60_000)
    assert (large.status_code, small.status_code) == (413, 405)
    assert large.json()["error"]["code"] == "request_too_large"


@pytest.mark.asyncio
@pytest.mark.parametrize("name", COSTLY)
@pytest.mark.parametrize(("key", "statuses"), [("nobody", {401}), ("key-of-team", {400, 404})])
@pytest.mark.sampled(3)
async def test_costly_bodies_do_not_hold_the_loop(
    toy: Toy, name: str, key: str, statuses: set[int]
) -> None:
    async with toy.client(key) as client:
        await client.post("/v1/chat/completions", content=b"{}")  # compiles what is compiled once
        async with longest_hold() as most:
            answers = await asyncio.gather(
                *(client.post("/v1/chat/completions", content=COSTLY[name]) for _ in range(2))
            )
    assert {answer.status_code for answer in answers} <= statuses
    assert len(answers[0].text) < 600
    assert most[0] < MAX_HELD_SECONDS


@pytest.mark.asyncio
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.sampled(2)
async def test_one_fault_of_thousands_is_told(toy: Toy, name: str) -> None:
    path, body = WRONG[name]
    async with toy.client() as client:
        await client.post(path, content=b"{}")
        async with longest_hold() as most:
            answer = await client.post(path, json=body)
    assert answer.status_code == 400
    assert len(answer.text) < 600
    assert most[0] < MAX_HELD_SECONDS


@pytest.mark.asyncio
async def test_client_reads_its_refusal_while_it_sends(toy: Toy) -> None:
    headers = {"Authorization": "Bearer revoked", "content-type": "application/json"}
    async with (
        running_server(toy.app, "127.0.0.1", 0) as url,
        httpx2.AsyncClient(base_url=url, headers=headers, timeout=60) as client,
    ):
        for size in (0, 1_000, 300_000, 3_000_000):
            answer = await client.post("/v1/chat/completions", content=b"x" * size)
            assert answer.status_code == 401, size
