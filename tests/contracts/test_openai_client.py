"""OpenAI's own client against the gateway over a socket: answers, streams, and its error classes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionUserMessageParam

from ostinato.infra.serving.gateway.config import Caller, RateLimitConfig
from ostinato.infra.serving.gateway.issued_keys import IssuedKeys
from ostinato.infra.serving.gateway.server import running_server
from tests.fakes.toy_gateway import make_renderer, make_toy_gateway

pytestmark = pytest.mark.asyncio

ANSWER = "Fixed first in pkg/first.py."
QUESTION: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "Fix first"}]


@asynccontextmanager
async def connected(directory: Path) -> AsyncIterator[AsyncOpenAI]:
    toy = make_toy_gateway(directory, make_renderer(), lambda conversation: ANSWER)
    async with (
        running_server(toy.app, "127.0.0.1", 0) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="key-of-team", max_retries=0) as client,
    ):
        yield client


async def test_models_answer_and_stream_are_read(tmp_path: Path) -> None:
    async with connected(tmp_path) as client:
        (model,) = [model.id async for model in client.models.list()]
        whole = await client.chat.completions.create(model=model, messages=QUESTION)
        stream = await client.chat.completions.create(
            model=model, messages=QUESTION, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert whole.choices[0].message.content == ANSWER
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == ANSWER
    assert choices[-1].finish_reason == "stop"
    assert chunks[-1].usage == whole.usage


async def test_refusals_are_the_clients_own_errors(tmp_path: Path) -> None:
    slow = RateLimitConfig(requests_per_minute=1, burst_requests=1)
    _, slow_key = IssuedKeys(tmp_path).issue(Caller(name="acme", rate_limit=slow), 1.0)
    async with connected(tmp_path) as client:
        with pytest.raises(openai.AuthenticationError) as unknown:
            await client.with_options(api_key="wrong").models.list()
        with pytest.raises(openai.BadRequestError) as malformed:
            await client.chat.completions.create(model="x", messages=QUESTION, temperature=9)
        (model,) = [model.id async for model in client.models.list()]
        for count, is_asked in ((21, True), (3, False)):
            with pytest.raises(openai.BadRequestError, match="top_logprobs is"):
                await client.chat.completions.create(
                    model=model, messages=QUESTION, top_logprobs=count, logprobs=is_asked
                )
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("nowhere")
        limited = client.with_options(api_key=slow_key)
        await limited.models.list()
        with pytest.raises(openai.RateLimitError) as too_fast:
            await limited.models.list()
    assert unknown.value.code == "invalid_api_key"
    assert (malformed.value.code, malformed.value.param) == ("invalid_value", "temperature")
    assert too_fast.value.code == "rate_limit_exceeded"
    assert int(too_fast.value.response.headers["retry-after"]) >= 1
