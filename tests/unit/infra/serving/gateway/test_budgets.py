"""A budget of tokens per day is reserved before an answer is sampled and settled by what was used."""

import asyncio
import json
from typing import Any

import pytest

from ostinato.infra.platform.errors import EngineError
from tests.fakes.toy_gateway import REQUEST, Toy
from tests.unit.infra.serving.gateway.test_issued_keys import CHAT, issue

pytestmark = pytest.mark.asyncio
CHATS = "/v1/chat/completions"


async def answer_all(toy: Toy, text: str, path: str, body: Any, count: int) -> list[int]:
    """Statuses of requests that all wait for the model at once."""
    gate = asyncio.Event()
    toy.model.wait = gate.wait
    async with toy.client(text) as client:
        sent = [asyncio.create_task(client.post(path, json=body)) for _ in range(count)]
        await asyncio.sleep(0.2)
        gate.set()
        statuses = [(await task).status_code for task in sent]
    toy.model.wait = None
    return statuses


@pytest.mark.parametrize(
    ("path", "body"),
    [(CHATS, CHAT), (CHATS, CHAT | {"stream": True}), ("/v1/agent/sessions", REQUEST)],
)
async def test_a_burst_passes_a_budget_by_one_request_at_most(
    toy: Toy, path: str, body: Any
) -> None:
    _, text = issue(toy, tokens_per_day=5)
    statuses = await answer_all(toy, text, path, body, 5)
    assert sorted(statuses) == [200, 429, 429, 429, 429]


async def test_requests_whose_tokens_fit_together_run_together(toy: Toy) -> None:
    _, text = issue(toy, tokens_per_day=800)
    statuses = await answer_all(toy, text, CHATS, CHAT | {"max_tokens": 100}, 4)
    assert statuses == [200] * 4
    statuses = await answer_all(toy, text, CHATS, CHAT | {"max_tokens": 1}, 4)
    assert statuses == [200] * 4  # unused tokens have been given back


async def test_a_refusal_for_reserved_tokens_ends_with_the_answers_that_hold_them(
    toy: Toy,
) -> None:
    _, text = issue(toy, tokens_per_day=300)
    gate = asyncio.Event()
    toy.model.wait = gate.wait
    async with toy.client(text) as client:
        first = asyncio.create_task(client.post(CHATS, json=CHAT))
        while not toy.model.requests:
            await asyncio.sleep(0)
        refused = await client.post(CHATS, json=CHAT)
        gate.set()
        assert (await first).status_code == 200
        assert (await client.post(CHATS, json=CHAT)).status_code == 200
    assert refused.json()["error"]["code"] == "tokens_reserved"
    assert int(refused.headers["retry-after"]) < 60


async def leave_before_the_first_token(toy: Toy, text: str) -> None:
    """Sends a streamed request and leaves while the model reads the prompt."""
    started = asyncio.Event()

    async def never() -> None:
        started.set()
        await asyncio.Event().wait()

    toy.model.wait = never
    body = json.dumps(CHAT | {"stream": True}).encode()
    incoming = asyncio.Queue()
    incoming.put_nowait({"type": "http.request", "body": body})

    async def send(message: Any) -> None:
        return None

    headers = {"authorization": f"Bearer {text}", "content-type": "application/json"}
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": CHATS,
        "raw_path": CHATS.encode(),
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    running = asyncio.create_task(toy.app(scope, incoming.get, send))
    await started.wait()
    incoming.put_nowait({"type": "http.disconnect"})
    await running
    toy.model.wait = None


async def test_a_stream_left_before_its_first_token_spends_its_prompt(toy: Toy) -> None:
    _, text = issue(toy, tokens_per_day=10_000)
    async with toy.client(text) as client:
        await leave_before_the_first_token(toy, text)
        status = (await client.get("/v1/status")).json()
        used = (await client.post(CHATS, json=CHAT)).json()["usage"]["prompt_tokens"]
    assert status["tokens_left_today"] == 10_000 - used
    assert len(toy.ledger.interactions.since(0)) == 1  # nothing to train on


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_the_engine_fails_spends_nothing(toy: Toy, stream: bool) -> None:
    _, text = issue(toy, tokens_per_day=5)
    toy.model.failure = EngineError("no engine")
    async with toy.client(text) as client:
        for _ in range(2):
            await client.post(CHATS, json=CHAT | {"stream": stream})
        toy.model.failure = None
        assert (await client.get("/v1/status")).json()["tokens_left_today"] == 5
        assert (await client.post(CHATS, json=CHAT)).status_code == 200
