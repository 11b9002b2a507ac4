"""Bytes that are no sound HTTP: one typed refusal, the connection ends, the next one is served."""

import asyncio
import json
import logging
import re
from contextlib import suppress

import pytest

from ostinato.infra.serving.gateway.server import running_server
from tests.fakes.toy_gateway import Toy

pytestmark = pytest.mark.asyncio

KEY = "authorization: Bearer key-of-team\r\n"
BODY = json.dumps(
    {"model": "ostinato", "messages": [{"role": "user", "content": "Fix first"}]}
).encode()
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
CHUNKS = "transfer-encoding: chunked\r\n"
HEALTH = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
LAST = HEALTH.replace(b"host", b"connection: close\r\nhost")


def post(framing: str, body: bytes, key: str = KEY) -> bytes:
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{key}content-type: application/json\r\n"
    )
    return f"{head}{framing}\r\n".encode("latin-1") + body


UNSOUND = {
    "two lengths": post(f"content-length: {len(BODY)}\r\ncontent-length: 5\r\n", BODY),
    # a proxy that goes by the other one takes what follows for another request
    "length and chunks": post(f"content-length: 5\r\n{CHUNKS}", CHUNKED),
    "chunks and length": post(f"{CHUNKS}content-length: {len(BODY)}\r\n", CHUNKED),
    "chunks twice": post(CHUNKS * 2, CHUNKED),
    "chunks of gzip": post("transfer-encoding: gzip, chunked\r\n", CHUNKED),
    "chunks behind a tab": post("transfer-encoding: \x0bchunked\r\n", CHUNKED),
    "name with a space": post("transfer-encoding : chunked\r\n", CHUNKED),
    "length below zero": post("content-length: -5\r\n", BODY),
    "length of a thousand digits": post(f"content-length: {'9' * 1000}\r\n", BODY),
    "chunk below zero": post(CHUNKS, b"-5\r\nhello\r\n0\r\n\r\n"),
    "chunk of 2^120": post(CHUNKS, b"f" * 30 + b"\r\nhello\r\n0\r\n\r\n"),
    "zero byte": b"GET /healthz HTTP/1.1\r\nhost: x\r\na: b\0c\r\n\r\n",
    "no host": b"GET /healthz HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /healthz HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": bytes.fromhex("16030100a5010000a10303") + bytes(160),
}


async def ask(port: int, sent: bytes) -> tuple[bytes, bytes]:
    """Head and body of all that comes until the server ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    came = b""
    async with asyncio.timeout(60):
        while piece := await reader.read(1 << 16):
            came += piece
    writer.close()
    head, _, body = came.partition(b"\r\n\r\n")
    return head, body


@pytest.mark.parametrize("name", UNSOUND)
async def test_unsound_bytes_are_one_typed_refusal(toy: Toy, name: str) -> None:
    async with running_server(toy.app, "127.0.0.1", 0) as url:
        port = int(url.rsplit(":", 1)[1])
        head, body = await ask(port, UNSOUND[name] + HEALTH)
        assert head.split()[1] in (b"400", b"505")
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
        assert (await ask(port, LAST))[1] == b'{"status":"ok"}'
    assert not toy.ledger.interactions.since(0)


async def test_a_bad_chunk_behind_a_refusal_ends_the_connection(
    toy: Toy, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_server(toy.app, "127.0.0.1", 0) as url:
        port = int(url.rsplit(":", 1)[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(CHUNKS, b"5\r\nhello\r\n", key=""))
        async with asyncio.timeout(60):
            assert b" 401 " in await reader.readuntil(b"\r\n\r\n")
            writer.write(b"-5\r\nhello\r\n")
            await reader.read()
        writer.close()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_requests_sent_at_once_are_answered_one_by_one(toy: Toy) -> None:
    """Each has its own key, and none is taken from the body of another."""
    smuggled = post(f"content-length: {len(BODY)}\r\n", BODY, key="")
    async with running_server(toy.app, "127.0.0.1", 0) as url:
        port = int(url.rsplit(":", 1)[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps({"interaction_id": smuggled.decode(), "signal": "edit_kept"}).encode()
        feedback = post(f"content-length: {len(body)}\r\n", body).replace(
            b"/v1/chat/completions", b"/v1/feedback", 1
        )
        writer.write(HEALTH * 300 + feedback + LAST)
        came = b""
        async with asyncio.timeout(60):
            while piece := await reader.read(1 << 16):
                came += piece
        writer.close()
    statuses = re.findall(rb"HTTP/1.1 (\d+)", came)
    assert statuses == [b"200"] * 300 + [b"404", b"200"]


async def test_endless_headers_end_the_connection(toy: Toy) -> None:
    async with running_server(toy.app, "127.0.0.1", 0) as url:
        port = int(url.rsplit(":", 1)[1])
        with suppress(ConnectionError):  # an end before all was read may be a reset
            head, _ = await ask(
                port, b"GET /healthz HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 300_000
            )
            assert head.split()[1] == b"400"
        assert (await ask(port, LAST))[1] == b'{"status":"ok"}'
