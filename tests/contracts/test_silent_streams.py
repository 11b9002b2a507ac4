"""The client packages over a stream that pings: they read the answer, and nothing of the pings."""

from pathlib import Path
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from ostinato.infra.serving.gateway.server import running_server
from tests.contracts.test_conversations import READ, USER, gateway, renderer
from tests.fakes.three_apis import APIS, ScriptedModel

pytestmark = pytest.mark.asyncio
DECLARED: dict[str, Any] = {"type": "object"}


async def test_pings_disturb_no_client(tmp_path: Path) -> None:
    model = ScriptedModel(renderer(), f"I look.{READ}")
    model.pauses = {0: 0.3, 4: 0.3, len(model.scripts[0]) - 2: 0.3}
    toy = gateway(tmp_path, model, ping_seconds=0.05, slice_tokens=3)
    messages: Any = [USER]
    async with (
        running_server(toy.app, "127.0.0.1", 0) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="key-of-team", max_retries=0) as ours,
        AsyncAnthropic(base_url=url, api_key="key-of-team", max_retries=0) as theirs,
    ):
        tool: Any = {"type": "function", "function": {"name": "read", "parameters": DECLARED}}
        async with ours.chat.completions.stream(
            model="ostinato", messages=messages, tools=[tool]
        ) as stream:
            said = (await stream.get_final_completion()).choices[0].message
        tool = {"type": "function", "name": "read", "parameters": DECLARED, "strict": False}
        async with ours.responses.stream(model="ostinato", input=messages, tools=[tool]) as stream:
            response = await stream.get_final_response()
        tool = {"name": "read", "input_schema": DECLARED}
        async with theirs.messages.stream(
            model="ostinato", max_tokens=400, messages=messages, tools=[tool]
        ) as stream:
            message = await stream.get_final_message()
    assert said.tool_calls
    assert (said.content, said.tool_calls[0].function.name) == ("I look.", "read")
    assert [item.type for item in response.output] == ["message", "function_call"]
    assert [block.type for block in message.content] == ["text", "tool_use"]


async def test_a_failed_tool_says_so_to_the_model(tmp_path: Path) -> None:
    model = ScriptedModel(renderer(), "Done.")
    used = {"type": "tool_use", "id": "a", "name": "read", "input": {}}
    failed: dict[str, Any] = {"type": "tool_result", "tool_use_id": "a", "is_error": True}
    body = APIS["messages"].body([USER], ["read"], {})
    async with gateway(tmp_path, model).client() as client:
        for content in ("no such file", [{"type": "text", "text": "no such file"}]):
            body["messages"] = [
                USER,
                {"role": "assistant", "content": [used]},
                {"role": "user", "content": [failed | {"content": content}]},
            ]
            reply = await client.post("/v1/messages", json=body)
            assert reply.status_code == 200, reply.text
    assert all("error: no such file" in prompt for prompt in model.prompts)


@pytest.mark.parametrize(
    ("api", "part", "kind"),
    [
        ("chat", {"type": "image_url", "image_url": {"url": "data:,x"}}, "image_url"),
        ("chat", {"type": "input_audio", "input_audio": {}}, "input_audio"),
        ("messages", {"type": "image", "source": {}}, "image"),
        ("messages", {"type": "document", "source": {}}, "document"),
        ("responses", {"type": "input_image", "image_url": "data:,x"}, "input_image"),
    ],
)
async def test_a_refused_part_is_named_with_what_is_taken(
    tmp_path: Path, api: str, part: dict, kind: str
) -> None:
    toy = gateway(tmp_path, ScriptedModel(renderer(), "Done."))
    body = APIS[api].body([USER], [], {})
    body["input" if api == "responses" else "messages"] = [{"role": "user", "content": [part]}]
    async with toy.client() as client:
        reply = await client.post(APIS[api].path, json=body)
    told = reply.json()["error"]["message"]
    assert reply.status_code == 400
    assert repr(kind) in told
    assert "text" in told
    assert "valid string" not in told
