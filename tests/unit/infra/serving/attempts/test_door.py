"""The server that programs in boxes reach refuses what one attempt may not hold open."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx2

from ostinato.infra.agent.config import AgentRequest, HarnessConfig
from ostinato.infra.serving.attempts.door import MAX_REQUESTS, AttemptDoor
from tests.fakes.client_sessions import RENDERER, Sampler

BODY = {"model": "ostinato", "messages": [{"role": "user", "content": "a user asks"}]}
COUNT = "/v1/messages/count_tokens"


async def test_requests_at_once_of_one_attempt_are_limited_and_others_are_served() -> None:
    arrive = asyncio.Event()

    async def slow_body() -> AsyncIterator[bytes]:
        yield b" "
        await arrive.wait()
        yield json.dumps(BODY).encode()

    door = AttemptDoor(Sampler(), RENDERER, HarnessConfig(context_tokens=400))
    request = AgentRequest(prompt="", session_id="run.g0.t1")
    transport = httpx2.ASGITransport(app=door.app)
    async with (
        door.session(request, lambda: 0.0) as crowded,
        door.session(request, lambda: 0.0) as other,
        httpx2.AsyncClient(transport=transport, base_url="http://door") as client,
    ):
        key = {"authorization": f"Bearer {crowded.key}", "content-type": "application/json"}
        asked = [
            asyncio.create_task(client.post(COUNT, content=slow_body(), headers=key))
            for _ in range(MAX_REQUESTS)
        ]
        await asyncio.sleep(0.2)
        refused = await client.post(COUNT, json=BODY, headers=key)
        assert refused.status_code == 429
        assert f"{MAX_REQUESTS} requests of this attempt are open" in refused.text
        assert int(refused.headers["retry-after"]) >= 1
        theirs = {"authorization": f"Bearer {other.key}"}
        assert (await client.post(COUNT, json=BODY, headers=theirs)).status_code == 200
        arrive.set()
        answers = await asyncio.gather(*asked)
        assert {one.status_code for one in answers} == {200}
        again = await client.post(COUNT, json=BODY, headers=key)  # those places are free again
        assert again.status_code == 200
        assert not crowded.ended.is_set()
    await door.close()
