"""What a client may send: refused by size, time, encoding and nesting, and nobody else waits."""

import asyncio
import json

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from ostinato.infra.platform.errors import SandboxLost, StorageError
from ostinato.infra.serving.gateway import limits
from ostinato.infra.serving.gateway.failures import ApiError
from ostinato.infra.serving.gateway.limits import RequestLimits, scan_pieces
from ostinato.infra.serving.gateway.server import running_server
from tests.fakes.toy_gateway import Toy

HEADERS = {"Authorization": "Bearer key-of-team", "content-type": "application/json"}
CHAT = {"model": "ostinato", "messages": [{"role": "user", "content": "Fix first"}]}
CALLS = [
    {
        "id": "1",
        "function": {"name": "read_file", "arguments": json.dumps({"path": "a b " * 300_000})},
    }
]
PIECES = st.integers(1, 20) | st.just(limits.PIECE_BYTES)
SESSION = {"repository": "toy", "message": "Fix first in pkg/first.py"}


def chat(**changes: object) -> bytes:
    return json.dumps(CHAT | changes).encode()


BAD_BODIES = {
    "large": (b" " * (limits.MAX_BODY_BYTES + 1), 413),
    "deep": (b'{"model": ' + b"[" * 100_000, 400),
    "deep in a field": (chat(tool_choice=json.loads("[" * 40 + "]" * 40)), 400),
    "many": (b"[" + b"{}," * 30_000 + b"{}]", 400),
    "half pair": (chat(messages=[{"role": "user", "content": "\ud800"}]), 400),
    "half pair, raw": (chat().replace(b"Fix", b"\xed\xa0\x80"), 400),
    "utf-16": (chat().decode().encode("utf-16"), 400),
    "no json": (b"{", 400),
    "a name of a megabyte": (chat(model="m" * 1_000_000), 404),
    "a value of a megabyte": (chat(stop=["xxx"] * 100_000), 400),
    "messages": (chat(messages=CHAT["messages"] * 513), 400),
    "too long to be tokenised": (
        chat(messages=[{"role": "user", "content": "a" * 19_999}] * 2),
        400,
    ),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", BAD_BODIES)
async def test_bad_body_is_one_typed_refusal(toy: Toy, name: str) -> None:
    body, status = BAD_BODIES[name]
    async with toy.client() as client:
        answer = await client.post("/v1/chat/completions", content=body, headers=HEADERS)
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert len(answer.text) < 600


UNKNOWN = {"interaction_id": "x", "signal": "edit_kept"}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/feedback", UNKNOWN | {"interaction_id": "a\0"}, "interaction_id"),
        ("/v1/feedback", UNKNOWN | {"feedback_id": "\0"}, "feedback_id"),
        ("/v1/feedback", UNKNOWN | {"feedback_id": "gateway/abandoned"}, "feedback_id"),
        ("/v1/agent/sessions", SESSION | {"problem_kind": "a\0b"}, "problem_kind"),
    ],
)
async def test_names_that_no_database_holds_are_refused(
    toy: Toy, path: str, body: dict[str, str], field: str
) -> None:
    """PostgreSQL has no zero byte in a text; ids of the gateway's own signals are its own."""
    async with toy.client() as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


@pytest.mark.asyncio
@pytest.mark.parametrize("body", [b'{"model": 1,}', b'{"seed": ' + b"9" * 5_000 + b"}", b"{"])
async def test_what_is_no_json_is_told_as_that(toy: Toy, body: bytes) -> None:
    async with toy.client() as client:
        answer = await client.post("/v1/chat/completions", content=body, headers=HEADERS)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, None)
    assert error["message"].startswith("body is no JSON")


@pytest.mark.asyncio
async def test_calls_of_a_history_are_counted_before_they_are_tokenised(toy: Toy) -> None:
    said = [*CHAT["messages"], {"role": "assistant", "tool_calls": CALLS}]
    body = chat(messages=[*said, {"role": "tool", "content": "x", "tool_call_id": "1"}])
    async with toy.client() as client:
        answer = await client.post("/v1/chat/completions", content=body, headers=HEADERS)
    assert answer.status_code == 400
    assert "characters" in answer.json()["error"]["message"]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "paths",
    [
        ["a\0b"], ["/etc/passwd"], ["../x"], ["a//b"], ["pkg"], ["pkg/first.py/x.py"], ["new", "new/x.py"],
        ["é" * 128 + ".py"], ["a/" * 2_000 + "x.py"],
    ],
)  # fmt: skip
async def test_bad_path_is_refused(toy: Toy, paths: list[str]) -> None:
    async with toy.client() as client:
        files = dict.fromkeys(paths, "")
        answer = await client.post("/v1/agent/sessions", json=SESSION | {"files": files})
        opened = (await client.post("/v1/agent/sessions", json=SESSION)).json()["session_id"]
        later = await client.post(
            f"/v1/agent/sessions/{opened}/messages", json={"message": "x", "files": files}
        )
    assert answer.status_code == later.status_code == 400
    assert answer.json()["error"]["param"] == "files"
    assert len(answer.text) < 600


def check_body(body: bytes, piece_bytes: int) -> None:
    """Scans all pieces."""
    for _ in scan_pieces(body, piece_bytes):
        pass


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0")), st.booleans(), PIECES)
def test_any_text_is_let_through(text: str, is_ascii: bool, piece_bytes: int) -> None:
    body = json.dumps({text: [text, {"text": text}]}, ensure_ascii=is_ascii).encode()
    check_body(body, piece_bytes)


@given(
    st.integers(0xD800, 0xDFFF), st.text('a\\u"\U0001f600', max_size=6), st.text('a\\u"', max_size=6),
    PIECES,
)  # fmt: skip
def test_half_a_pair_is_refused_wherever_it_stands(
    half: int, before: str, after: str, piece_bytes: int
) -> None:
    with pytest.raises(ApiError, match="half"):
        check_body(json.dumps(before + chr(half) + after).encode(), piece_bytes)


def nest(strings: list[str], depth: int) -> object:
    return [nest(strings, depth - 1), *strings] if depth else {}


@given(st.lists(st.text('a\\u"[{,]}', max_size=6), max_size=4), PIECES)
def test_nesting_is_counted_outside_of_strings(strings: list[str], piece_bytes: int) -> None:
    check_body(json.dumps(nest(strings, limits.MAX_NESTING - 1)).encode(), piece_bytes)
    with pytest.raises(ApiError, match="nested"):
        check_body(json.dumps(nest(strings, limits.MAX_NESTING)).encode(), piece_bytes)


@pytest.mark.parametrize(
    ("part", "most"), [(b"1,", limits.MAX_COMMAS), (b"[]\n", limits.MAX_BRACKETS // 2 - 1)]
)
@pytest.mark.parametrize("piece_bytes", [999, limits.PIECE_BYTES])
def test_values_are_counted(part: bytes, most: int, piece_bytes: int) -> None:
    check_body(b"[" + part * most + b"]", piece_bytes)
    with pytest.raises(ApiError, match="holds more than"):
        check_body(b"[" + part * (most + 1) + b"]", piece_bytes)


@pytest.mark.parametrize("piece_bytes", [1, 5, 100])
def test_place_of_a_wrong_byte_is_told(piece_bytes: int) -> None:
    with pytest.raises(ApiError, match="at byte 7"):
        check_body('["éé"'.encode() + b"\xff]", piece_bytes)


@pytest.mark.asyncio
async def test_body_that_does_not_come_is_given_up(toy: Toy) -> None:
    said: list[Message] = []

    async def never() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        said.append(message)

    tenant = toy.context.config.tenants[0]
    temporary_archive = toy.context.uploads.temporary_archive
    app = RequestLimits(toy.app, lambda _: tenant, temporary_archive, body_seconds=0.01)
    await app(
        {"type": "http", "method": "POST", "path": "/v1/feedback", "headers": []}, never, send
    )
    assert said[0]["status"] == 408


@pytest.mark.asyncio
async def test_head_that_does_not_come_is_given_up(toy: Toy) -> None:
    async with running_server(toy.app, "127.0.0.1", 0, head_seconds=0.2) as url:
        port = int(url.rsplit(":", 1)[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /healthz HTTP/1.1\r\nhost:")
        async with asyncio.timeout(60):
            assert await reader.read() == b""
        writer.close()


@pytest.mark.asyncio
async def test_same_signal_counts_once_and_values_are_shares(toy: Toy) -> None:
    async with toy.client() as client:
        answer = (await client.post("/v1/agent/sessions", json=SESSION)).json()
        body = {"interaction_id": answer["interaction_id"], "signal": "thumbs_up"}
        for _ in range(3):
            assert (await client.post("/v1/feedback", json=body)).json()["stored"]
        for value in (-1e308, 1.5):
            refused = await client.post("/v1/feedback", json=body | {"value": value})
            assert refused.json()["error"]["param"] == "value"
        codes = [
            (await client.post("/v1/feedback", json=body | {"feedback_id": str(index)})).status_code
            for index in range(40)
        ]
    (row,) = toy.ledger.interactions.since(0)
    assert len(row.feedback) == 32
    assert codes[-1] == 400


@pytest.mark.asyncio
async def test_status_holds_nothing_of_other_tenants(toy: Toy) -> None:
    async with toy.client() as client, toy.client("key-of-slow") as stranger:
        await client.post("/v1/agent/sessions", json=SESSION)
        mine = (await client.get("/v1/status")).json()
        told = (await stranger.get("/v1/status")).json()
    assert mine["counters"]["interactions"] == 1
    assert mine["open_sessions"] == 1
    assert told["counters"] == {}
    assert told["open_sessions"] == 0
    assert "nano@1" not in json.dumps(mine)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [SandboxLost, StorageError, ZeroDivisionError])
async def test_fault_of_the_server_tells_no_path(toy: Toy, kind: type[Exception]) -> None:
    toy.workplaces.failure = kind("Traceback: /home/me/.ostinato/box")
    transport = httpx2.ASGITransport(app=toy.app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(
        transport=transport, base_url="http://gateway", headers=HEADERS
    ) as client:
        answer = await client.post("/v1/agent/sessions", json=SESSION)
    assert answer.status_code >= 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "/home" not in answer.text
