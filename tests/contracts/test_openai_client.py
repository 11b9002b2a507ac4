"""OpenAI's own client against the gateway over a socket: answers, streams, and its error classes."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionFunctionToolParam, ChatCompletionUserMessageParam
from openai.types.chat.completion_create_params import CompletionCreateParamsBase

from ostinato.infra.serving.gateway.answers.completions import NEUTRAL_VALUES
from ostinato.infra.serving.gateway.config import Caller, RateLimitConfig
from ostinato.infra.serving.gateway.issued_keys import IssuedKeys
from ostinato.infra.serving.gateway.schemas import ChatRequest
from ostinato.infra.serving.gateway.server import running_server
from tests.fakes.toy_gateway import REPAIR, make_renderer, make_toy_gateway, repairing

pytestmark = pytest.mark.asyncio

ANSWER = "Fixed first in pkg/first.py."
QUESTION: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "Fix first"}]
TOOLS: list[ChatCompletionFunctionToolParam] = [
    {"type": "function", "function": {"name": name}} for name in ("read_file", "run_terminal")
]
UNREAD_VALUES: dict[str, Any] = {
    "metadata": {"a": "b"},
    "prediction": {"type": "content", "content": "x = 1"},
    "prompt_cache_key": "a",
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "safety_identifier": "a",
    "service_tier": "flex",
    "user": "a",
}
"""Documented fields that change no answer."""
REFUSED_VALUES: dict[str, Any] = {
    "audio": {"voice": "alloy", "format": "wav"},
    "frequency_penalty": 0.5,
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "logit_bias": {"5": -100},
    "modalities": ["text", "audio"],
    "moderation": {"model": "m"},
    "n": 2,
    "parallel_tool_calls": False,
    "presence_penalty": -2,
    "reasoning_effort": "high",
    "response_format": {"type": "json_object"},
    "tool_choice": {"type": "function", "function": {"name": "read_file"}},
    "verbosity": "low",
    "web_search_options": {},
}


def say(conversation: str) -> str:
    return ANSWER


@asynccontextmanager
async def connected(
    directory: Path, answer: Callable[[str], str] = say
) -> AsyncIterator[AsyncOpenAI]:
    toy = make_toy_gateway(directory, make_renderer(), answer)
    async with (
        running_server(toy.app, "127.0.0.1", 0) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="key-of-team", max_retries=0) as client,
    ):
        yield client


async def test_models_answer_and_stream_are_read(tmp_path: Path) -> None:
    async with connected(tmp_path) as client:
        (listed,) = [model async for model in client.models.list()]
        assert await client.models.retrieve(listed.id) == listed
        model = listed.id
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
        for unserved in ("nowhere", f"{model}/other"):
            with pytest.raises(openai.NotFoundError, match=f"wanted '{model}'") as unknown_model:
                await client.models.retrieve(unserved)
            assert unknown_model.value.code == "model_not_found"
        limited = client.with_options(api_key=slow_key)
        await limited.models.list()
        with pytest.raises(openai.RateLimitError) as too_fast:
            await limited.models.list()
    assert unknown.value.code == "invalid_api_key"
    assert (malformed.value.code, malformed.value.param) == ("invalid_value", "temperature")
    assert too_fast.value.code == "rate_limit_exceeded"
    assert int(too_fast.value.response.headers["retry-after"]) >= 1


async def test_what_would_change_the_answer_is_refused_by_name(tmp_path: Path) -> None:
    async with connected(tmp_path) as client:

        async def ask(**fields: Any) -> str | None:
            answer = await client.chat.completions.create(
                model="ostinato", messages=QUESTION, extra_body=fields
            )
            return answer.choices[0].message.content

        of_other_servers = {"top_k": 5, "chat_template_kwargs": {"a": 1}, "drop_params": True}
        assert await ask(**UNREAD_VALUES, **of_other_servers) == ANSWER
        assert await ask(**dict.fromkeys(("stream", "temperature", "top_p", "stop"))) == ANSWER
        assert await ask(stop=[], frequency_penalty=0.0, parallel_tool_calls=False) == ANSWER
        for place in (0, -1):
            neutral = {name: values[place] for name, (values, _) in NEUTRAL_VALUES.items()}
            assert await ask(**neutral) == ANSWER
        for name, value in REFUSED_VALUES.items():
            with pytest.raises(openai.BadRequestError, match=f"{name} is .*, wanted null") as told:
                await ask(tools=TOOLS, **{name: value})
            assert (told.value.code, told.value.param) == ("unsupported_parameter", name)
            assert json.dumps(value) in told.value.message


async def test_every_documented_field_is_read_refused_or_without_effect() -> None:
    documented = set(CompletionCreateParamsBase.__annotations__) | {"stream"}
    assert set(REFUSED_VALUES) == set(NEUTRAL_VALUES)
    assert documented <= {*ChatRequest.model_fields, *NEUTRAL_VALUES, *UNREAD_VALUES}


async def test_tools_are_offered_unless_the_choice_is_none(tmp_path: Path) -> None:
    async with connected(tmp_path, repairing) as client:
        offered = await client.chat.completions.create(
            model="ostinato", messages=QUESTION, tools=TOOLS, tool_choice="auto"
        )
        untold = await client.chat.completions.create(
            model="ostinato", messages=QUESTION, tools=TOOLS, tool_choice="none"
        )
        with pytest.raises(openai.BadRequestError, match=r'is "required", wanted .* or "none"'):
            await client.chat.completions.create(
                model="ostinato", messages=QUESTION, tools=TOOLS, tool_choice="required"
            )
    assert offered.choices[0].finish_reason == "tool_calls"
    assert untold.choices[0].finish_reason == "stop"
    assert untold.choices[0].message.tool_calls is None
    assert untold.choices[0].message.content == REPAIR[0]
