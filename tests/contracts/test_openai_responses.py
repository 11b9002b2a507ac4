"""The Responses API over a socket: OpenAI's own client, what Codex sends, and the same tokens as in chats."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.platform.errors import EngineError
from ostinato.infra.serving.gateway.answers.openai_responses import (
    NEUTRAL_VALUES,
    ResponsesRequest,
)
from ostinato.infra.serving.gateway.recorder import PRIVATE_PREFIX
from ostinato.infra.serving.gateway.server import running_server
from tests.fakes.toy_gateway import REPAIR, Toy, make_renderer, make_toy_gateway, repairing

pytestmark = pytest.mark.asyncio

ANSWER = "Fixed first in pkg/first.py."
QUESTION = "Fix first"
NAMES = ("read_file", "run_terminal")
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": name, "parameters": {"type": "object"}, "strict": False}
    for name in NAMES
]
CHAT_TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in NAMES
]
EXPLAINED = HarnessConfig(dialect="full", system_prompt="x", context_tokens=3000)
"""Harness of a model that takes a client's functions."""
UNREAD_VALUES: dict[str, Any] = {
    "access_programs": {"cyber": "standard"},
    "background_options": {"completion_window": "soonest"},
    "image": {"context_compression": "auto"},
    "max_tool_calls": 3,
    "metadata": {"a": "b"},
    "prompt_cache_key": "a",
    "prompt_cache_retention": "24h",
    "safety_identifier": "a",
    "service_tier": "flex",
    "stream_options": {"include_obfuscation": False},
    "user": "a",
}
"""Documented fields that change no answer."""
REFUSED_VALUES: dict[str, Any] = {
    "background": True,
    "context_management": [{"type": "compaction", "compact_threshold": 1000}],
    "conversation": "conv_1",
    "moderation": {"model": "m"},
    "parallel_tool_calls": False,
    "previous_response_id": "interaction-1",
    "prompt": {"id": "pmpt_1"},
    "prompt_cache_options": {"prewarm": True},
    "reasoning": {"mode": "pro"},
    "text": {"format": {"type": "json_object"}},
    "tool_choice": {"type": "web_search"},
    "truncation": "auto",
}


def say(conversation: str) -> str:
    return ANSWER


@asynccontextmanager
async def connected(
    directory: Path, answer: Callable[[str], str] = say, **changes: Any
) -> AsyncIterator[tuple[AsyncOpenAI, Toy]]:
    toy = make_toy_gateway(directory, make_renderer(), answer, **changes)
    async with (
        running_server(toy.app, "127.0.0.1", 0) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="key-of-team", max_retries=0) as client,
    ):
        yield client, toy


async def ask(client: AsyncOpenAI, **fields: Any) -> Any:
    given: dict[str, Any] = {"model": "ostinato", "input": QUESTION}
    return await client.responses.create(**(given | fields))


async def streamed(client: AsyncOpenAI, **fields: Any) -> Response:
    """The same by the client's own reading of the events."""
    given: dict[str, Any] = {"model": "ostinato", "input": QUESTION}
    async with client.responses.stream(**(given | fields)) as stream:
        return await stream.get_final_response()


def without_ids(response: Response) -> Any:
    """What two answers to the same request have in common."""
    dumped = response.model_dump(exclude={"id", "parsed"})
    for item in dumped["output"]:
        item.pop("id")
        item.pop("call_id", None)
        item.pop("parsed_arguments", None)
        for part in item.get("content", ()):
            part.pop("parsed", None)
    return dumped


async def test_a_response_and_a_stream_say_the_same(tmp_path: Path) -> None:
    async with connected(tmp_path) as (client, _):
        whole = await ask(client, instructions="Be brief")
        events = await ask(client, instructions="Be brief", stream=True)
        seen = [event async for event in events]
        read = await streamed(client, instructions="Be brief")
    assert whole.output_text == read.output_text == ANSWER
    assert (whole.status, whole.object, whole.instructions) == ("completed", "response", "Be brief")
    assert without_ids(whole) == without_ids(read)
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    assert whole.usage.input_tokens_details.cached_tokens == 0
    assert whole.usage.output_tokens_details.reasoning_tokens == 0
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    kinds = [event.type for event in seen]
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    pieces = [event.delta for event in seen if event.type == "response.output_text.delta"]
    assert "".join(pieces) == ANSWER


async def test_an_answer_ends_at_its_tokens(tmp_path: Path) -> None:
    async with connected(tmp_path) as (client, _):
        whole = await ask(client, max_output_tokens=2)
        events = await ask(client, max_output_tokens=2, stream=True)
        last = [event async for event in events][-1]
    assert last.type == "response.incomplete"
    for short in (whole, last.response):
        (item,) = short.output
        assert short.status == item.status == "incomplete"
        assert short.incomplete_details.reason == "max_output_tokens"
        assert short.usage.output_tokens == 2


async def test_an_answer_that_says_nothing_is_an_empty_message(tmp_path: Path) -> None:
    async with connected(tmp_path, lambda _: "") as (client, _):
        whole, read = await ask(client), await streamed(client)
    assert [item.type for item in whole.output] == ["message"]
    assert without_ids(whole) == without_ids(read)


@pytest.mark.parametrize("asking", [ask, streamed])
async def test_a_tool_is_called_and_its_result_continues_the_same_tokens(
    tmp_path: Path, asking: Any
) -> None:
    async with connected(tmp_path, repairing) as (client, toy):
        asked = await asking(client, tools=TOOLS)
        (call,) = asked.output
        thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
        sent = call.model_dump(exclude_none=True, exclude={"parsed_arguments"})
        result = {"type": "function_call_output", "call_id": call.call_id}
        parts = [{"type": "input_text", "text": "def first(): ..."}]
        question = {"role": "user", "content": QUESTION}
        history = [question, thought, sent, result | {"output": parts}]
        await asking(client, input=history, tools=TOOLS)
        first, second = toy.model.requests[0], toy.model.requests[-1]
    assert (asked.status, call.type, call.name) == ("completed", "function_call", "read_file")
    assert json.loads(call.arguments)
    written = toy.context.renderer.encode_answer(REPAIR[0])
    known = (*first.token_ids, *written)
    assert second.token_ids[: len(known)] == known
    assert second.session_id == first.session_id


async def test_a_conversation_has_the_tokens_of_the_same_chat(tmp_path: Path) -> None:
    call = {"name": "read_file", "arguments": '{"path": "pkg/first.py::first"}'}
    results = ["def first(): ...", "passed"]
    chat: list[Any] = [
        {"role": "system", "content": "Be brief"},
        {"role": "developer", "content": "Mind the tests"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Fix "}, {"type": "text", "text": "it"}],
        },
        {
            "role": "assistant",
            "content": "Reading",
            "tool_calls": [{"id": id, "type": "function", "function": call} for id in "ab"],
        },
        *(
            {"role": "tool", "tool_call_id": id, "content": text}
            for id, text in zip("ab", results, strict=True)
        ),
        {"role": "assistant", "content": "Fixed."},
        {"role": "user", "content": "It still fails."},
    ]
    parts = [{"type": "input_text", "text": "Fix "}, {"type": "input_text", "text": "it"}]
    said = {"type": "output_text", "text": "Reading", "annotations": []}
    items: list[Any] = [
        {"type": "message", "role": "developer", "content": "Mind the tests"},
        {"role": "user", "content": parts},
        {"type": "message", "role": "assistant", "id": "msg_1", "content": [said]},
        *({"type": "function_call", "call_id": id, **call} for id in "ab"),
        *(
            {"type": "function_call_output", "call_id": id, "output": text}
            for id, text in zip("ab", results, strict=True)
        ),
        {"role": "assistant", "content": "Fixed."},
        {"role": "user", "content": "It still fails."},
    ]
    async with connected(tmp_path, harness=EXPLAINED) as (client, toy):
        await client.chat.completions.create(model="ostinato", messages=chat, tools=CHAT_TOOLS)
        await ask(client, instructions="Be brief", input=items, tools=TOOLS)
        chatted, responded = toy.model.requests
        first, second = toy.ledger.interactions.since(0)
    assert responded.token_ids == chatted.token_ids
    assert (first.tenant, first.problem_kind) == (second.tenant, second.problem_kind)


async def test_functions_of_a_namespace_are_called_in_it(tmp_path: Path) -> None:
    look_up = {"type": "function", "name": "look_up", "parameters": {"type": "object"}}
    unoffered = {"type": "custom", "name": "draw"}
    space = {"type": "namespace", "name": "mcp__dict", "description": "d"}
    tools = [space | {"tools": [look_up, unoffered]}]
    written = '<tool_call>{"name": "mcp__dict.look_up", "arguments": {"word": "plum"}}</tool_call>'
    async with connected(tmp_path, lambda _: written, harness=EXPLAINED) as (client, toy):
        asked = await ask(client, tools=tools)
        (call,) = asked.output
        assert call.type == "function_call"
        sent = call.model_dump(exclude_none=True)
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "a fruit"}
        await ask(client, input=[{"role": "user", "content": QUESTION}, sent, result], tools=tools)
        first, second = toy.model.requests
    assert (call.namespace, call.name) == ("mcp__dict", "look_up")
    assert json.loads(call.arguments) == {"word": "plum"}
    (told,) = asked.model_dump(exclude_unset=True)["tools"]
    assert told == space | {"tools": [look_up | {"description": None, "strict": False}]}
    assert second.session_id == first.session_id


async def test_what_codex_sends_is_taken(tmp_path: Path) -> None:
    fields: dict[str, Any] = {  # of version 0.171.0
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "high", "summary": "auto"},
        "text": {"verbosity": "low"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a21c4e",
        "client_metadata": {"thread_id": "01a21c4e"},
    }
    later = {"type": "message", "role": "developer", "content": "Today is Friday"}
    items = [
        {"type": "message", "id": "msg_1", "role": "developer", "content": "Be brief"},
        {"type": "message", "id": "msg_2", "role": "user", "content": QUESTION},
        later,
    ]
    server_tools = [
        {"type": "web_search", "external_web_access": False},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
    ]
    async with connected(tmp_path, harness=EXPLAINED) as (client, toy):
        said = await ask(client, input=items, tools=[*TOOLS, *server_tools], extra_body=fields)
        prompt = toy.context.renderer.decode(toy.model.requests[-1].token_ids)
        alone: dict[str, Any] = {"tool_choice": "none", "parallel_tool_calls": False}
        compacted = await ask(client, input=items, tools=TOOLS, extra_body=alone)
    assert said.output_text == compacted.output_text == ANSWER
    assert said.id.startswith(PRIVATE_PREFIX)
    assert [tool.type for tool in said.tools] == ["function", "function"]
    assert "web_search" not in prompt
    assert "apply_patch" not in prompt
    assert prompt.index("Be brief") < prompt.index(QUESTION) < prompt.index("Today is Friday")


async def test_logprobs_are_those_of_a_chat(tmp_path: Path) -> None:
    async with connected(tmp_path) as (client, _):
        chat = await client.chat.completions.create(
            model="ostinato", messages=[{"role": "user", "content": QUESTION}], logprobs=True
        )
        told = await ask(client, include=["message.output_text.logprobs"])
        read = await streamed(client, include=["message.output_text.logprobs"])
    assert chat.choices[0].logprobs is not None
    wanted = [(each.token, each.bytes) for each in chat.choices[0].logprobs.content or []]
    for response in (told, read):
        (part,) = response.output[0].model_dump()["content"]
        assert [(each["token"], each["bytes"]) for each in part["logprobs"]] == wanted


async def test_refusals_are_the_clients_own_errors(tmp_path: Path) -> None:
    image = {"type": "input_image", "image_url": "https://x/y.png"}
    file = {"type": "input_file", "file_id": "file_1"}
    async with connected(tmp_path) as (client, toy):
        with pytest.raises(openai.AuthenticationError):
            await ask(client.with_options(api_key="wrong"))
        with pytest.raises(openai.NotFoundError, match="wanted 'ostinato'"):
            await ask(client, model="gpt-5")
        for part in (image, file):
            with pytest.raises(openai.BadRequestError, match=rf"type is '{part['type']}'"):
                await ask(client, input=[{"role": "user", "content": [part]}])
        with pytest.raises(openai.BadRequestError, match="wanted an item of type message"):
            await ask(client, input=[{"type": "item_reference", "id": "msg_1"}])
        with pytest.raises(openai.BadRequestError, match="wanted a tool of type function"):
            await ask(client, tools=[{"type": "file_search", "vector_store_ids": ["vs_1"]}])
        with pytest.raises(openai.BadRequestError, match="wanted fewer than") as too_long:
            await ask(client, input="x = 1\n" * 2000)
        with pytest.raises(openai.BadRequestError, match="at most 512 items"):
            await ask(client, input=[{"role": "user", "content": "a"}] * 513)
        with pytest.raises(openai.BadRequestError, match="messages: List should have at least 1"):
            await ask(client, input=[{"type": "reasoning", "summary": []}])
        toy.model.failure = EngineError("gone")
        with pytest.raises(openai.InternalServerError) as failed:
            await ask(client)
    assert too_long.value.code == "context_length_exceeded"
    assert failed.value.code == "engine_failed"


async def test_tools_that_an_answer_could_not_tell_of_are_refused(tmp_path: Path) -> None:
    dotted = TOOLS[0] | {"name": "a.b"}
    space = {"type": "namespace", "name": "a", "description": "", "tools": [dotted | {"name": "b"}]}
    body = {"model": "ostinato", "input": QUESTION, "tools": [dotted | {"parameters": {"x": 0}}]}
    async with connected(tmp_path, harness=EXPLAINED) as (client, toy):
        for tools in ([dotted, space], [dotted, dotted]):
            with pytest.raises(openai.BadRequestError, match=r"two tools are named 'a\.b'"):
                await ask(client, tools=tools)
        with pytest.raises(openai.BadRequestError, match=r"wanted a tool of type function$"):
            await ask(client, tools=[space | {"tools": [space]}])
        async with toy.client() as plain:
            infinite = json.dumps(body).replace('"x": 0', '"x": 1e400')
            as_json = {"content-type": "application/json"}
            refused = await plain.post("/v1/responses", content=infinite, headers=as_json)
    assert refused.status_code == 400
    assert "parameters is {'x': inf}" in refused.json()["error"]["message"]


async def test_a_fault_after_the_start_is_a_failed_response(tmp_path: Path) -> None:
    async with connected(tmp_path) as (client, toy):
        toy.model.failure = EngineError("secret")
        events = await ask(client, stream=True)
        seen = [event async for event in events]
    last = seen[-1]
    assert last.type == "response.failed"
    assert last.sequence_number == len(seen) - 1
    assert last.response.error.code == "server_error"
    assert "engine_failed" in last.response.error.message
    assert "secret" not in last.response.error.message


async def test_what_would_change_the_answer_is_refused_by_name(tmp_path: Path) -> None:
    async with connected(tmp_path) as (client, _):
        assert (await ask(client, extra_body=UNREAD_VALUES)).output_text == ANSWER
        for place in (0, -1):
            neutral = {name: values[place] for name, (values, _) in NEUTRAL_VALUES.items()}
            assert (await ask(client, extra_body=neutral)).output_text == ANSWER
        for name, value in REFUSED_VALUES.items():
            with pytest.raises(openai.BadRequestError, match=f"{name} is .*, wanted null") as told:
                await ask(client, tools=TOOLS, extra_body={name: value})
            assert (told.value.code, told.value.param) == ("unsupported_parameter", name)
            assert json.dumps(value) in told.value.message


async def test_every_documented_field_is_read_refused_or_without_effect() -> None:
    documented = set(ResponseCreateParamsBase.__annotations__) | {"stream"}
    assert set(REFUSED_VALUES) == set(NEUTRAL_VALUES)
    assert documented <= {*ResponsesRequest.model_fields, *NEUTRAL_VALUES, *UNREAD_VALUES}


async def test_a_header_says_what_a_client_like_codex_cannot(tmp_path: Path) -> None:
    stored = {"extra_headers": {"X-Ostinato-Store": "true"}}
    async with connected(tmp_path) as (client, toy):
        kept = await ask(client, store=False, **stored)
        withdrawn = await ask(client, extra_headers={"X-Ostinato-Store": "false"})
        without_consent = client.with_options(api_key="key-of-private")
        refused = await ask(without_consent, store=False, **stored)
        (row,) = toy.ledger.interactions.since(0)
    assert row.interaction_id == kept.id
    assert withdrawn.id.startswith(PRIVATE_PREFIX)
    assert refused.id.startswith(PRIVATE_PREFIX)  # a header is no consent of the tenant


async def test_feedback_is_given_by_the_id_of_the_response(tmp_path: Path) -> None:
    async with connected(tmp_path) as (client, toy):
        answer = await ask(client)
        async with toy.client() as plain:
            given = await plain.post(
                "/v1/feedback", json={"interaction_id": answer.id, "signal": "thumbs_up"}
            )
    assert given.json()["stored"] is True
