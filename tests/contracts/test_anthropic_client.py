"""Anthropic's own client against the gateway over a socket: messages, streams, tools, and its error classes."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import MessageParam, ToolParam
from anthropic.types.message_create_params import MessageCreateParamsBase

from ostinato.infra.platform.errors import EngineError
from ostinato.infra.serving.gateway.answers.anthropic_messages import (
    NEUTRAL_VALUES,
    MessagesRequest,
)
from ostinato.infra.serving.gateway.recorder import PRIVATE_PREFIX
from ostinato.infra.serving.gateway.server import running_server
from tests.fakes.toy_gateway import REPAIR, Toy, make_renderer, make_toy_gateway, repairing

pytestmark = pytest.mark.asyncio

ANSWER = "Fixed first in pkg/first.py."
QUESTION: list[MessageParam] = [{"role": "user", "content": "Fix first"}]
TOOLS: list[ToolParam] = [
    {"name": name, "input_schema": {"type": "object"}} for name in ("read_file", "run_terminal")
]
UNREAD_VALUES: dict[str, Any] = {
    "cache_control": {"type": "ephemeral"},
    "diagnostics": {},
    "inference_geo": "eu",
    "metadata": {"user_id": "a"},
    "service_tier": "auto",
    "speed": "standard",
    "user_profile_id": "a",
    "workspace_id": "a",
}
"""Documented fields that change no answer."""
REFUSED_VALUES: dict[str, Any] = {
    "container": "c",
    "mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}],
    "output_config": {"format": {"type": "json_schema", "schema": {}}},
    "output_format": {"type": "json_schema", "schema": {}},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "tool_choice": {"type": "any"},
    "top_k": 5,
}


def say(conversation: str) -> str:
    return ANSWER


@asynccontextmanager
async def connected(
    directory: Path, answer: Callable[[str], str] = say
) -> AsyncIterator[tuple[AsyncAnthropic, Toy]]:
    toy = make_toy_gateway(directory, make_renderer(), answer)
    async with (
        running_server(toy.app, "127.0.0.1", 0) as url,
        AsyncAnthropic(base_url=url, api_key="key-of-team", max_retries=0) as client,
    ):
        yield client, toy


async def ask(client: AsyncAnthropic, **fields: Any) -> anthropic.types.Message:
    given: dict[str, Any] = {"model": "ostinato", "max_tokens": 60, "messages": QUESTION}
    return await client.messages.create(**(given | fields))


async def test_a_message_and_a_stream_say_the_same(tmp_path: Path) -> None:
    async with connected(tmp_path) as (client, _):
        whole = await ask(client, system="Be brief")
        async with client.messages.stream(
            model="ostinato", max_tokens=60, messages=QUESTION, system="Be brief"
        ) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            streamed = await stream.get_final_message()
        counted = await client.messages.count_tokens(
            model="ostinato", messages=QUESTION, system="Be brief"
        )
    (block,) = whole.content
    assert block.type == "text"
    assert block.text == text == ANSWER
    assert whole.stop_reason == streamed.stop_reason == "end_turn"
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (
        streamed.usage.input_tokens,
        streamed.usage.output_tokens,
    )
    assert counted.input_tokens == whole.usage.input_tokens


async def test_an_answer_ends_at_its_tokens_or_at_a_stop_sequence(tmp_path: Path) -> None:
    async with connected(tmp_path) as (client, _):
        short = await ask(client, max_tokens=2)
        stopped = await ask(client, stop_sequences=["never", " in "])
    assert (short.stop_reason, short.stop_sequence) == ("max_tokens", None)
    assert short.usage.output_tokens == 2
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " in ")
    assert stopped.content[0].model_dump()["text"] == ANSWER.partition(" in ")[0]


@pytest.mark.parametrize("streams", [False, True])
async def test_a_tool_is_called_and_its_result_continues_the_same_tokens(
    tmp_path: Path, streams: bool
) -> None:
    async def call(messages: list[MessageParam]) -> anthropic.types.Message:
        if not streams:
            return await ask(client, messages=messages, tools=TOOLS)
        async with client.messages.stream(
            model="ostinato", max_tokens=60, messages=messages, tools=TOOLS
        ) as stream:
            return await stream.get_final_message()

    async with connected(tmp_path, repairing) as (client, toy):
        asked = await call(QUESTION)
        (used,) = [block for block in asked.content if block.type == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": used.id, "content": "def first(): ..."}
        history: Any = [
            *QUESTION,
            {"role": "assistant", "content": asked.content},
            {"role": "user", "content": [result]},
        ]
        await call(history)
        first, second = (toy.model.requests[0], toy.model.requests[-1])
    assert (asked.stop_reason, used.name) == ("tool_use", "read_file")
    assert isinstance(used.input, dict)
    assert used.input
    written = toy.context.renderer.encode_answer(REPAIR[0])
    known = (*first.token_ids, *written)
    assert second.token_ids[: len(known)] == known
    assert second.session_id == first.session_id


async def test_no_tool_is_offered_where_the_choice_is_none(tmp_path: Path) -> None:
    async with connected(tmp_path, repairing) as (client, _):
        untold = await ask(client, tools=TOOLS, tool_choice={"type": "none"})
    assert untold.stop_reason == "end_turn"
    assert [block.type for block in untold.content] == ["text"]


async def test_refusals_are_the_clients_own_errors(tmp_path: Path) -> None:
    image = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
    async with connected(tmp_path) as (client, toy):
        with pytest.raises(anthropic.AuthenticationError) as unknown:
            await ask(client.with_options(api_key="wrong"))
        with pytest.raises(anthropic.NotFoundError, match="wanted 'ostinato'") as other:
            await ask(client, model="claude-opus-4-8")
        with pytest.raises(anthropic.BadRequestError, match="text, tool_use or tool_result"):
            await ask(client, messages=[{"role": "user", "content": [image]}])
        with pytest.raises(anthropic.BadRequestError, match="wanted fewer than") as too_long:
            await ask(client, messages=[{"role": "user", "content": "x = 1\n" * 2000}])
        with pytest.raises(anthropic.BadRequestError, match=r"messages: .*at most 512 items"):
            await ask(client, system="Be brief", messages=QUESTION * 512)
        server_tool = {"type": "web_search_20250305", "name": "web_search"}
        with pytest.raises(
            anthropic.BadRequestError, match=r"tools.0.type is 'web_search_20250305'"
        ):
            await ask(client, tools=[server_tool])
        with pytest.raises(anthropic.BadRequestError, match=r"stop_sequences.1 is ''"):
            await ask(client, stop_sequences=["a", ""])
        toy.model.failure = EngineError("gone")
        with pytest.raises(anthropic.InternalServerError) as failed:
            await ask(client)
    types = [
        error.value.body["error"]["type"]  # type: ignore[index]
        for error in (unknown, other, too_long, failed)
    ]
    assert types == [
        "authentication_error",
        "not_found_error",
        "invalid_request_error",
        "overloaded_error",
    ]


async def test_what_claude_code_sends_is_taken(tmp_path: Path) -> None:
    fields = {  # of version 2.1.332
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    }
    cached = {"type": "text", "text": "Be brief", "cache_control": {"type": "ephemeral"}}
    later: Any = [*QUESTION, {"role": "system", "content": "Today is Friday"}]
    long: Any = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}] * 2}]
    async with connected(tmp_path) as (client, toy):
        said = await ask(client, messages=later, system=[cached], extra_body=fields)
        prompt = toy.context.renderer.decode(toy.model.requests[-1].token_ids)
        with pytest.raises(anthropic.BadRequestError, match="a tool result has the call id 'a'"):
            await ask(client, messages=long)
        assert (await ask(client, messages=[{"role": "user", "content": []}])).content
    assert said.content
    assert prompt.index("Be brief") < prompt.index("Fix first") < prompt.index("Today is Friday")


async def test_a_key_comes_as_either_header(tmp_path: Path) -> None:
    async with connected(tmp_path) as (client, _):
        bearer = AsyncAnthropic(
            base_url=client.base_url, api_key=None, auth_token="key-of-team", max_retries=0
        )
        async with bearer:
            assert (await ask(bearer)).content


async def test_a_fault_after_the_start_is_an_event(tmp_path: Path) -> None:
    async with connected(tmp_path) as (client, toy):
        toy.model.failure = EngineError("gone")
        with pytest.raises(anthropic.APIStatusError, match=r"overloaded_error.*engine_failed"):
            async with client.messages.stream(
                model="ostinato", max_tokens=60, messages=QUESTION
            ) as stream:
                await stream.get_final_message()


async def test_a_bug_of_the_server_has_the_same_form(tmp_path: Path) -> None:
    async def crash() -> None:
        raise RuntimeError("secret")

    async with connected(tmp_path) as (client, toy):
        toy.model.wait = crash
        with pytest.raises(anthropic.InternalServerError) as failed:
            await ask(client)
    body: Any = failed.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "api_error"
    assert "secret" not in str(body)


async def test_what_would_change_the_answer_is_refused_by_name(tmp_path: Path) -> None:
    async with connected(tmp_path) as (client, _):
        effort = {"output_config": {"effort": "high"}}
        assert (await ask(client, extra_body=UNREAD_VALUES | effort)).content
        for place in (0, -1):
            neutral = {name: values[place] for name, (values, _) in NEUTRAL_VALUES.items()}
            assert (await ask(client, extra_body=neutral)).content
        for name, value in REFUSED_VALUES.items():
            with pytest.raises(anthropic.BadRequestError, match=f"{name} is .*, wanted null") as no:
                await ask(client, extra_body={name: value})
            assert json.dumps(value) in str(no.value.body)


async def test_every_documented_field_is_read_refused_or_without_effect() -> None:
    documented = set(MessageCreateParamsBase.__annotations__) | {"stream"}
    assert set(REFUSED_VALUES) == set(NEUTRAL_VALUES)
    assert documented <= {*MessagesRequest.model_fields, *NEUTRAL_VALUES, *UNREAD_VALUES}


async def test_feedback_is_given_by_the_id_of_the_message(tmp_path: Path) -> None:
    async with connected(tmp_path) as (client, toy):
        answer = await ask(client)
        async with toy.client() as plain:
            given = await plain.post(
                "/v1/feedback", json={"interaction_id": answer.id, "signal": "thumbs_up"}
            )
        private = [
            await ask(client, extra_body={"store": False}),
            await ask(client, extra_headers={"X-Ostinato-Store": "false"}),
        ]
    assert given.json()["stored"] is True
    assert all(answer.id.startswith(PRIVATE_PREFIX) for answer in private)
