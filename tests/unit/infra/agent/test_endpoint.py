"""Addresses of models that others serve: what does not answer is refused before anything is built."""

import asyncio
import http.server
import socket
import threading
import time
from collections.abc import Iterator
from typing import ClassVar

import pytest
from pydantic import ValidationError

from ostinato.infra.agent.endpoint import TRIES, Endpoint, open_client, probe
from ostinato.infra.agent.loop.messages import MessageConversation
from ostinato.infra.agent.tools.calls import ParsedAnswer
from ostinato.infra.platform.errors import ConfigError, EngineError

KEY = "TEST_ENDPOINT_KEY"
ANSWERED = ParsedAnswer((), "")


class Handler(http.server.BaseHTTPRequestHandler):
    """Knows one key and one model, and answers requests with the statuses of a list."""

    statuses: ClassVar[list[int]] = []

    def do_GET(self) -> None:
        is_known = self.headers["Authorization"] == "Bearer right"
        is_moved = self.path != "/v1/models"
        self.send_response(301 if is_moved else 200 if is_known else 401)
        self.send_header("location", "https://elsewhere/v1/models")
        self.end_headers()
        self.wfile.write(b'{"object": "list", "data": [{"id": "m", "object": "model"}]}')

    def do_POST(self) -> None:
        status = self.statuses.pop(0)
        self.send_response(status or 200)
        self.send_header("retry-after", "0")
        self.send_header("content-length", "5" if status else "500")  # 0: the answer breaks off
        self.end_headers()
        self.wfile.write(b"quota")


@pytest.fixture
def url() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def test_the_key_comes_from_the_named_variable(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = Endpoint(url=url, model="m", key_env=KEY)
    with pytest.raises(ConfigError, match=f"{KEY} is not set"):
        probe(endpoint)
    monkeypatch.setenv(KEY, "wrong")
    with pytest.raises(ConfigError, match=f"says 401, wanted 200; .*{KEY}"):
        probe(endpoint)
    monkeypatch.setenv(KEY, "right")
    probe(endpoint)
    assert "right" not in endpoint.model_dump_json()
    with pytest.raises(ConfigError, match="says 301, wanted 200; https://elsewhere"):
        probe(endpoint.model_copy(update={"url": url.removesuffix("/v1")}))
    with pytest.raises(ConfigError, match=r"--model is 'gpt', wanted one .*: m$"):
        probe(endpoint.model_copy(update={"model": "gpt"}))


def ask(url: str, *statuses: int) -> int:
    Handler.statuses = list(statuses)

    async def post() -> int:
        async with open_client(Endpoint(url=url, model="m")) as client:
            return (await client.post("/chat/completions", json={})).status_code

    return asyncio.run(post())


def test_a_busy_server_is_asked_again(url: str) -> None:
    assert ask(url, 429, 503, 200) == 200
    assert ask(url, *[503] * TRIES, 200) == 503
    assert Handler.statuses == [200]


def test_a_limit_that_stays_is_no_failure_of_the_model(url: str) -> None:
    with pytest.raises(ConfigError, match="says 429 4 times in a row \\(quota\\)"):
        ask(url, *[429] * TRIES)


def test_silence_is_refused_within_a_second() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts, and says nothing
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        seconds: list[float] = []
        while min(seconds, default=9.0) >= 1.0 and len(seconds) < 3:  # a busy machine adds to some
            started = time.monotonic()
            with pytest.raises(ConfigError, match="does not answer"):
                probe(Endpoint(url=url, model="m"))
            seconds.append(time.monotonic() - started)
        assert min(seconds) < 1.0
    with pytest.raises(ConfigError, match="does not answer"):
        probe(Endpoint(url=url, model="m"))


def test_an_answer_that_breaks_off_is_the_servers_failure(url: str) -> None:
    Handler.statuses = [0]

    async def answer() -> None:
        async with open_client(Endpoint(url=url, model="m")) as client:
            conversation = MessageConversation(
                client, "m", {}, *[lambda *_: ANSWERED] * 2, "Fix it"
            )
            await conversation.answer(5)

    with pytest.raises(EngineError, match="RemoteProtocolError"):
        asyncio.run(answer())


@pytest.mark.parametrize("url", ["http://me:secret@host/v1", "https://host/v1?key=secret", "host"])
def test_addresses_that_may_hold_a_key_are_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        Endpoint(url=url, model="m")
