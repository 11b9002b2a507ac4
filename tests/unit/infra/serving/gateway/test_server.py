"""A real socket: it answers, a busy port is named, leaving the block frees it."""

import asyncio
from collections.abc import Callable

import httpx2
import pytest

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.serving.gateway.server import running_server, serve
from ostinato.infra.serving.gateway.signals import GATEWAY_SIGNALS
from tests.fakes.toy_gateway import Toy

pytestmark = pytest.mark.asyncio

HEADERS = {"Authorization": "Bearer key-of-team"}
CHAT = {"model": "ostinato", "messages": [{"role": "user", "content": "Fix first"}]}


async def test_gateway_answers_over_a_real_socket_and_names_a_busy_port(toy: Toy) -> None:
    async with running_server(toy.app, "127.0.0.1", 0) as url:
        async with httpx2.AsyncClient(base_url=url, headers=HEADERS, timeout=120) as client:
            assert (await client.get("/healthz")).json() == {"status": "ok"}
            pieces = await _lines(client)
        port = int(url.rsplit(":", 1)[1])
        with pytest.raises(ConfigError, match=f"port {port} is already in use"):
            await serve(toy.app, "127.0.0.1", port)
    assert pieces[-1] == "data: [DONE]"
    async with running_server(toy.app, "127.0.0.1", port) as url:
        assert url.endswith(str(port))


async def test_client_that_leaves_a_stream_is_recorded_as_abandoned(
    make_toy: Callable[..., Toy],
) -> None:
    toy = make_toy(lambda conversation: "word " * 60, stream_slice_tokens=1)
    slices = iter(range(10))

    async def answer_ten_slices_then_hang() -> None:
        if next(slices, None) is None:
            await asyncio.Event().wait()

    toy.model.wait = answer_ten_slices_then_hang
    async with running_server(toy.app, "127.0.0.1", 0) as url:
        async with (
            httpx2.AsyncClient(base_url=url, headers=HEADERS, timeout=120) as client,
            client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as answer,
        ):
            async for line in answer.aiter_lines():
                if '"content": "w' in line:
                    break
        while not (rows := toy.ledger.interactions.since(0)) or len(rows[0].feedback) < 3:
            await asyncio.sleep(0.01)
    assert {said.signal for said in rows[0].feedback} == {*GATEWAY_SIGNALS, "abandoned"}


async def _lines(client: httpx2.AsyncClient) -> list[str]:
    async with client.stream(
        "POST", "/v1/chat/completions", json=CHAT | {"stream": True}
    ) as answer:
        return [line async for line in answer.aiter_lines() if line]
